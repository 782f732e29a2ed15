"""The methods beside each other: the same private images, epsilon, delta, minutes of private training, and evaluation.

Every step is a command that a user would run, and none is run twice. Private stages get `--minutes`, so each takes as
many steps as fit. Public stages have minutes of their own, which the table tells. Results go to `--report`:
`results.json`, `table.md`, and a picture for each row in `samples`; rows that are there, and not asked for, stay.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from commands import Commands, at_least, begin_with, told
from methods_table import Json, read_json, save_picture, write_results

from rapid.evaluate.classification import picture_beside
from rapid.evaluate.networks import CLASSIFIERS
from rapid.files import replacing, write_json

NETWORKS = ("resnet", "wideresnet", "resnext")
SEED = 0
"""Of generation."""
PRIVATE = ("private.", "generation.")
"""Settings of the private stage; others belong to the public one, if there is one."""


@dataclass(frozen=True)
class Recipe:
    """How a method is run.

    Attributes:
        method: as in `--method`.
        preset: of both stages; None: settings that the method chooses itself.
        public: whether it has a public stage here.
        classifies: whether it makes no images.
        networks: trained networks that the public stage builds on.
    """

    method: str
    preset: str | None
    public: bool
    classifies: bool = False
    networks: str | None = None


RECIPES = {
    "rapid": Recipe("rapid", "scripts", public=True, networks="builtin:scripts"),
    "rapid-auto": Recipe("rapid", None, public=True),
    "dpdm": Recipe("dpdm", "dpdm-small", public=False),
    "dp-gan": Recipe("dp-gan", "dp-gan-small", public=False),
    "dp-diffusion": Recipe("dp-diffusion", "dp-diffusion", public=True),
    "dp-classifier": Recipe("dp-classifier", "classifier-small", public=True, classifies=True),
    "dp-classifier-cold": Recipe("dp-classifier", "classifier-small", public=False, classifies=True),
}
"""By name of the row."""
DEFAULT = ("rapid", "dpdm", "dp-gan", "dp-diffusion", "dp-classifier")


@dataclass(frozen=True)
class Plan:
    """What all rows have in common.

    Attributes:
        data: folder of the image sets, `NAME.npz`.
        private: name of the private set.
        test: name of the real test set.
        public: names of the public sets.
        minutes: of each private stage.
        public_minutes: of the public stages that choose their own settings.
        count: synthetic images of each row.
        classifiers: for `rapid evaluate`.
        delta: None for the default of `rapid train-private`.
        features: of a reference network, for `rapid evaluate`; None: each report trains a network on the public sets.
        threads: of each command; None: its own choice.
        more: further settings by name of the row, as `section.name=value`.
    """

    data: Path
    private: str
    test: str
    public: tuple[str, ...]
    minutes: float
    public_minutes: float
    count: int
    classifiers: str
    delta: float | None = None
    features: Path | None = None
    threads: int | None = None
    more: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """The file of a set."""
        return self.data / f"{name}.npz"

    @property
    def public_sets(self) -> list[object]:
        """The public sets as arguments."""
        return [word for name in self.public for word in ("--public", self.path(name))]


class Bench:
    """The folder in which the benchmark runs.

    Args:
        out: holds bundles, images and reports.
        plan: what is run.
    """

    def __init__(self, out: Path, plan: Plan) -> None:
        self.out, self.plan, self.commands = out, plan, Commands(out)
        self._environment = None if plan.threads is None else os.environ | {"OMP_NUM_THREADS": str(plan.threads)}

    def rapid(self, step: str, done: Path, *arguments: object) -> str:
        """Run a command of rapid, unless `done` is there; returns what it said."""
        said, before = self.out / "said" / f"{step}.txt", _processor()
        try:
            self.commands.run(step, done, arguments, environment=self._environment, said=said)
        finally:
            known = self.processor
            write_json(self.out / "processor.json", known | {step: known.get(step, 0.0) + _processor() - before})
        return said.read_text(encoding="utf-8") if said.exists() else ""

    @property
    def processor(self) -> dict[str, float]:
        """Seconds of processor time of each step, of all cores together."""
        file = self.out / "processor.json"
        return read_json(file) if file.exists() else {}

    def public(self, name: str) -> Path:
        """The public bundle of a row's method."""
        recipe, bundle = RECIPES[name], self.out / f"{name}-public"
        how: list[object] = ["--method", recipe.method]
        how += ["--preset", recipe.preset] if recipe.preset else ["--minutes", self.plan.public_minutes]
        how += ["--networks", recipe.networks] if recipe.networks else []
        how += self._settings(name, public=True)
        self.rapid(
            f"{name}-public",
            bundle / "config.json",
            *("build-kb", *self.plan.public_sets, *how, "--out", bundle, *_resume(bundle)),
        )
        return bundle

    def private(self, name: str, epsilon: float) -> Path:
        """The private bundle of a row."""
        recipe, bundle, plan = RECIPES[name], self.out / f"{name}-{epsilon:g}", self.plan
        how: list[object] = ["--base", self.public(name)] if recipe.public else ["--preset", recipe.preset]
        how += [] if plan.delta is None else ["--delta", plan.delta]
        how += self._settings(name, public=False)
        self.rapid(
            bundle.name,
            bundle / "config.json",
            *("train-private", *how, "--private", plan.path(plan.private), "--epsilon", epsilon),
            *(
                "--minutes",
                plan.minutes,
                "--out",
                bundle,
                "--ledger",
                self.out / "ledger.jsonl",
                *_resume(bundle),
            ),
        )
        return bundle

    def _settings(self, name: str, *, public: bool) -> list[object]:
        """The further settings of a stage of a method as arguments."""
        own = self.plan.more.get(name, ())
        if RECIPES[name].public:
            own = [one for one in own if one.startswith(PRIVATE) != public]
        return [word for setting in own for word in ("--set", setting)]

    def images(self, bundle: Path, variant: str) -> tuple[Path, str]:
        """Balanced synthetic images of a bundle, and what `rapid generate` said."""
        step = f"{bundle.name}-{variant}" if variant else bundle.name
        target = self.out / f"{step}.npz"
        attempts = ("--set", "generation.attempts=1") if variant == "drawn" else ()
        said = self.rapid(
            f"{step}-generate",
            target,
            *("generate", "--model", bundle, "--count", self.plan.count, "--seed", SEED, *attempts, "--out", target),
        )
        return target, said

    def report(self, step: str, images: Path, classifiers: str) -> Json:
        """What `rapid evaluate` says of images."""
        target, plan = self.out / f"{step}.json", self.plan
        features = plan.public_sets if plan.features is None else ["--features", plan.features]
        self.rapid(
            f"{step}-evaluate",
            target,
            *("evaluate", "--synthetic", images, "--real", plan.path(plan.test), *features),
            *("--classifiers", classifiers, "--out", target),
        )
        return read_json(target)

    def floor(self) -> Json:
        """Fidelity of as many real training images: what a perfect generator would have."""
        step, target = "real", self.out / "real.npz"
        if not target.exists():
            with np.load(self.plan.path(self.plan.private)) as found:
                size = len(found["images"])
                rows = np.sort(np.random.default_rng(0).permutation(size)[: self.plan.count])
                chosen = {name: found[name][rows] if len(found[name]) == size else found[name] for name in found}
            with replacing(target) as path, path.open("wb") as stream:
                np.savez(stream, **chosen)
        fidelity: Json = self.report(step, target, "none")["fidelity"]["synthetic"]
        return fidelity


