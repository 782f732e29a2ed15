"""The gate: measure a private bundle against a policy, and write the report.

The order matters. What needs no private image comes first, then the ledger, and the noisy count of near-copies last: if
another rule has already failed, nothing is counted and nothing is spent.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

import rapid
from rapid.bundle import Bundle
from rapid.data import ImageSet, fit_images, load_images
from rapid.data.units import ONE_PERSON, PeopleFrom, plural
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.ledger import Ledger, Limit, default_path
from rapid.dp.spending import Charge
from rapid.errors import InputError, PrivacyRefused
from rapid.evaluate.neighbours import nearest_images
from rapid.files import content_hash
from rapid.methods import find_method, generator_of
from rapid.methods.base import Inspectable
from rapid.progress import Progress
from rapid.release import accounts, audits, membership, nearness
from rapid.release.contents import Contents, contents
from rapid.release.policy import Policy
from rapid.release.report import Report, write_report
from rapid.release.rules import Rule, rule, stopping
from rapid.rounding import as_typed
from rapid.sampling.generate import generate
from rapid.stopping import check_stop
from rapid.training import RunFolder

Json = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What to decide about.

    Attributes:
        model: the private bundle.
        policy: what it must fulfil.
        out: folder of the report.
        private: the images that it was trained on; None leaves ledger and near-copies unmeasured.
        classes: declared class names of `private`.
        people: where `private` says whose image each is.
        show_paths: name private files in error messages.
        label_column: see `load_images`.
        ledger: the ledger of `private`; default: `rapid.dp.ledger.default_path`.
        synthetic: images that the model made; None: they are drawn.
        count: number of images to draw; default: what the policy asks for.
        seed: of the drawn images.
        members: canaries that were in the private set, owned by the tester.
        non_members: canaries that were not.
        public: images like the private ones that are not private, which set the distance of near-copies; empty: those
            of `non_members`.
        audit: what `rapid audit --json` printed; None: an audit is run if the policy requires one.
        epsilon: of the count of near-copies; default: that of the policy.
    """

    model: Path
    policy: Policy
    out: Path
    private: Path | None = None
    classes: Sequence[str] | None = None
    people: PeopleFrom | None = None
    show_paths: bool = False
    label_column: str | None = None
    ledger: Path | None = None
    synthetic: Path | None = None
    count: int | None = None
    seed: int = 0
    members: Path | None = None
    non_members: Path | None = None
    public: tuple[Path, ...] = ()
    audit: Path | None = None
    epsilon: float | None = None


@dataclass(frozen=True)
class _Inputs:
    """Everything that was read and checked before anything is written or spent."""

    bundle: Bundle
    statement: accounts.Statement
    stored: ImageSet | None
    """The private images as they were read: their account in the ledger is a hash of these."""
    fitted: ImageSet | None
    """The same in the form of the bundle."""
    members: ImageSet | None
    non_members: ImageSet | None
    public: NDArray[np.uint8] | None
    synthetic: NDArray[np.uint8] | None
    audit: Json | None
    ledger: Path


def decide(
    request: Request, device: torch.device, key: Ed25519PrivateKey | None = None, *, resume: bool = False
) -> Report:
    """Measure, decide, and write the report.

    Formal guarantee: of the private images only the noisy count of near-copies is released, which is charged to the
    ledger before it is made. Everything else is computed from the bundle, the ledger, and images that are not private.

    Args:
        request: what to decide about.
        device: where to compute.
        key: signs the report.
        resume: continue in a folder with an earlier report on the same model; its count is used again.

    Raises:
        InputError: bad arguments or images; nothing was spent.
        Stopped: a stop was requested.
    """
    if request.policy.signature and key is None:
        raise InputError("key", "the policy wants a signed report; give a key, or make one with --new-key")
    inputs = _read(request)
    with RunFolder.enter(request.out, "release", {"model": inputs.bundle.digest}, resume=resume) as folder:
        content, rules = _measure(request, inputs, device, folder)
        return write_report(content, rules, request.out, key)


