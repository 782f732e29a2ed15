"""Letters -> MNIST, from raw data to a table: every step is a command that a user would run, and none is run twice.

Results go to `--report`: `results.json`, `table.md` and a picture for each row in `samples`; rows that are there, and
not asked for, stay. Accuracies are on the real test set, of classifiers that are trained on synthetic images only, by
the field's protocol (`rapid evaluate`): on what is delivered, and "as drawn", on images that no probe has sorted.
Likeness is measured in the features of one network, `features.safetensors`, which was trained once on the real training
images of MNIST, an open set, and stays with the report.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from commands import Commands, at_least, begin_with, told
from PIL import Image

from rapid.evaluate.networks import CLASSIFIERS
from rapid.files import replacing, write_json
from rapid.pictures import table

PRESET = "letters-mnist"
SETS = ("letters", "devanagari", "mnist-train", "mnist-test")
OBJECTIVES = ("rapid", "late", "ldm")
STEPS = {0.2: 80, 1.0: 150, 10.0: 600}
"""Private steps by epsilon: less noise pays for more steps. All other settings are those of the preset."""
NETWORKS = ("resnet", "wideresnet", "resnext")
TARGETS = {0.2: 94.0, 1.0: 97.0, 10.0: 98.4}
FIELD = {0.2: "86.3 (DPDM, CNN)", 1.0: "95.6 (DP-FETA)", 10.0: "98.1 (DP-FETA)"}
"""The best figures without overlap of public and private images: DPImageBench, and DPDM's own table at 0.2."""
PUBLIC_RETRIEVAL = "query"
"""`generation.retrieval` at epsilon 0: the paper's."""
FEATURES = "features.safetensors"
LIKENESS = {"frechet": "Frechet distance", "precision": "precision", "recall": "recall"}
"""Measures by their names in reports, with the heads of their columns."""
NOTE = """Accuracies on mnist-test in percent: mean (lowest to highest) over the seeds of generation. "As drawn": the
mean of the three on images that no probe has sorted. "Accepted": of the candidates drawn for a class, the share that
the probe finds to be of it, the mean over the classes. "Calls": network calls an image delivered. "Label agreement":
of the images delivered, the share that a network trained on real images takes for their label. Distance, precision
and recall are in the features of that network, against mnist-test. No guarantee covers these numbers: they are
measured on open data."""
FLOORS = ("real", "autoencoder", "public")
"""Sets that no generator made, as `rapid evaluate` names them."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    objective: str
    epsilon: float

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.objective}-{self.epsilon:g}"


class Bench(Commands):
    """The folder in which a benchmark runs.

    Args:
        out: holds bundles, images and reports.
        features: file of the network in whose features likeness is measured; it is trained if it is not there.
        data: holds the four image sets.
        count: synthetic images for each seed.
        classifiers: for `rapid evaluate`.
        processes: of private training, which share the cores.
    """

    def __init__(self, out: Path, features: Path, data: Path, count: int, classifiers: str, processes: int = 1) -> None:
        super().__init__(out)
        self._features, self.data, self.count = features, data, count
        self.classifiers, self.processes = classifiers, processes

    def rapid(self, step: str, done: Path, *arguments: object, processes: int = 1) -> None:
        """Run a command of rapid, unless `done` is there."""
        launcher, environment = list[str](), dict(os.environ)
        if processes > 1:
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
        self.run(step, done, arguments, launcher=launcher, environment=environment)

    def set(self, name: str) -> Path:
        """An image set."""
        return self.data / f"{name}.npz"

    def public(self) -> Path:
        """The public bundle."""
        bundle = self.out / "public"
        sets = ("--public", self.set("letters"), "--public", self.set("devanagari"))
        self.rapid(
            "public", bundle / "config.json", "build-kb", *sets, "--preset", PRESET, "--out", bundle, *_resume(bundle)
        )
        return bundle

    def private(self, row: Row) -> Path:
        """The private bundle of a row."""
        bundle, base = self.out / row.name, self.public()
        settings = [f"private.objective={row.objective}", f"private.steps={STEPS.get(row.epsilon, STEPS[1.0])}"]
        # Without the paper's objective the whole method goes without retrieval, or its share could not be told.
        settings += ["generation.retrieval=none"] if row.objective != "rapid" else []
        self.rapid(
            row.name,
            bundle / "config.json",
            *("train-private", "--base", base, "--private", self.set("mnist-train"), "--epsilon", row.epsilon),
            *(word for setting in settings for word in ("--set", setting)),
            *("--preset", PRESET, "--out", bundle, "--ledger", self.out / "ledger.jsonl", *_resume(bundle)),
            processes=self.processes,
        )
        return bundle

    def settings(self, row: Row) -> Json | None:
        """The settings that the images of a row were made with; None if its bundle is not there."""
        file = self.out / (row.name if row.epsilon > 0 else "public") / "config.json"
        if not file.exists():
            return None
        found: Json = json.loads(file.read_text())["settings"]
        if row.epsilon == 0:
            found["generation"]["retrieval"] = PUBLIC_RETRIEVAL
        return found

    def images(self, row: Row, seed: int, *, drawn: bool = False) -> Path:
        """Balanced synthetic images; at epsilon 0 those of the public model, whose classes are dealt to the digits.

        Args:
            row: the model.
            seed: of the generation.
            drawn: leave the images as they were drawn, without the probe.
        """
        target = self.out / f"{row.name}-{'drawn' if drawn else 'seed'}{seed}.npz"
        if row.epsilon > 0:
            model = self.private(row)
            arguments = ["generate", "--model", model, "--count", self.count, "--seed", seed, "--out", target]
            arguments += ["--set", "generation.attempts=1"] if drawn else ["--report", self._made(row, seed)]
            if not drawn and not target.exists():
                # of images that were removed to be made again
                self._made(row, seed).unlink(missing_ok=True)
            self.rapid(f"{row.name}-{'draw' if drawn else 'generate'}{seed}", target, *arguments)
            return target
        drawn = self.out / f"{row.name}-public{seed}.npz"
        model = self.public()
        how = ("--set", f"generation.retrieval={PUBLIC_RETRIEVAL}")
        arguments = ("generate", "--model", model, "--count", self.count, "--seed", seed, *how, "--out", drawn)
        self.rapid(f"{row.name}-generate{seed}", drawn, *arguments)
        if not target.exists():
            found = np.load(drawn)
            with replacing(target) as path, path.open("wb") as stream:
                np.savez(stream, images=found["images"], labels=found["labels"] % 10, classes=list("0123456789"))
        return target

    def features(self) -> Path:
        """The network in whose features likeness is measured. MNIST is open data."""
        sets = ("--train-real", self.set("mnist-train"), "--open-data", "--real", self.set("mnist-test"))
        self.rapid("features", self._features, "evaluate", *sets, "--save-features", self._features)
        return self._features

    def report(self, row: Row, seed: int, *, drawn: bool = False) -> Json:
        """What `rapid evaluate` says of the images of a seed; see `images`."""
        images = self.images(row, seed, drawn=drawn)
        target, step = images.with_suffix(".json"), f"{row.name}-evaluate{'-drawn' if drawn else ''}{seed}"
        arguments = ("evaluate", "--synthetic", images, "--real", self.set("mnist-test"), *self._measures())
        self.rapid(step, target, *arguments, "--classifiers", self.classifiers, "--out", target)
        found: Json = json.loads(target.read_text())
        return found

    def made(self, row: Row, seed: int) -> Json | None:
        """How the images of a seed were made; None without a probe, and for images of earlier versions."""
        file = self._made(row, seed)
        found: Json | None = json.loads(file.read_text()) if file.exists() else None
        return found

    def floors(self, row: Row) -> Json:
        """The measures of likeness of images that no generator made, as many as a row has, by name in `FLOORS`."""
        target = self.out / "floors.json"
        if not target.exists():
            sets = ("--real", self.set("mnist-test"), "--train-real", self.set("mnist-train"), "--open-data")
            arguments = ("evaluate", "--synthetic", self.images(row, 0), *sets, *self._measures())
            self.rapid("floors", target, *arguments, "--model", self.public(), "--classifiers", "none", "--out", target)
        fidelity = json.loads(target.read_text())["fidelity"]
        return {fidelity["sets"][name]: fidelity[name] for name in FLOORS if name in fidelity}

    def _measures(self) -> tuple[object, ...]:
        sets = ("--public", self.set("letters"), "--public", self.set("devanagari"))
        return (*sets, "--features", self.features())

    def _made(self, row: Row, seed: int) -> Path:
        return self.out / f"{row.name}-made{seed}.json"


def accuracies(reports: Sequence[Json]) -> Json:
    """Accuracies in percent, of each network and the mean of the three, a number for each seed."""
    utility = [report["utility"]["synthetic"] for report in reports]
    networks = {
        name: [100 * found["networks"][name]["accuracy"] for found in utility] for name in utility[0]["networks"]
    }
    return {"networks": networks, "mean": [100 * found["mean"] for found in utility if found["mean"] is not None]}


def summarise(bench: Bench, row: Row, reports: Sequence[Json], drawn: Sequence[Json]) -> Json:
    """One line of the table as numbers.

    Args:
        bench: the folder.
        row: the model.
        reports: on the images that are delivered, one for each seed.
        drawn: on images as drawn, one for each seed; empty without a probe.
    """
    times = bench.times
    private = bench.out / row.name / "privacy.json"
    return {
        "objective": row.objective,
        "epsilon": row.epsilon,
        "seeds": len(reports),
        **accuracies(reports),
        "fidelity": [report["fidelity"]["synthetic"] for report in reports],
        "features": reports[0]["fidelity"].get("network"),
        "agreement": [report["agreement"]["synthetic"] for report in reports if report.get("agreement")],
        "made": [bench.made(row, seed) for seed in range(len(reports))],
        "drawn": None
        if not drawn
        else {
            **accuracies(drawn),
            "fidelity": [report["fidelity"]["synthetic"] for report in drawn],
            "agreement": [report["agreement"]["synthetic"] for report in drawn if report.get("agreement")],
        },
        "images": bench.count,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "seconds": {
            "public": times.get("public"),
            "private": times.get(row.name),
            "generation": [times.get(f"{row.name}-generate{seed}") for seed in range(len(reports))],
            "evaluation": [times.get(f"{row.name}-evaluate{seed}") for seed in range(len(reports))],
        },
        "privacy": json.loads(private.read_text()) if private.exists() else None,
        "settings": bench.settings(row),
    }


def write_results(report: Path, measured: Sequence[Json], floors: Json) -> None:
    """Write `results.json` and the table: the rows measured, and the others that are there."""
    report.mkdir(parents=True, exist_ok=True)
    file = report / "results.json"
    earlier = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    by_name = {(row["epsilon"], row["objective"]): row for row in (*earlier, *measured)}
    rows = [by_name[name] for name in sorted(by_name)]
    write_json(file, {"rows": rows, "floors": floors})
    columns = ["epsilon", "objective", "seeds", *NETWORKS, "small", "mean of the three", "best of the field", "target"]
    columns += ["as drawn", "accepted, %", "calls", "label agreement, %", *LIKENESS.values()]
    columns += ["public min", "private min", "generation min", "images for each seed", "machine"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [_interval(row["networks"].get(name, [])) for name in (*NETWORKS, "small")]
        seconds = row["seconds"]
        made = [second for second in seconds["generation"] if second is not None]
        lines.append(
            f"| {row['epsilon']:g} | {row['objective']} | {row['seeds']} | {' | '.join(cells)} "
            f"| {_bold(_interval(row['mean']))} | {FIELD.get(row['epsilon'], '')} | {TARGETS.get(row['epsilon'], '')} "
            f"| {' | '.join(_likeness(row))} "
            f"| {_minutes(seconds['public'])} | {_minutes(seconds['private'])} "
            f"| {_minutes(statistics.mean(made) if made else None)} | {row['images']:,} | {row['machine']} |"
        )
    lines += ["", NOTE, ""]
    if floors:
        lines += [
            f"| for comparison | images | {' | '.join(LIKENESS.values())} |",
            "|---|---|" + "---|" * len(LIKENESS),
        ]
        lines += [
            f"| {title} | {found['images']:,} | {' | '.join(_measure([found], name) for name in LIKENESS)} |"
            for title, found in floors.items()
        ]
        lines.append("")
    with replacing(report / "table.md") as target:
        target.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


def samples_picture(bench: Bench, row: Row) -> Image.Image:
    """The first images of each class."""
    found = np.load(bench.images(row, 0))
    lines = [(str(label), found["images"][found["labels"] == label][:20]) for label in range(10)]
    return Image.fromarray(table(lines, title=f"{row.objective}, epsilon = {row.epsilon:g}", scale=1))


def _likeness(row: Json) -> list[str]:
    """Cells of the columns on likeness; those of rows in other features than the file's are left empty."""
    drawn, made = row.get("drawn"), [found for found in row.get("made", []) if found is not None]
    known = row["fidelity"] if row.get("features") else []
    return [
        _interval(drawn["mean"] if drawn else []),
        _interval([100 * found["acceptance"] for found in made if found["acceptance"] is not None]),
        _interval([found["calls_per_image"] for found in made]),
        _interval([100 * found["agreed"] for found in row.get("agreement", [])]),
        *(_measure(known, name) for name in LIKENESS),
    ]