def rows_of(bench: Bench, name: str, epsilon: float) -> list[Json]:
    """The rows of a method at an epsilon: one, or two if its images can be chosen by a probe."""
    recipe, plan = RECIPES[name], bench.plan
    bundle = bench.private(name, epsilon)
    times, config = bench.commands.times, read_json(bundle / "config.json")
    common = {
        "name": name,
        "epsilon": epsilon,
        "private_set": plan.private,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "threads": plan.threads,
        "minutes": plan.minutes,
        "seconds": {
            "public": times.get(f"{name}-public") if recipe.public else None,
            "private": times.get(bundle.name),
        },
        "processor": {
            "public": bench.processor.get(f"{name}-public") if recipe.public else None,
            "private": bench.processor.get(bundle.name),
        },
        "privacy": read_json(bundle / "privacy.json"),
        "settings": config["settings"],
    }
    if recipe.classifies:
        target = bench.out / f"{bundle.name}-test.json"
        test = plan.path(plan.test)
        bench.rapid(f"{bundle.name}-evaluate", target, "evaluate", "--model", bundle, "--real", test, "--out", target)
        found = read_json(target)
        picture = {"picture": str(picture_beside(target))}
        return [common | picture | {"accuracy": 100 * found["accuracy"], "calibration": found["calibration"]}]
    variants = ("drawn", "probe") if "probe" in config["components"] else ("",)
    rows = []
    for variant in variants:
        images, said = bench.images(bundle, variant)
        report = bench.report(images.stem, images, plan.classifiers)
        utility = (report["utility"] or {}).get("synthetic", {"networks": {}})
        networks = {network: 100 * found["accuracy"] for network, found in utility["networks"].items()}
        agreement = report.get("agreement")
        calls = re.search(r"([0-9.e+]+) network calls? an image", said)
        seconds = bench.commands.times.get(f"{images.stem}-generate")
        rows.append(
            common
            | {
                "variant": variant,
                "images": plan.count,
                "networks": networks,
                "accuracy": sum(networks.values()) / len(networks) if networks else None,
                "fidelity": report["fidelity"]["synthetic"],
                "agreement": 100 * agreement["synthetic"]["agreed"] if agreement else None,
                "calls": float(calls[1]) if calls else None,
                "seconds_an_image": None if seconds is None else seconds / plan.count,
                "source": str(images),
            }
        )
    return rows


