"""The gate: measure a private bundle against a policy, and write the report.

The order matters. What needs no private image comes first, then the ledger, and the noisy count of near-copies last: if
another rule has already failed, nothing is counted and nothing is spent.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

import rapid
from rapid.bundle import Bundle
from rapid.data.units import plural
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.entry import Limit
from rapid.dp.ledger import Ledger
from rapid.dp.spending import Charge
from rapid.errors import InputError, PrivacyRefused
from rapid.evaluate.neighbours import nearest_images
from rapid.mapped import scratch_in
from rapid.methods import find_method, generator_of
from rapid.methods.base import Inspectable
from rapid.progress import Progress
from rapid.release import accounts, audits, membership, nearness, recorded
from rapid.release.contents import Contents, contents
from rapid.release.inputs import Inputs, Request, read_inputs
from rapid.release.policy import Policy
from rapid.release.report import Report, write_report
from rapid.release.rules import Rule, rule, stopping
from rapid.rounding import as_typed
from rapid.sampling.generate import generate
from rapid.stopping import check_stop
from rapid.training import RunFolder

Json = dict[str, Any]


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
    with scratch_in(request.out):
        inputs = read_inputs(request, resume=resume)
        with RunFolder.enter(request.out, "release", {"model": inputs.bundle.digest}, resume=resume) as folder:
            content, rules = _measure(request, inputs, device, folder)
            return write_report(content, rules, request.out, key)


def _measure(
    request: Request, inputs: Inputs, device: torch.device, folder: RunFolder
) -> tuple[Json, tuple[Rule, ...]]:
    policy, statement, bundle = request.policy, inputs.statement, inputs.bundle
    recorded.check_request(folder, request, inputs)
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
    if samples is not None and inputs.public is not None and inputs.private is not None:
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
    inputs: Inputs,
    near: nearness.Nearness,
    account: accounts.Account | str | None,
    stopped: Sequence[Rule],
    folder: RunFolder,
    device: torch.device,
) -> nearness.Counted | str:
    """The noisy count, or why it was not made. An earlier, interrupted report in this folder may have made it."""
    policy, statement, private = request.policy, inputs.statement, inputs.private
    assert private is not None
    assert private.digests is not None
    facts = PublicFacts.of(private)
    epsilon = request.epsilon or policy.copies.epsilon
    try:
        spent = nearness.budget(near, facts, epsilon, statement.delta)
        if not (again := recorded.is_recorded(folder)):
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
        dataset = book.account(private.digests)
        recorded.check_count(folder, book, dataset, spent)
        people = "" if private.units is None else book.assignment(private.digests, private.units)
        name, limit = folder.run_name(dataset, people), Limit(spent.epsilon, spent.delta)
        if not again:
            recorded.note_request(folder, request, inputs)
        charge = Charge(book, dataset, name, limit, folder.earlier_names(), facts.unit)
        # without the mark of a new folder, which a refusal would remove
        own = replace(private, stored=None, digests=None)
        access = PrivateAccess(own, facts, spent, RunFolder(request.out), device=device)
        with access.charged(charge):
            count = nearness.release_count(access, near)
    except PrivacyRefused as error:
        # it may name the ledger's path, which does not belong in the report
        warnings.warn(f"near-copies were not counted: {error}", stacklevel=2)
        return "the ledger does not admit the count"
    return nearness.Counted.of(count, spent, [statement.tree], policy.copies.confidence)


def _synthetic(request: Request, inputs: Inputs, device: torch.device) -> tuple[NDArray[np.uint8] | None, str]:
    """Synthetic images if something is compared with them, or why there are none."""
    if inputs.synthetic is not None:
        return inputs.synthetic, ""
    if inputs.members is None and (inputs.private is None or inputs.public is None):
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
    inputs: Inputs, policy: Policy, samples: NDArray[np.uint8] | None, device: torch.device
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


def _account(inputs: Inputs) -> accounts.Account | str | None:
    if inputs.private is None or inputs.private.digests is None:
        return None
    return accounts.read_account(inputs.ledger, inputs.private.digests, inputs.statement)


def _excerpt(account: accounts.Account | str | None, policy: Policy, delta: float) -> Json:
    if isinstance(account, accounts.Account):
        return account.record(policy, delta)
    return {"why": account or "no private images were given"}


def _membership(inputs: Inputs, found: Sequence[membership.Attack] | str, statement: accounts.Statement) -> Json:
    if isinstance(found, str) or inputs.members is None or inputs.non_members is None:
        return {"why": str(found)}
    return {
        "members": len(inputs.members),
        "non_members": len(inputs.non_members),
        "allowed_advantage": membership.largest_advantage(statement.epsilon, statement.delta),
        "attacks": [attack.record() for attack in found],
    }


def _unmeasured(inputs: Inputs) -> str:
    if inputs.private is None:
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