def _measure(
    request: Request, inputs: _Inputs, device: torch.device, folder: RunFolder
) -> tuple[Json, tuple[Rule, ...]]:
    policy, statement, bundle = request.policy, inputs.statement, inputs.bundle
    files, recomputed = contents(bundle), accounts.Recomputed.of(statement)
    rules = [*_content_rules(policy, files), *accounts.statement_rules(policy, statement, recomputed)]
    samples, why = _synthetic(request, inputs, device)
    attacks = _attack(inputs, policy, samples, device)
    rules += membership.membership_rules(policy.membership, attacks, statement.epsilon, statement.delta)
    audit = inputs.audit
    if audit is None and policy.audit.required:
        audit = audits.run_audit(bundle, statement)
    rules.append(audits.audit_rule(policy.audit, audit))
    near = None
    if samples is not None and inputs.public is not None and inputs.fitted is not None:
        near = nearness.Nearness.of(samples, inputs.public, policy.copies.reference_share, device)
    else:
        why = why or _unmeasured(inputs)
    before = _account(inputs)
    earlier = [*rules, *accounts.ledger_rules(policy, before, statement.delta)]
    counted: nearness.Counted | str = why
    if near is not None:
        counted = _count(request, inputs, near, before, stopping(earlier), folder, device)
    account = _account(inputs)
    rules += accounts.ledger_rules(policy, account, statement.delta)
    rules.append(nearness.copies_rule(policy.copies, counted, statement.unit))
    now = datetime.now(UTC).replace(microsecond=0)
    copies = {"why": counted} if isinstance(counted, str) else counted.record(near) if near else {}
    content: Json = {
        "rapid": rapid.__version__,
        "created": now.isoformat(),
        "valid_until": (now + timedelta(days=policy.valid_days)).isoformat(),
        "policy": policy.model_dump(mode="json"),
        "model": _model(bundle, files),
        "privacy": {
            "statement": bundle.privacy,
            "recomputed": recomputed.record(),
        },
        "best_guess": (1 + membership.largest_advantage(statement.epsilon, statement.delta)) / 2,
        "unit_words": statement.unit.removeprefix("one "),
        "counted": plural(statement.unit),
        "ledger": _excerpt(account, policy, statement.delta),
        "audit": audit or {"why": "the policy does not require an audit"},
        "membership": _membership(inputs, attacks, statement),
        "copies": copies if "why" in copies else copies | {"synthetic_drawn": request.synthetic is None},
    }
    return content, tuple(rules)


def _count(
    request: Request,
    inputs: _Inputs,
    near: nearness.Nearness,
    account: accounts.Account | str | None,
    stopped: Sequence[Rule],
    folder: RunFolder,
    device: torch.device,
) -> nearness.Counted | str:
    """The noisy count, or why it was not made. An earlier, interrupted report in this folder may have made it."""
    policy, statement, stored, fitted = request.policy, inputs.statement, inputs.stored, inputs.fitted
    assert stored is not None
    assert fitted is not None
    facts = PublicFacts.of(fitted)
    epsilon = request.epsilon or policy.copies.epsilon
    try:
        spent = nearness.budget(near, facts, epsilon, statement.delta)
        recorded = folder.checkpoint(nearness.NAME).exists()
        if not recorded:
            if stopped:
                names = ", ".join(one.name for one in stopped)
                return f"another rule has already failed ({names}), so nothing was counted or spent"
            if blurred := nearness.too_blurred(policy.copies, spent):
                return blurred
            most = policy.ledger.max_epsilon
            if most is not None and isinstance(account, accounts.Account):
                together, _ = account.together(policy, statement.delta, spent.events())
                if together > most:
                    return f"with the count, all releases together would spend more than {as_typed(most)}"
        book = Ledger(inputs.ledger)
        dataset = book.account(stored.images)
        if recorded:
            _check_recorded(folder.checkpoint(nearness.NAME), book, dataset)
        people = "" if stored.units is None else book.assignment(stored.images, stored.units)
        charge = Charge(book, dataset, folder.run_name(dataset, people), Limit(spent.epsilon, spent.delta))
        # without the mark of a new folder, which a refusal would remove
        access = PrivateAccess(fitted, facts, spent, RunFolder(request.out), device=device)
        with access.charged(charge):
            count = nearness.release_count(access, near)
    except PrivacyRefused as error:
        # it may name the ledger's path, which does not belong in the report
        warnings.warn(f"near-copies were not counted: {error}", stacklevel=2)
        return "the ledger does not admit the count"
    return nearness.Counted.of(count, spent, [statement.tree], policy.copies.confidence)