def _processor() -> float:
    """Seconds of processor time of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _resume(bundle: Path) -> tuple[str, ...]:
    return ("--resume",) if bundle.exists() else ()


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _epsilons(text: str) -> list[float]:
    try:
        found = [float(word) for word in _words(text)]
    except ValueError:
        found = []
    if not found or not all(0 < epsilon < float("inf") for epsilon in found):
        raise argparse.ArgumentTypeError(f"{text}: must be positive numbers with commas, such as 1,10")
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the image sets, NAME.npz")
    parser.add_argument("--private", default="mnist-train", metavar="NAME", help="default: mnist-train")
    parser.add_argument("--test", default="mnist-test", metavar="NAME", help="real test images; default: mnist-test")
    parser.add_argument("--public", type=_words, default="letters,devanagari", help="default: letters,devanagari")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-methods"))
    parser.add_argument("--report", type=Path, default=Path("benchmarks/methods"))
    parser.add_argument("--epsilons", type=_epsilons, default="1,10")
    parser.add_argument("--delta", type=float, help="default: that of rapid train-private, 1 / (N ln N)")
    parser.add_argument("--methods", type=_words, default=",".join(DEFAULT), help=f"some of {','.join(RECIPES)}")
    parser.add_argument("--minutes", type=at_least(0.1), default=30.0, help="of each private stage; default: 30")
    words = "of public stages that choose their own settings; default: 30"
    parser.add_argument("--public-minutes", type=at_least(0.1), default=30.0, help=words)
    parser.add_argument(
        "--count", type=at_least(1), default=60_000, help="synthetic images of each row; default: 60000"
    )
    names = ",".join(CLASSIFIERS)
    words = f"all, none, or some of {names}; default: {','.join(NETWORKS)}"
    parser.add_argument("--classifiers", default=",".join(NETWORKS), help=words)
    words = "reference network of rapid evaluate --save-features; default: each report trains one on the public sets"
    parser.add_argument("--features", type=Path, help=words)
    parser.add_argument("--threads", type=at_least(1), help="of each command; default: all cores")
    words = "a setting of one method; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="METHOD:a.b=c", dest="more", help=words)
    options = parser.parse_args()
    for name in (options.private, options.test, *options.public):
        if not (options.data / f"{name}.npz").is_file():
            parser.error(f"--data {options.data}: has no {name}.npz")
    if unknown := set(options.methods) - set(RECIPES):
        parser.error(f"--methods {', '.join(sorted(unknown))}: unknown; choose some of {','.join(RECIPES)}")
    if options.classifiers not in ("all", "none") and (unknown := set(_words(options.classifiers)) - set(CLASSIFIERS)):
        parser.error(f"--classifiers {', '.join(sorted(unknown))}: unknown; all, none, or some of {names}")
    for setting in options.more:
        if setting.partition(":")[0] not in RECIPES:
            parser.error(f"--set {setting}: write it as METHOD:section.name=value")
    return options


def main() -> None:
    """Run what is asked for and not yet done; then write the table of it."""
    options = _options()
    more: dict[str, list[str]] = {}
    for setting in options.more:
        name, _, value = setting.partition(":")
        more.setdefault(name, []).append(value)
    plan = Plan(
        data=options.data,
        private=options.private,
        test=options.test,
        public=options.public,
        minutes=options.minutes,
        public_minutes=options.public_minutes,
        count=options.count,
        classifiers=options.classifiers,
        delta=options.delta,
        features=options.features,
        threads=options.threads,
        more=more,
    )
    with told("benchmark-methods"):
        fixed = ("data", "private", "test", "public", "count", "minutes", "public_minutes", "delta")
        fixed += ("classifiers", "features")
        begin_with(options.out, {name: getattr(plan, name) for name in fixed})
    bench = Bench(options.out, plan)
    floor = bench.floor() if any(not RECIPES[name].classifies for name in options.methods) else None
    for epsilon in options.epsilons:
        for name in options.methods:
            rows = rows_of(bench, name, epsilon)
            write_results(options.report, rows, floor, list(RECIPES))
            for row in rows:
                save_picture(options.report, row)


if __name__ == "__main__":
    main()
