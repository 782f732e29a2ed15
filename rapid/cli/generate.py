"""`rapid generate`."""

from __future__ import annotations

import argparse

from rapid.bundle.info import provenance
from rapid.data.export import check_target, write_samples
from rapid.methods import open_generator
from rapid.progress import Progress
from rapid.sampling.generate import generate as generate_samples
from rapid.sampling.generate import resolve_labels


def generate(options: argparse.Namespace) -> None:
    """`rapid generate`."""
    check_target(options.out)
    generator = open_generator(options.model, options.device, options.overrides)
    labels = None
    if options.labels not in (None, "all"):
        cycle = resolve_labels(generator.classes, [label.strip() for label in options.labels.split(",")])
        labels = [cycle[number % len(cycle)] for number in range(options.count)]
    with Progress("generating", options.count, "image") as progress:
        samples = generate_samples(
            generator, options.count, labels, options.seed, lambda done, _: progress.advance_to(done)
        )
    text = provenance(generator.bundle)
    write_samples(options.out, samples.images, samples.labels, generator.classes, text)
    print(f"{options.out}: {options.count:,} images, seed {samples.seed}")
