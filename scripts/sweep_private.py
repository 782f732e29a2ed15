"""What settings are worth: studies of a YAML file, each value trained and measured (see scripts/sweep-private).

All of it is research on open data: accuracies are measured on real images, which a private run must never do.
Results: `points.json`, `table.md` and `charts/`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import yaml
from charts import chart
from commands import begin_with, run_rapid, told
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rapid.bundle import Bundle
from rapid.config.sections import ImageSettings
from rapid.data import ImageSet, fit_images, load_images
from rapid.errors import InputError
from rapid.evaluate.features import FeatureSpace, train_feature_space
from rapid.evaluate.fidelity import NEIGHBOURS, neighbourhoods
from rapid.evaluate.utility import measure_utility
from rapid.files import replacing, write_json
from rapid.frechet import frechet_distance
from rapid.heap import prepare_heap
from rapid.methods import load_settings
from rapid.methods.rapid.settings import RapidSettings
from rapid.parsing import read_yaml
from rapid.runtime import choose_device

Json = dict[str, Any]
PUBLIC = RapidSettings.public_sections

MEASURES = (
    ("", "accuracy", 100, "small CNN on real test images, %"),
    ("-frechet", "frechet", 1, "Frechet distance to real test images"),
)
"""What charts show: the end of their names, key, scale, title."""


@dataclass(frozen=True)
class Point:
    """Settings other than the common ones; `again` counts repetitions, which differ in the private noise."""

    settings: tuple[str, ...]
    again: int = 0

    def part(self, *sections: str) -> tuple[str, ...]:
        """Its settings of some sections."""
        return tuple(one for one in self.settings if one.split(".", 1)[0] in sections)

    def name(self, *sections: str) -> str:
        """What tells apart what is made of these sections."""
        words = [re.sub(r"[^\w.=-]", "", one) for one in sorted(self.part(*sections))]
        return "+".join(words) or "base"


class Study(BaseModel):
    """What a YAML file says; its sets are names of `.npz` files without their ending.

    Attributes:
        preset: the settings to begin with.
        public: sets.
        private: the set in the place of private images.
        test: a set of its own for tests; None: the last `held_out` of the private ones in a random order.
        held_out: how many.
        epsilon: of each training.
        images: how many are made for a point.
        repeats: trainings of the base, and of the points of repeated studies.
        repeated: names of studies.
        common: settings of all points, in the form of `--set`.
        studies: the settings of each point, by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    preset: str
    public: list[str] = Field(min_length=1)
    private: str
    test: str | None = None
    held_out: int = Field(2000, ge=1)
    epsilon: float = Field(gt=0)
    images: int = Field(ge=1)
    repeats: int = Field(1, ge=1)
    repeated: list[str] = []
    common: list[str] = []
    studies: dict[str, Annotated[list[list[str]], Field(min_length=1)]]

    @model_validator(mode="after")
    def _known(self) -> Self:
        if unknown := set(self.repeated) - set(self.studies):
            raise ValueError(f"repeated names {', '.join(sorted(unknown))}, which is not under studies")
        return self


