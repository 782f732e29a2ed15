"""`rapid release`: make a key, write a report, or verify one."""

from __future__ import annotations

import argparse

from rapid.cli.arguments import check_apart
from rapid.cli.train import private_images
from rapid.errors import InputError, PrivacyRefused
from rapid.release import Request, decide, new_key, read_policy, read_private_key, read_public_key, verify
from rapid.release.report import JSON, PAGE, SIGNATURE
from rapid.release.signature import fingerprint
from rapid.runtime import choose_device

MODES = {"new_key": (), "verify": ("public_key", "model", "policy")}
"""Flags that go with another mode than the writing of a report."""
DEFAULTS = {"seed": 0, "device": "auto"}
"""Of flags that are never None."""


def release(options: argparse.Namespace) -> None:
    """`rapid release`."""
    if options.new_key is not None:
        _alone(options, "new_key")
        public = new_key(options.new_key)
        print(f"private key: {options.new_key} (keep it secret)\npublic key:  {public}")
        print(f"fingerprint: {fingerprint(read_public_key(public))}")
    elif options.verify is not None:
        _alone(options, "verify")
        _verify(options)
    else:
        _decide(options)


def _decide(options: argparse.Namespace) -> None:
    for field in ("model", "policy", "out"):
        if getattr(options, field) is None:
            raise InputError(field, "is missing; a report needs --model, --policy and --out")
    if options.public_key is not None:
        raise InputError("public_key", "is for --verify; a report is signed with --key")
    check_apart(options, "private", "synthetic", "members", "non_members", "public")
    request = Request(
        model=options.model,
        policy=read_policy(options.policy),
        out=options.out,
        private=None if options.private is None else private_images(options),
        ledger=options.ledger,
        synthetic=options.synthetic,
        count=options.count,
        seed=options.seed,
        members=options.members,
        non_members=options.non_members,
        public=tuple(options.public),
        audit=options.audit,
        epsilon=options.epsilon,
    )
    key = None if options.key is None else read_private_key(options.key)
    report = decide(request, choose_device(options.device), key, resume=options.resume)
    width = max(len(rule.name) for rule in report.rules)
    for rule in report.rules:
        print(f"{rule.outcome:<12}  {rule.name:<{width}}  {rule.found}")
    print(f"report: {options.out / JSON}\npage:   {options.out / PAGE}")
    if report.signer:
        print(f"signed: {options.out / SIGNATURE} with the key {report.signer}")
    else:
        print("not signed")
    if report.failed:
        names = ", ".join(rule.name for rule in report.failed)
        raise PrivacyRefused(f"the policy is not met: {names}; do not release {options.model}")
    print(f"the policy is met; the report is valid until {report.content['valid_until']}")


def _verify(options: argparse.Namespace) -> None:
    if options.public_key is None:
        raise InputError("public_key", "is missing; give the .pub file of the signer")
    key, model = read_public_key(options.public_key), options.model
    policy = None if options.policy is None else read_policy(options.policy)
    found = verify(options.verify, key, model, policy)
    print(f"{options.verify}: genuine, signed with the key {fingerprint(key)}")
    print(f"{'the' if policy else 'its'} policy is met; valid until {found.valid_until.isoformat()}")
    if model is None:
        print(f"not checked: whether your copy of {found.model} is the model of the report (give --model)")
    else:
        print(f"{model}: the model of the report, all {found.files} files of it")


def _alone(options: argparse.Namespace, mode: str) -> None:
    """Refuse flags that have no effect in this mode."""
    for field, value in vars(options).items():
        if field not in (mode, *MODES[mode], "run", "command") and value not in (None, [], False, DEFAULTS.get(field)):
            raise InputError(field, f"does not go with --{mode.replace('_', '-')}; leave it out")
