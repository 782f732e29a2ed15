"""What each command of the command line does with its parsed arguments. Heavy imports wait until they are needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rapid.errors import InputError

if TYPE_CHECKING:
    from rapid.dp.ledger import Entry, Ledger

Command = Callable[[argparse.Namespace], None]
ACCOUNT_DIGITS = 4
"""At least so many digits of an account are to be given."""


def build_kb(options: argparse.Namespace) -> None:
    """`rapid build-kb`."""
    from rapid.config.presets import load_settings
    from rapid.runtime import choose_device
    from rapid.stages import build_public_bundle

    settings = load_settings(options.preset, options.overrides)
    device = choose_device(options.device)
    bundle = build_public_bundle(
        options.public, options.out, settings, device, resume=options.resume, networks=options.networks
    )
    print(f"public bundle: {bundle.path} ({len(bundle.knowledge_base()):,} entries in the knowledge base)")
    print(f"next: rapid train-private --base {bundle.path} --private PATH --epsilon 1 --out DIR")


def train_private(options: argparse.Namespace) -> None:
    """`rapid train-private`."""
    from rapid.bundle.card import privacy_in_words
    from rapid.bundle.format import Bundle
    from rapid.config.presets import private_settings
    from rapid.config.sections import Settings
    from rapid.dp import Ranks
    from rapid.runtime import choose_device
    from rapid.stages import train_private_bundle

    device = choose_device(options.device)
    with Ranks.join(device) as ranks:

        def read_settings() -> Settings:
            base = Bundle.open(options.base, "--base", "public")
            return private_settings(base.settings, options.preset, options.overrides)

        bundle = train_private_bundle(
            options.base,
            options.private,
            options.out,
            ranks.all_or_none(read_settings),
            epsilon=options.epsilon,
            delta=options.delta,
            device=device,
            resume=options.resume,
            ranks=ranks,
            ledger=options.ledger,
        )
    if bundle is None:
        return
    assert bundle.privacy is not None
    print(f"private bundle: {bundle.path}")
    print(privacy_in_words(bundle.privacy))
    print(f"next: rapid generate --model {bundle.path} --count 100 --out images.npz")


def plan(options: argparse.Namespace) -> None:
    """`rapid plan`."""
    from rapid.bundle.format import Bundle
    from rapid.config.presets import load_settings, private_settings
    from rapid.data import load_images
    from rapid.dp import default_delta
    from rapid.dp.proposal import EXPLANATION, choices, count_trained, propose, table
    from rapid.progress import Progress

    if options.base is not None:
        base = Bundle.open(options.base, "--base", "public")
        settings = private_settings(base.settings, options.preset, options.overrides)
        probed = "probe" in base.config.networks
    else:
        settings = load_settings(options.preset or "letters-mnist", options.overrides)
        probed = settings.probe.enabled
    images = None if options.private is None else load_images(options.private, "--private")
    probed = probed and (images is None or images.labels is not None)
    size: int = options.size if images is None else len(images)
    if size < 1:
        raise InputError(f"--size {size}: must be the number of private images, at least 1")
    if any(number < 1 for number in [*options.batch, *options.steps]):
        raise InputError("--batch, --steps: must be at least 1")
    delta = default_delta(size) if options.delta is None else options.delta
    parameters = count_trained(settings, len(images.classes) if images else 10)
    pairs = choices(settings.private, size, options.batch, options.steps)
    epsilons = options.epsilon or [1.0, 10.0]
    rows = []
    with Progress("planning", len(pairs) * len(epsilons), "plan") as progress:
        for proposal in propose(settings.private, size, delta, epsilons, pairs, parameters, probed=probed):
            rows.append(proposal.row())
            progress.advance()
    common = {
        "dataset_size": size,
        "delta": delta,
        "clip_norm": settings.private.clip_norm,
        "multiplicity": settings.private.multiplicity,
        "group_size": settings.private.group_size,
        "probe_share": settings.private.probe.share if probed else 0,
        "overlap_share": settings.private.overlap.share,
        "parameters": parameters,
    }
    if options.json:
        print(json.dumps(common | {"plans": rows}, indent=2))
        return
    print(f"{size:,} private images, delta {delta:.2g}, {parameters:,} trained parameters ({settings.preset})")
    shares = {"the probe": common["probe_share"], "the overlap check": common["overlap_share"]}
    if spent := [f"{name} by itself would spend {share:g} of it" for name, share in shares.items() if share]:
        print(f"epsilon is that of all together; {', '.join(spent)}")
    print()
    print(table(rows, settings.private.group_size))
    print(f"\n{EXPLANATION}")
    print("next: rapid train-private ... --epsilon E --set private.expected_batch=B --set private.steps=S")


def generate(options: argparse.Namespace) -> None:
    """`rapid generate`."""
    from rapid.bundle.format import Bundle
    from rapid.bundle.info import provenance
    from rapid.config.presets import generation_settings
    from rapid.data.export import check_target, write_samples
    from rapid.methods.rapid.generator import Generator
    from rapid.progress import Progress
    from rapid.runtime import choose_device

    check_target(options.out)
    bundle = Bundle.open(options.model, "--model")
    settings = generation_settings(bundle.settings, options.overrides)
    generator = Generator(bundle, choose_device(options.device), settings)
    labels = None
    if options.labels not in (None, "all"):
        cycle = generator.resolve_labels([label.strip() for label in options.labels.split(",")])
        labels = [cycle[number % len(cycle)] for number in range(options.count)]
    if options.count < 1:
        raise InputError(f"--count {options.count}: must be at least 1")
    with Progress("generating", options.count, "image") as progress:
        done = 0

        def advance(now: int, total: int) -> None:
            nonlocal done
            progress.advance(now - done)
            done = now

        samples = generator.generate(options.count, labels, options.seed, advance)
    write_samples(options.out, samples, generator.classes, provenance(bundle))
    print(f"{options.out}: {options.count:,} images, seed {samples.seed}")


def evaluate(options: argparse.Namespace) -> None:
    """`rapid evaluate`."""
    from rapid.evaluate import Request, check_target, write_report
    from rapid.evaluate import evaluate as run
    from rapid.evaluate.networks import CLASSIFIERS
    from rapid.evaluate.report import beside
    from rapid.runtime import choose_device

    check_target(options.out)
    named = tuple(name.strip() for name in options.classifiers.split(","))
    request = Request(
        options.synthetic,
        options.real,
        train_real=options.train_real,
        open_data=options.open_data,
        public=tuple(options.public),
        model=options.model,
        inception=options.inception,
        classifiers={"all": tuple(CLASSIFIERS), "none": ()}.get(options.classifiers, named),
        epochs=options.epochs,
    )
    report = run(request, choose_device(options.device))
    write_report(report, options.out)
    print("\n".join(report.summary()))
    page, picture = beside(options.out)
    print(f"report: {options.out}\npage: {page}\nclosest pairs: {picture}")
    print(report.content["notice"])


def serve(options: argparse.Namespace) -> None:
    """`rapid serve`."""
    try:
        from rapid_server.run import serve as run
        from rapid_server.settings import load
    except ModuleNotFoundError as error:
        raise _unserved("serve", error) from None
    flags = {name: value for name, value in vars(options).items() if name not in ("command", "run")}
    run(load(flags, os.environ))


def token(options: argparse.Namespace) -> None:
    """`rapid token`."""
    try:
        from rapid_server.auth import hash_token, new_token
        from rapid_server.entries import NAME
    except ModuleNotFoundError as error:
        raise _unserved("token", error) from None
    name: str = options.name
    if not NAME.fullmatch(name):
        raise InputError(f"NAME {name}: choose 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'")
    made = new_token()
    print(f"first line: the token of {name}, shown only now; second line: for tokens in the settings", file=sys.stderr)
    print(f"{made}\n{name}:{hash_token(made)}")


def info(options: argparse.Namespace) -> None:
    """`rapid info`."""
    from rapid.bundle.card import privacy_in_words
    from rapid.bundle.format import Bundle
    from rapid.bundle.info import describe

    bundle = Bundle.open(options.path, "DIR")
    print(json.dumps(describe(bundle), indent=2, ensure_ascii=False))
    if bundle.privacy is not None:
        print(privacy_in_words(bundle.privacy))


def demo(options: argparse.Namespace) -> None:
    """`rapid demo`."""
    from rapid.cli.demo import run_demo
    from rapid.runtime import choose_device

    out: Path = options.out
    run_demo(out, choose_device(options.device))


def ledger_show(options: argparse.Namespace) -> None:
    """`rapid ledger show`."""
    from rapid.dp.ledger import Ledger, default_path
    from rapid.dp.spending import balance, balances

    path: Path = options.ledger or default_path()
    ledger = Ledger(path) if path.exists() else None
    entries = ledger.entries() if ledger else []
    if options.dataset is None or ledger is None:
        shown = balances(entries)
    else:
        shown = [balance(entries, _account(ledger, entries, options.dataset))]
    if options.json:
        rows = [
            {
                "dataset": found.dataset,
                "limit": found.limit._asdict() if found.limit else None,
                "epsilon": found.epsilon,
                "delta": found.delta,
                "runs": [entry.model_dump(mode="json", exclude={"mac", "dataset"}) for entry in found.runs],
            }
            for found in shown
        ]
        print(json.dumps({"ledger": str(path), "datasets": rows}, indent=2))
        return
    print(f"{path}: {len(entries)} lines")
    for found in shown:
        print(f"\ndata set {found.dataset}")
        allowed = f" of {found.limit.epsilon:g}" if found.limit else ", no limit set"
        print(f"  epsilon {found.epsilon:.4g}{allowed} at delta {found.delta:.2g}, all runs composed (PRV)")
        for entry in found.runs:
            state = "spent" if entry.kind == "settle" else "reserved"
            print(f"  run {entry.run}  {entry.time}  {state}, asked for {entry.epsilon:g} at {entry.delta:.2g}")


def ledger_limit(options: argparse.Namespace) -> None:
    """`rapid ledger limit`."""
    from rapid.dp.ledger import Ledger, Limit, default_path
    from rapid.dp.releases import check_budget
    from rapid.dp.spending import set_limit

    check_budget(options.epsilon, options.delta, 1)
    ledger = Ledger(options.ledger or default_path())
    account = _account(ledger, ledger.entries(), options.dataset)
    found = set_limit(ledger, account, Limit(options.epsilon, options.delta))
    print(f"data set {account}: {found.epsilon:.4g} of epsilon {options.epsilon:g} spent at delta {options.delta:.2g}")


def ledger_verify(options: argparse.Namespace) -> None:
    """`rapid ledger verify`."""
    from rapid.dp.ledger import Ledger, default_path

    path: Path = options.ledger or default_path()
    if not path.exists():
        raise InputError(f"--ledger {path}: does not exist; nothing was spent with it")
    print(f"{path}: {len(Ledger(path).entries())} lines, none altered")


def audit(options: argparse.Namespace) -> None:
    """`rapid audit`."""
    from dataclasses import asdict

    from rapid.config.presets import load_settings
    from rapid.dp.audit import audit as run_audit
    from rapid.errors import PrivacyRefused

    found = run_audit(
        load_settings(options.preset, options.overrides),
        epsilon=options.epsilon,
        delta=options.delta,
        canaries=options.canaries,
        steps=options.steps,
        sample_rate=options.sample_rate,
        confidence=options.confidence,
    )
    if options.json:
        print(json.dumps(asdict(found) | {"refuted": found.refuted}, indent=2))
    else:
        print(f"claimed:  epsilon {found.claimed:g} at delta {found.delta:g}")
        print(
            f"measured: epsilon {found.bound:.3f} at least, with {found.confidence:.0%} confidence "
            f"({found.right} of {found.guesses} guesses right; {found.canaries} canaries, {found.steps} steps, "
            f"{found.seconds:.0f} s)"
        )
    if found.refuted:
        raise PrivacyRefused("the claim is refuted: do not use this build for private images, and report it")


def _account(ledger: Ledger, entries: Sequence[Entry], dataset: str) -> str:
    """The account that is meant: a path of images, or the beginning of a known account."""
    from rapid.data import load_images

    known = {entry.dataset for entry in entries if entry.dataset.startswith(dataset)}
    if len(known) == 1 and len(dataset) >= ACCOUNT_DIGITS:
        return known.pop()
    if not Path(dataset).exists():
        raise InputError(f"DATASET {dataset}: is neither a path of images nor an account of rapid ledger show")
    return ledger.account(load_images(Path(dataset), "DATASET").images)


def _unserved(command: str, error: ModuleNotFoundError) -> InputError:
    return InputError(f"rapid {command} needs {error.name}: pip install 'rapid[serve]'")
