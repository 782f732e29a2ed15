"""The report: `report.json` in canonical form, its page for people, and a detached signature.

report.json      the content: sorted keys, no spaces, UTF-8; written last
report.html      the same for people; its hash is in report.json
report.json.sig  Ed25519 over the bytes of report.json
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rapid.files import replacing
from rapid.release.page import render
from rapid.release.rules import Rule, stopping
from rapid.release.signature import fingerprint

JSON, PAGE, SIGNATURE = "report.json", "report.html", "report.json.sig"
FORMAT = 1
Json = dict[str, Any]

LIMITS = (
    "Differential privacy bounds what the model tells about any one unit. It does not make facts about groups private, "
    "and what is true of most people is true of any one of them.",
    "Public images that the model was made from, and images of --members and --non-members, have no protection.",
    "The number of private images (or people) and the list of classes count as public.",
    "The ledger knows only runs that used it. Who holds its disk and its key can spend without a charge. Two models "
    "that were trained with the same numbers look alike in it.",
    "Choosing settings by looking at private images, or at results on them that were not charged, is not covered.",
    "The audit tests the program that wrote this report, on made-up examples. It can refute a claim, not prove one.",
    "The attacks are a few simple ones. That they fail does not mean that every attack fails: epsilon bounds all of "
    "them. Their bounds treat canaries as independent and the members as a random half of the canaries.",
    "Near-copies are found by the distance of pixels: images that are moved, turned, cropped or recoloured are not.",
    "Whether the files of --private, --members and --synthetic are what they are said to be was not checked.",
)


@dataclass(frozen=True)
class Report:
    """A report.

    Attributes:
        content: ready for JSON, without the page's hash and the signer.
        rules: every rule of the policy with its outcome.
        signer: fingerprint of the key it was signed with; empty if it is not signed.
    """

    content: Json
    rules: tuple[Rule, ...]
    signer: str = ""

    @property
    def failed(self) -> list[Rule]:
        """The rules for which the release is refused."""
        return stopping(self.rules)


def canonical(content: Json) -> bytes:
    """The one form of JSON content that is signed.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def write_report(content: Json, rules: tuple[Rule, ...], out: Path, key: Ed25519PrivateKey | None) -> Report:
    """Write page, signature and JSON; each appears once it is complete, and `report.json` last.

    Args:
        content: of the report.
        rules: with their outcomes.
        out: the folder.
        key: signs it; None leaves it unsigned.
    """
    signer = "" if key is None else fingerprint(key.public_key())
    whole = content | {"format": FORMAT, "rules": [one.record() for one in rules], "signed_with": signer or None}
    whole |= {"outcome": "fail" if stopping(rules) else "pass", "limits": list(LIMITS)}
    page = render(whole).encode()
    whole["page"] = {"file": PAGE, "sha256": hashlib.sha256(page).hexdigest()}
    written = canonical(whole)
    # an earlier report in this folder must not be seen beside a new page or signature
    for name in (JSON, SIGNATURE):
        (out / name).unlink(missing_ok=True)
    _write(out / PAGE, page)
    if key is not None:
        _write(out / SIGNATURE, key.sign(written))
    _write(out / JSON, written)
    return Report(whole, rules, signer)


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as target:
        target.write_bytes(content)
