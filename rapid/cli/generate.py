"""`rapid generate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rapid.bundle.info import provenance
from rapid.cli.class_counts import FIELD, read_class_counts
from rapid.data.export import check_target, write_samples
from rapid.errors import InputError
from rapid.methods import open_generator
from rapid.progress import Progress
from rapid.ranks import Ranks
from rapid.runtime import choose_device
from rapid.sampling.generate import generate_together, resolve_labels
from rapid.sampling.generator import Generator


def generate(options: argparse.Namespace) -> None:
    """`rapid generate`."""
    with Ranks.join(choose_device(options.device)) as ranks:
        generator, count, labels = ranks.all_or_none(lambda: _prepared(options))
        with Progress("generating", count, "image", shown=ranks.first) as progress:
            samples = generate_together(
                generator, ranks, count, labels, options.seed, lambda done, _: progress.advance_to(done)
            )
    if samples is None:
        return
    write_samples(options.out, samples.images, samples.labels, generator.classes, provenance(generator.bundle))
    print(f"{options.out}: {count:,} images, seed {samples.seed}")


def _prepared(options: argparse.Namespace) -> tuple[Generator, int, list[int] | None]:
    """Check the arguments, and open the model: it, the number of images, and the class of each."""
    check_target(options.out, options.count)
    if options.class_counts is None and options.count is None:
        raise InputError("count", "say how many images, or give --class-counts")
    if options.class_counts is not None and options.labels is not None:
        raise InputError("labels", "--class-counts says how many images of which class; leave one of them out")
    generator = open_generator(options.model, options.device, options.overrides)
    count, labels = _wanted(options, generator.classes)
    check_target(options.out, count)
    return generator, count, labels


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
