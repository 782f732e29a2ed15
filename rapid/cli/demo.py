"""`rapid demo`: letters are public, digits are private, synthetic digits come out. Every part is the real command's."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from rapid.bundle.card import privacy_in_words
from rapid.bundle.format import Bundle
from rapid.config.presets import load_settings
from rapid.config.sections import Settings
from rapid.data import sample_path
from rapid.files import replacing
from rapid.methods.rapid.generator import Generator, streams
from rapid.pictures import Pixels, table
from rapid.stages import build_public_bundle, train_private_bundle

EPSILON = 10.0
COLUMNS = 12
QUERIES = 10


def run_demo(out: Path, device: torch.device, settings: Settings | None = None) -> None:
    """Build the public bundle, train privately, draw pictures; goes on from what `out` holds.

    Args:
        out: folder for `public/`, `private/`, `samples.png`, `neighbours.png` and `ledger.jsonl`.
        device: where to train.
        settings: default: the preset `demo`.

    Raises:
        InputError: `out` holds something else.
    """
    settings = settings or load_settings("demo")
    print(f"1/3 public stage: handwritten letters -> {out / 'public'}", flush=True)
    public = build_public_bundle([sample_path("letters")], out / "public", settings, device, resume=True)
    print(f"2/3 private stage: handwritten digits, epsilon {EPSILON:g} -> {out / 'private'}", flush=True)
    private = train_private_bundle(
        public.path,
        sample_path("digits"),
        out / "private",
        settings,
        epsilon=EPSILON,
        delta=None,
        device=device,
        resume=True,
        # a demonstration is no business of the user's own account book
        ledger=out / "ledger.jsonl",
    )
    assert private is not None
    print("3/3 generation", flush=True)
    generator = Generator(private, device)
    _write_picture(out / "samples.png", samples_picture(generator))
    _write_picture(out / "neighbours.png", neighbours_picture(generator))
    assert private.privacy is not None
    print(f"\nsynthetic digits:   {out / 'samples.png'}\nand their neighbours: {out / 'neighbours.png'}\n")
    print(textwrap.fill(privacy_in_words(private.privacy), 100))
    print(f"\nto serve the model: rapid serve --model {private.path}")


def samples_picture(generator: Generator, columns: int = COLUMNS, seed: int = 0) -> Pixels:
    """A row of synthetic images for each class, with its name; RGB."""
    classes = generator.classes or ("",)
    labels = np.repeat(np.arange(len(classes)), columns)
    samples = generator.generate(len(labels), labels.tolist() if generator.classes else None, seed)
    rows = [(name, samples.images[labels == number]) for number, name in enumerate(classes)]
    return table(rows, title=_title(generator.bundle))


def neighbours_picture(generator: Generator, count: int = QUERIES, seed: int = 1) -> Pixels:
    """What happens on the way, one image a column: early step, retrieved public neighbour, final image; RGB."""
    labels = np.arange(count) % len(generator.classes) if generator.classes else None
    start = generator.start(streams(seed, np.arange(count)), labels)
    settings = generator.bundle.settings
    rows = []
    if start.retrieved is not None:
        if start.retrieved.denoised is not None:
            query = f"query at k = {settings.retrieval.k}, denoised in one step"
            rows.append((query, generator.decode(start.retrieved.denoised)))
        entry = f"public entry of the knowledge base at v = {settings.retrieval.v}"
        rows.append((entry, generator.decode(start.retrieved.values)))
    final = generator.decode(generator.finish(start.x, labels))
    rows.append(("final image, after the private late steps", final))
    names = [generator.classes[label] for label in labels] if labels is not None else []
    return table(rows, columns=names, title=_title(generator.bundle))


def _title(bundle: Bundle) -> str:
    if bundle.privacy is None:
        return "public model (no private training)"
    return f"synthetic, epsilon = {bundle.privacy['epsilon']:.3g}, delta = {bundle.privacy['delta']:.2g}"


def _write_picture(path: Path, picture: Pixels) -> None:
    with replacing(path) as target:
        Image.fromarray(picture).save(target)