def _measure(found: Sequence[Json], name: str) -> str:
    return f"{statistics.mean(one[name] for one in found):.3g}" if found else ""


def _resume(bundle: Path) -> tuple[str, ...]:
    return ("--resume",) if bundle.exists() else ()


def _interval(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def _bold(text: str) -> str:
    return text and f"**{text}**"


def _words(text: str) -> list[str]:
    return text.split(",")


def _epsilons(text: str) -> list[float]:
    try:
        found = [float(word) for word in _words(text)]
    except ValueError:
        found = [float("nan")]
    if not all(0 <= epsilon < float("inf") for epsilon in found):
        raise argparse.ArgumentTypeError(f"{text}: must be numbers of at least 0 with commas, such as 0,0.2,1")
    return found


def _minutes(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds / 60:.1f}"


def main() -> None:
    """Run what is asked for and not yet done; then write the table of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the four .npz files")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-mnist"))
    parser.add_argument("--report", type=Path, default=Path("benchmarks/letters-mnist"))
    parser.add_argument("--epsilons", type=_epsilons, default="1,0.2,10", help="0: the public model alone")
    parser.add_argument("--objectives", type=_words, default="rapid", help=f"some of {','.join(OBJECTIVES)}")
    parser.add_argument("--seeds", type=at_least(1), default=1, help="seeds 0 to SEEDS - 1 of the generation")
    parser.add_argument("--count", type=at_least(1), default=60_000)
    parser.add_argument("--classifiers", type=_words, default="all", help=f"all, or some of {','.join(CLASSIFIERS)}")
    parser.add_argument(
        "--processes", type=at_least(1), default=1, help="of private training; on a CPU best one for each core"
    )
    options = parser.parse_args()
    for name in SETS:
        if not (options.data / f"{name}.npz").is_file():
            parser.error(f"--data {options.data}: has no {name}.npz; name the folder of the four image sets")
    if unknown := set(options.objectives) - set(OBJECTIVES):
        parser.error(f"--objectives {', '.join(sorted(unknown))}: unknown; choose some of {','.join(OBJECTIVES)}")
    classifiers = ",".join(options.classifiers)
    if classifiers != "all" and (unknown := set(options.classifiers) - set(CLASSIFIERS)):
        parser.error(f"--classifiers {', '.join(sorted(unknown))}: unknown; all, or some of {','.join(CLASSIFIERS)}")
    with told("benchmark-mnist"):
        begin_with(options.out, {"data": options.data, "count": options.count, "classifiers": classifiers})
    features = options.report / FEATURES
    bench = Bench(options.out, features, options.data, options.count, classifiers, options.processes)
    rows = [Row(name, epsilon) for epsilon in options.epsilons for name in options.objectives if epsilon > 0]
    rows += [Row("public", 0.0)] if 0.0 in options.epsilons else []
    results = []
    for row in rows:
        reports = [bench.report(row, seed) for seed in range(options.seeds)]
        drawn = [bench.report(row, seed, drawn=True) for seed in range(options.seeds if row.epsilon > 0 else 0)]
        results.append(summarise(bench, row, reports, drawn))
        write_results(options.report, results, bench.floors(row))
        with replacing(options.report / "samples" / f"{row.name}.png") as target:
            samples_picture(bench, row).save(target)


if __name__ == "__main__":
    main()