class Sweep:
    """The folder in which points are made.

    Args:
        data: holds the image sets.
        out: holds what is made.
        study: content of the YAML file.

    Raises:
        InputError: a set is not there, or settings do not fit.
    """

    def __init__(self, data: Path, out: Path, study: Study) -> None:
        self.data, self.out, self.study = data, out, study
        self.public = [word for name in study.public for word in ("--public", self._file(name))]
        self._common = load_settings(study.preset, study.common).model_dump(mode="json")
        for points in study.studies.values():
            for settings in points:
                # now, and not after the hours of the points before
                load_settings(study.preset, [*study.common, *settings])
        self._file(study.private)
        self.test = out / "test.npz" if study.test is None else self._file(study.test)
        self.private = out / "private.npz" if study.test is None else self._file(study.private)
        self._real: tuple[ImageSet, FeatureSpace] | None = None

    def point(self, settings: Sequence[str]) -> Point:
        """What settings change: those that are as in common need not be made again."""
        changed = []
        for one in settings:
            name, value = one.split("=", 1)
            section, key = name.split(".", 1)
            if self._common[section][key] != yaml.safe_load(value):
                changed.append(one)
        return Point(tuple(changed))

    def run(self, done: Path, *arguments: object) -> None:
        """Run a command of rapid, unless `done` is there."""
        if done.exists():
            return
        print("== rapid", *arguments, flush=True)
        run_rapid(arguments)

    def bundle(self, point: Point) -> Path:
        """The public bundle of a point: with the networks of the common one, where they are the same."""
        common = self.out / "public-base"
        target = self.out / f"public-{point.name(*PUBLIC)}"
        chosen = _words(self.study.common, *PUBLIC) + _set(point.part(*PUBLIC))
        given = () if target == common else ("--networks", self.bundle(Point(())))
        plain = ("build-kb", *self.public, "--preset", self.study.preset, *chosen, "--out", target)
        self.run(target / "config.json", *plain, *given, *_resume(target))
        return target

    def model(self, point: Point) -> Path:
        """The private bundle of a point."""
        base = self.bundle(point)
        target = self.out / f"private-{point.name(*PUBLIC, 'private')}-{point.again}"
        chosen = _words(self.study.common, "private") + _set(point.part("private"))
        given = ("--base", base, "--private", self.private, "--epsilon", self.study.epsilon)
        # the preset's start of sampling may lie beyond where this point begins; measure() gives its own
        chosen += _set(("generation.start=null",))
        plain = ("train-private", *given, "--preset", self.study.preset, *chosen, "--out", target)
        self.run(target / "config.json", *plain, "--ledger", self.out / "ledger.jsonl", *_resume(target))
        return target

    def measure(self, point: Point) -> Json:
        """Make the images of a point, and compare them with real ones."""
        file = self.out / f"point-{point.name(*PUBLIC, 'private', 'generation')}-{point.again}.json"
        if not file.exists():
            model, count = self.model(point), self.study.images
            images = file.with_suffix(".npz")
            start = f"generation.start={self._common['generation']['start']}"
            chosen = _set((start,)) + _words(self.study.common, "generation") + _set(point.part("generation"))
            plain = ("generate", "--model", model, "--count", count, "--seed", 0, *chosen, "--out", images)
            self.run(images, *plain)
            facts = Bundle.open(self.bundle(point), "base").config.facts
            write_json(file, self.compare(images) | {"retrieval": facts.get("retrieval")})
        content: Json = json.loads(file.read_text(encoding="utf-8"))
        return {"settings": [], "again": point.again} | content

    def compare(self, images: Path) -> Json:
        """Accuracy after training on images, and how near they are to the real ones."""
        device = choose_device("auto")
        if self._real is None:
            form = ImageSettings.model_validate(self._common["image"])
            test = fit_images(load_images(self.test, "test"), form, "test")
            self._real = test, train_feature_space([], test, device)
        test, space = self._real
        made = load_images(images, "synthetic")
        utility = measure_utility(made, test, device, images.stem, ["small"])
        real, own = space.extract(test.images, "features, test"), space.extract(made.images, "features, synthetic")
        near = neighbourhoods(real, own, NEIGHBOURS, device, lambda _: None)
        accuracy = utility["networks"]["small"]["accuracy"]
        return {"accuracy": accuracy, "frechet": frechet_distance(own, real), **near._asdict()}

    def split(self) -> None:
        """Set aside real images that no training sees, the last of a random order, if there is no set of them.

        Raises:
            InputError: the private images have no labels, or are too few.
        """
        parts = self.private, self.test
        if self.study.test is None and not all(part.exists() for part in parts):
            images = load_images(self._file(self.study.private), "data")
            if images.labels is None or len(images) <= self.study.held_out:
                problem = f"has no labels, or no more than the {self.study.held_out} images held out; give another set"
                raise InputError("data", problem, images.source)
            order = np.random.default_rng(0).permutation(len(images))
            held_out = self.study.held_out
            for part, rows in zip(parts, (order[:-held_out], order[-held_out:]), strict=True):
                with replacing(part) as path, path.open("wb") as stream:
                    labels, classes = images.labels[rows], np.array(images.classes)
                    np.savez(stream, images=images.images[rows], labels=labels, classes=classes)

    def _file(self, name: str) -> Path:
        """The file of a set."""
        file = self.data / f"{name}.npz"
        if not file.is_file():
            raise InputError("data", f"has no {name}.npz, which the study names", self.data)
        return file