def _check_recorded(file: Path, book: Ledger, dataset: str) -> None:
    """Check that a recorded count is one that the ledger was charged for, under these images.

    Raises:
        InputError: it was exchanged, or its run was killed before it settled.
        TamperedLedger: see `Ledger`.
    """
    known = {place.sha256 for entry in book.entries() if entry.dataset == dataset for place in entry.checkpoints}
    if content_hash(file) not in known:
        raise InputError("resume", f"{file} is not a count that the ledger knows; remove it to count again")


def _read(request: Request) -> _Inputs:
    """Read and check everything."""
    policy = request.policy
    if request.epsilon is not None and not 0 < request.epsilon <= policy.copies.epsilon:
        most = as_typed(policy.copies.epsilon)
        raise InputError(
            "epsilon", f"must be positive and at most the policy's copies.epsilon, {most}", request.epsilon
        )
    if (request.members is None) != (request.non_members is None):
        missing = "members" if request.members is None else "non_members"
        raise InputError(missing, "attacks need both --members and --non-members")
    least = policy.copies.min_synthetic
    if request.count is not None and request.count < least:
        raise InputError("count", f"the policy wants at least {least:,} synthetic images", request.count)
    bundle = Bundle.open(request.model, "model", "private")
    if request.out.resolve().is_relative_to(bundle.path.resolve()):
        raise InputError("out", "lies in the bundle; give a folder outside", request.out)
    statement = accounts.Statement.of(bundle)
    audit = None if request.audit is None else audits.read_audit(request.audit)
    synthetic = None
    if request.synthetic is not None:
        synthetic = _open_images(request.synthetic, "synthetic", bundle).images
        if len(synthetic) < least:
            problem = f"has {len(synthetic):,} images; the policy wants at least {least:,}"
            raise InputError("synthetic", problem, request.synthetic)
    members, non_members = (
        None if path is None else _open_images(path, field, bundle)
        for path, field in ((request.members, "members"), (request.non_members, "non_members"))
    )
    for field, canaries in (("members", members), ("non_members", non_members)):
        if canaries is not None:
            membership.check_number(field, len(canaries))
    public = [_open_images(path, "public", bundle, labelled=False).images for path in request.public]
    if not public and non_members is not None:
        public = [non_members.images]
    if public and request.private is not None:
        nearness.check_number(sum(map(len, public)), policy.copies.reference_share)
    stored = None if request.private is None else _private(request, statement)
    return _Inputs(
        bundle=bundle,
        statement=statement,
        stored=stored,
        fitted=None if stored is None else fit_images(stored, bundle.config.image, "private"),
        members=members,
        non_members=non_members,
        public=np.concatenate(public) if public else None,
        synthetic=synthetic,
        audit=audit,
        ledger=request.ledger or default_path(),
    )


def _private(request: Request, statement: accounts.Statement) -> ImageSet:
    """The private images; their number and unit must be those of the statement, which are public."""
    assert request.private is not None
    if (request.people is not None) != (statement.unit == ONE_PERSON):
        flags = "give --unit-column or --unit-folders" if request.people is None else "leave out --unit-column"
        raise InputError("private", f"the unit of the model is {statement.unit}; {flags}")
    found = load_images(
        request.private,
        "private",
        request.classes,
        show_paths=request.show_paths,
        people=request.people,
        label_column=request.label_column,
    )
    if found.unit_count != statement.dataset_size:
        counted = f"{plural(statement.unit)}, and the model was trained on {statement.dataset_size:,}"
        raise InputError("private", f"has {found.unit_count:,} {counted}; give the images that it was trained on")
    return found


