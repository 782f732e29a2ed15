"""`rapid generate`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rapid
from rapid.bundle.info import provenance
from rapid.cli.class_counts import FIELD, read_class_counts
from rapid.data.export import PICTURE, check_target, write_samples
from rapid.errors import InputError
from rapid.files import check_folder, write_json
from rapid.mapped import scratch_in
from rapid.methods import open_generator
from rapid.progress import Progress
from rapid.ranks import Ranks
from rapid.runtime import choose_device
from rapid.sampling.generate import Samples, check_count, check_seed, generate_together, resolve_labels
from rapid.sampling.generator import Generator


def generate(options: argparse.Namespace) -> None:
    """`rapid generate`."""
    with Ranks.join(choose_device(options.device)) as ranks:
        generator, count, labels = ranks.all_or_none(lambda: _prepared(options))
        with scratch_in(options.out), Progress("generating", count, "image", shown=ranks.first) as progress:
            samples = generate_together(
                generator,
                ranks,
                count,
                labels,
                options.seed,
                lambda done, _: progress.advance_to(done),
                soft_labels=_has_soft_labels(options),
            )
    if samples is None:
        return
    write_samples(
        options.out,
        samples.images,
        _likeliest(samples) if options.for_training else samples.labels,
        generator.classes,
        provenance(generator.bundle),
        samples.soft_labels,
    )
    calls = f"{samples.calls:.4g} network {'call' if samples.calls == 1 else 'calls'} an image"
    print(f"{options.out}: {count:,} images, seed {samples.seed}, {calls}{_acceptance(samples)}")
    if options.report is not None:
        write_json(options.report, _report(generator, samples), new="report")


def _prepared(options: argparse.Namespace) -> tuple[Generator, int, list[int] | None]:
    """Check the arguments, and open the model: it, the number of images, and the class of each."""
    check_target(options.out, options.count)
    if _has_soft_labels(options) and options.out.suffix == PICTURE:
        field = "for_training" if options.for_training else "soft_labels"
        raise InputError(field, "a picture holds no soft labels; choose another form for --out, or leave it out")
    if options.report is not None:
        if options.report.suffix != ".json" or options.report.is_dir():
            raise InputError("report", "give a name that ends in .json", options.report)
        check_folder(options.report.parent, "report", options.report)
        if os.path.lexists(options.report):
            raise InputError("report", "exists already; choose another name, or remove it first", options.report)
    if options.class_counts is None and options.count is None:
        raise InputError("count", "say how many images, or give --class-counts")
    if options.class_counts is not None and options.labels is not None:
        raise InputError("labels", "--class-counts says how many images of which class; leave one of them out")
    if options.count is not None:
        check_count(options.count)
    if options.seed is not None:
        check_seed(options.seed)
    generator = open_generator(options.model, options.device, options.overrides, for_training=options.for_training)
    count, labels = _wanted(options, generator.classes)
    check_target(options.out, count)
    return generator, count, labels


def _likeliest(samples: Samples) -> NDArray[np.int64]:
    """The likeliest class of each image: none was refused, so many are not of the class that they were drawn for."""
    assert samples.soft_labels is not None
    found: NDArray[np.int64] = samples.soft_labels.argmax(1)
    return found


def _has_soft_labels(options: argparse.Namespace) -> bool:
    return bool(options.soft_labels or options.for_training)


def _acceptance(samples: Samples) -> str:
    """What is told of the candidates; nothing without a probe. Some are made before the last place is filled."""
    tally = samples.tally
    if tally.share is None:
        return ""
    made, offered = f"{samples.candidates:,} candidates made", f"{tally.offered.total():,} offered to open places"
    return f"; {made}, {offered}, {tally.share:.1%} of these accepted for their class"


def _report(generator: Generator, samples: Samples) -> dict[str, Any]:
    """How the images were made. All of it follows from the model and the seed: no private image is looked at."""
    tally = samples.tally
    return {
        "rapid": rapid.__version__,
        "model": {"name": generator.bundle.name, "sha256": generator.bundle.digest},
        "images": len(samples.images),
        "seed": samples.seed,
        "calls_per_candidate": generator.calls(),
        "candidates": samples.candidates,
        "offered": tally.offered.total(),
        "calls_per_image": samples.calls,
        "acceptance": tally.share,
        "acceptance_by_class": {
            generator.classes[label]: {"candidates": tally.offered[label], "accepted": tally.accepted[label]}
            for label in sorted(tally.offered)
        },
    }


def _wanted(options: argparse.Namespace, classes: Sequence[str]) -> tuple[int, list[int] | None]:
    """The number of images, and the class of each; None for all classes in turn."""
    if options.class_counts is not None:
        labels = read_class_counts(options.class_counts, classes)
        if options.count not in (None, len(labels)):
            problem = f"adds up to {len(labels):,} images, but --count is {options.count:,}; leave out --count"
            raise InputError(FIELD, problem, options.class_counts)
        return len(labels), labels
    if options.labels in (None, "all"):
        return options.count, None
    cycle = resolve_labels(classes, [label.strip() for label in options.labels.split(",")])
    return options.count, [cycle[number % len(cycle)] for number in range(options.count)]