def write(out: Path, study: Study, base: list[Json], studies: dict[str, list[Json]]) -> None:
    """Write numbers, table and charts."""
    write_json(out / "points.json", {"study": study.model_dump(exclude_unset=True), "base": base, "studies": studies})
    columns = ("accuracy", "frechet", "precision", "recall", "coverage")
    head = ["study", "settings", "training", "accuracy, %", "Frechet distance", *columns[2:], "top-1 / top-5, %"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, points in {"base": base, **studies}.items():
        for point in points:
            found = point["retrieval"]
            tops = "" if found is None else f"{100 * found['top1']:.1f} / {100 * found['top5']:.1f}"
            numbers = [f"{100 * point['accuracy']:.1f}", f"{point['frechet']:.1f}"]
            numbers += [f"{point[column]:.2f}" for column in columns[2:]]
            settings = ", ".join(point["settings"]) or "as in common"
            lines.append(f"| {name} | {settings} | {point['again'] + 1} | {' | '.join(numbers)} | {tops} |")
    with replacing(out / "table.md") as target:
        target.write_text("\n".join([*lines, ""]), encoding="utf-8")
    charts = out / "charts"
    charts.mkdir(exist_ok=True)
    for name, points in studies.items():
        for end, key, scale, title in MEASURES:
            known = [scale * point[key] for point in base]
            own = [(point, scale * point[key]) for point in points]
            with replacing(charts / f"{name}{end}.svg") as target:
                target.write_text(draw(f"{title} (grey: the base)", name, own, known), encoding="utf-8")
    print("\n".join(lines), flush=True)
    print(f"base: {100 * statistics.mean(point['accuracy'] for point in base):.1f} %", flush=True)


def draw(title: str, study: str, points: Sequence[tuple[Json, float]], base: Sequence[float]) -> str:
    """A chart of a study: the values of its points, a line for each training, and as a band those of the base."""
    everything = [tuple(point["settings"]) for point, _ in points]
    # what all have in common tells nothing
    common = set(everything[0]).intersection(*everything) if len(set(everything)) > 1 else set()
    labels = {
        settings: ", ".join(one.split("=", 1)[1] for one in settings if one not in common) or "as in common"
        for settings in everything
    }
    repeated, lines = any(point["again"] for point, _ in points), dict[str, dict[str, float]]()
    for point, value in points:
        name = f"training {point['again'] + 1}" if repeated else ""
        lines.setdefault(name, {})[labels[tuple(point["settings"])]] = value
    ordered = all(label[0].isdigit() for label in labels.values())
    band = (min(base), max(base))
    return chart(title, study, list(labels.values()), lines, band, joined=ordered)


def _set(settings: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for one in settings for word in ("--set", one))


def _words(common: list[str], *sections: str) -> tuple[str, ...]:
    return _set(Point(tuple(common)).part(*sections))


def _resume(folder: Path) -> tuple[str, ...]:
    return ("--resume",) if folder.exists() else ()


def main() -> None:
    """Measure what is not yet there; write after each point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("study", type=Path, help="a YAML file such as benchmarks/letters-private/study.yaml")
    parser.add_argument("--data", type=Path, required=True, help="folder of the .npz files that it names")
    parser.add_argument("--out", type=Path, default=Path("runs/sweep-private"), help="holds bundles and images")
    parser.add_argument("--report", type=Path, help="table and charts; default: where the study is")
    options = parser.parse_args()
    prepare_heap()
    with told("sweep-private"):
        sweep_all(options.study, options.data, options.out, options.report or options.study.parent)


def sweep_all(file: Path, data: Path, out: Path, report: Path) -> None:
    """Measure all points of a study.

    Args:
        file: the study.
        data: holds the image sets.
        out: holds what is made.
        report: for table and charts.

    Raises:
        InputError: the study, its sets or its settings are not right, or the folder was begun with others.
    """
    study = read_yaml(file, Study, "", "a study such as benchmarks/letters-private/study.yaml")
    sweep = Sweep(data, out, study)
    out.mkdir(parents=True, exist_ok=True)
    begin_with(out, study.model_dump(exclude_unset=True, exclude={"studies", "repeats", "repeated"}))
    sweep.split()
    base = [sweep.measure(Point((), again)) for again in range(study.repeats)]
    studies: dict[str, list[Json]] = {}
    for name, points in study.studies.items():
        studies[name] = []
        for again in range(study.repeats if name in study.repeated else 1):
            for point in points:
                found = sweep.measure(replace(sweep.point(point), again=again))
                studies[name].append(found | {"settings": point, "again": again})
                write(report, study, base, studies)


if __name__ == "__main__":
    main()