def _open_images(path: Path, field: str, bundle: Bundle, *, labelled: bool = True) -> ImageSet:
    """Images that are not private, in the form of the bundle, with labels that are numbers of its classes."""
    found = fit_images(load_images(path, field), bundle.config.image, field)
    if found.labels is None or not labelled or not bundle.classes:
        return replace(found, labels=None, classes=())
    number_of = {name: number for number, name in enumerate(bundle.classes)}
    if others := [name for name in found.classes if name not in number_of]:
        raise InputError(field, f"has a class '{others[0]}', which the model does not know", path)
    numbers = np.array([number_of[name] for name in found.classes], np.int64)
    return replace(found, labels=numbers[found.labels], classes=bundle.classes)


def _synthetic(request: Request, inputs: _Inputs, device: torch.device) -> tuple[NDArray[np.uint8] | None, str]:
    """Synthetic images if something is compared with them, or why there are none."""
    if inputs.synthetic is not None:
        return inputs.synthetic, ""
    if inputs.members is None and (inputs.fitted is None or inputs.public is None):
        return None, ""
    method = find_method(inputs.bundle.config.method)
    try:
        generator = generator_of(inputs.bundle, device)
    except InputError as error:
        if error.field == "model" and f"{method.name}, which makes no images" in error.problem:
            return None, "the model makes no images"
        raise
    count = request.count or request.policy.copies.min_synthetic
    with Progress("generating", count, "image") as progress:

        def advance(done: int, _: int) -> None:
            check_stop()
            progress.advance_to(done)

        return generate(generator, count, None, request.seed, advance).images, ""


def _attack(
    inputs: _Inputs, policy: Policy, samples: NDArray[np.uint8] | None, device: torch.device
) -> list[membership.Attack] | str:
    """Attacks on canaries, by the distance to the synthetic images and by what the method offers; or why none."""
    if inputs.members is None or inputs.non_members is None:
        return "no canaries were given"
    sets = (inputs.members, inputs.non_members)
    method = find_method(inputs.bundle.config.method)
    by_set: list[Mapping[str, NDArray[np.float64]]] = []
    for images in sets:
        found: dict[str, NDArray[np.float64]] = {}
        if samples is not None:
            found["distance to the nearest synthetic image"] = -nearest_images(images.images, samples, device).distances
        if isinstance(method, Inspectable):
            found |= method.membership_scores(inputs.bundle, images, device)
        by_set.append(found)
    scores = {name: (by_set[0][name], by_set[1][name]) for name in by_set[0]}
    if not scores:
        return "the method offers no attack"
    return membership.attacks(scores, policy.membership, inputs.statement.epsilon, inputs.statement.delta)


def _content_rules(policy: Policy, files: Contents) -> list[Rule]:
    if not policy.only_bundle_files:
        return []
    found = f"{len(files.hashes):,} files, all its own"
    if files.foreign:
        found = f"{files.foreign:,} files do not belong there: remove them"
    return [rule("contents", "the folder holds the files of the bundle and nothing else", found, not files.foreign)]


def _account(inputs: _Inputs) -> accounts.Account | str | None:
    return None if inputs.stored is None else accounts.read_account(inputs.ledger, inputs.stored, inputs.statement)


def _excerpt(account: accounts.Account | str | None, policy: Policy, delta: float) -> Json:
    if isinstance(account, accounts.Account):
        return account.record(policy, delta)
    return {"why": account or "no private images were given"}


def _membership(inputs: _Inputs, found: Sequence[membership.Attack] | str, statement: accounts.Statement) -> Json:
    if isinstance(found, str) or inputs.members is None or inputs.non_members is None:
        return {"why": str(found)}
    return {
        "members": len(inputs.members),
        "non_members": len(inputs.non_members),
        "allowed_advantage": membership.largest_advantage(statement.epsilon, statement.delta),
        "attacks": [attack.record() for attack in found],
    }


def _unmeasured(inputs: _Inputs) -> str:
    if inputs.fitted is None:
        return "no private images were given"
    return "no images were given that are like the private ones and are not private (--public or --non-members)"


def _model(bundle: Bundle, files: Contents) -> Json:
    return {
        "name": bundle.name,
        "method": bundle.config.method,
        "rapid": bundle.config.rapid,
        "classes": list(bundle.classes),
        "digest": bundle.digest,
        "components": bundle.config.components,
        "files": files.hashes,
        "files_sha256": hashlib.sha256(json.dumps(files.hashes, sort_keys=True).encode()).hexdigest(),
        "has_state": files.has_state,
    }
