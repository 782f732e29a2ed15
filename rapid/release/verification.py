"""Checks of a report: whether it is genuine, still holds, and is about this bundle."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import BaseModel, Field, ValidationError

from rapid.errors import InputError, PrivacyRefused
from rapid.parsing import parse_json
from rapid.release.contents import differences
from rapid.release.policy import Policy
from rapid.release.report import FORMAT, JSON, PAGE, SIGNATURE, canonical
from rapid.release.signature import is_signed


class _Model(BaseModel):
    name: str
    files: dict[str, str] = Field(min_length=1)


class _Page(BaseModel):
    sha256: str


class _Report(BaseModel):
    format: int
    outcome: str
    valid_until: datetime
    model: _Model
    policy: dict[str, Any]
    page: _Page
    rules: list[dict[str, Any]]


@dataclass(frozen=True)
class Verified:
    """A genuine report.

    Attributes:
        model: name of the bundle.
        files: number of its files.
        valid_until: when it expires.
    """

    model: str
    files: int
    valid_until: datetime


def verify(
    folder: Path,
    key: Ed25519PublicKey,
    model: Path | None = None,
    policy: Policy | None = None,
    now: datetime | None = None,
) -> Verified:
    """Check a report: its signature, its page, its outcome, its age, the bundle's files, and its policy.

    Args:
        folder: with the report.
        key: of the signer, from a source that is trusted.
        model: the bundle; None leaves it unchecked.
        policy: by which the report should have been made; None leaves it unchecked.
        now: default: the time of this machine.

    Raises:
        InputError: there is no signed report, or no bundle.
        PrivacyRefused: the report is not genuine, expired, or says no; or the bundle is another one.
    """
    written, signature = _read(folder / JSON, "report"), _read(folder / SIGNATURE, "signature")
    if not is_signed(key, signature, written):
        raise PrivacyRefused(
            "the signature is not that of this report by this key: it was altered, or signed by another"
        )
    try:
        content = parse_json(written)
        report = _Report.model_validate(content)
    except (ValueError, ValidationError):
        raise InputError("verify", "is a report of another version of rapid", folder) from None
    if report.format != FORMAT or canonical(content) != written:
        raise InputError("verify", "is a report of another version of rapid", folder)
    problems = []
    page = folder / PAGE
    if not page.is_file() or hashlib.sha256(page.read_bytes()).hexdigest() != report.page.sha256:
        problems.append(f"{PAGE} is not the page of this report")
    if report.outcome != "pass":
        failed = ", ".join(str(one.get("name")) for one in report.rules if one.get("stops"))
        problems.append(f"the report says that the policy is not met: {failed}")
    if (now or datetime.now(UTC)) > report.valid_until:
        problems.append(f"it expired at {report.valid_until.isoformat()}")
    if policy is not None and report.policy != policy.model_dump(mode="json"):
        problems.append("it was made by another policy")
    if model is not None:
        problems += _other_bundle(report.model.files, model)
    if problems:
        raise PrivacyRefused("the signature is good, but " + "; ".join(problems))
    return Verified(report.model.name, len(report.model.files), report.valid_until)


def _other_bundle(files: dict[str, str], model: Path) -> list[str]:
    if not model.is_dir():
        raise InputError("model", "is not a folder; give the bundle", model)
    changed, more = differences(files, model)
    problems = []
    if changed:
        problems.append(f"{len(changed)} files of --model are not those of the report, the first is {changed[0]}")
    if more:
        # their names may tell something
        problems.append(f"--model has {more} files that the report does not have")
    return problems


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        raise InputError("verify", f"has no {what} ({path.name})", path.parent) from None
