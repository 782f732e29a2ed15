"""`rapid demo`: letters are public, digits are private, synthetic digits come out. Every part is the real command's."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

import numpy as np
import torch
from PIL import Image

from rapid.bundle import Bundle
from rapid.bundle.card import privacy_in_words
from rapid.bundle.networks import open_networks
from rapid.config.presets import networks_settings
from rapid.data import sample_path
from rapid.data.private import PrivateImages
from rapid.files import replacing
from rapid.methods.rapid import METHOD
from rapid.methods.rapid.generator import RapidGenerator
from rapid.methods.rapid.settings import RapidSettings
from rapid.pictures import Pixels, table
from rapid.rounding import as_typed, rounded_up
from rapid.runtime import choose_device
from rapid.sampling.generate import generate
from rapid.sampling.streams import make_streams
from rapid.stages.private import train_private_bundle
from rapid.stages.public import build_public_bundle
from rapid.stopping import check_stop

EPSILON = 10.0
NETWORKS = Path("builtin:scripts")
PRESET = "scripts-demo"
RECORDS = "augmentations.reference=8000"
"""A smaller knowledge base than the networks' own settings ask for."""
COLUMNS = 12
QUERIES = 10


def demo(options: argparse.Namespace) -> None:
    """`rapid demo`."""
    run_demo(options.out, choose_device(options.device), open_networks(NETWORKS))


def run_demo(out: Path, device: torch.device, networks: Bundle, overrides: Sequence[str] = ()) -> None:
    """Build the public bundle, train privately, draw pictures; continue with what `out` holds.

    Args:
        out: folder for `public/`, `private/`, `samples.png`, `neighbours.png` and `ledger.jsonl`.
        device: where to train.
        networks: trained on other writing.
        overrides: of the preset's settings.

    Raises:
        InputError: `out` holds something else.
    """
    base = networks.settings_as(RapidSettings)
    chosen = networks_settings(base, METHOD.fixed_by_networks(base), PRESET, [RECORDS, *overrides])
    print(f"1/3 public stage: handwritten letters, networks that ship with rapid -> {out / 'public'}", flush=True)
    letters = [sample_path("letters")]
    public = build_public_bundle(letters, out / "public", chosen, device, resume=True, networks=networks)
    print(f"2/3 private stage: handwritten digits, epsilon {as_typed(EPSILON)} -> {out / 'private'}", flush=True)
    private = train_private_bundle(
        public.path,
        PrivateImages(sample_path("digits")),
        out / "private",
        chosen,
        epsilon=EPSILON,
        delta=None,
        device=device,
        resume=True,
        # a demonstration must not show up in the user's own ledger
        ledger=out / "ledger.jsonl",
    )
    assert private is not None
    print("3/3 generation", flush=True)
    generator = RapidGenerator(private, device)
    _write_picture(out / "samples.png", samples_picture(generator))
    query = {"retrieval": "query" if chosen.retrieval.enabled else "none", "steps": 20, "start": None}
    asked = RapidGenerator(private, device, generator.settings.model_copy(update=query))
    _write_picture(out / "neighbours.png", neighbours_picture(asked))
    assert private.privacy is not None
    print(f"\nsynthetic digits:   {out / 'samples.png'}\nand their neighbours: {out / 'neighbours.png'}\n")
    print(textwrap.fill(privacy_in_words(private.privacy), 100))
    print(f"\nto serve the model: rapid serve --model {quote(str(private.path))}")


def samples_picture(generator: RapidGenerator, columns: int = COLUMNS, seed: int = 0) -> Pixels:
    """A row of synthetic images for each class, with its name; RGB."""
    classes = generator.classes or ("",)
    labels = np.repeat(np.arange(len(classes)), columns)
    chosen = labels.tolist() if generator.classes else None
    samples = generate(generator, len(labels), chosen, seed, lambda done, count: check_stop())
    rows = [(name, samples.images[labels == number]) for number, name in enumerate(classes)]
    return table(rows, title=_title(generator.bundle))


def neighbours_picture(generator: RapidGenerator, count: int = QUERIES, seed: int = 1) -> Pixels:
    """What happens on the way, one image a column: early step, retrieved public neighbour, final image; RGB."""
    labels = np.arange(count) % len(generator.classes) if generator.classes else None
    start, latents = generator.sample(make_streams(seed, np.arange(count)), labels)
    retrieval = generator.bundle.settings_as(RapidSettings).retrieval
    rows = []
    if start.retrieved is not None:
        if start.retrieved.query is not None:
            query = f"query at k = {retrieval.k}, denoised in one step"
            rows.append((query, generator.decode(start.retrieved.query)))
        neighbour = f"public neighbour in the knowledge base at v = {retrieval.v}"
        rows.append((neighbour, generator.decode(start.retrieved.values)))
    rows.append(("final image, after the private late steps", generator.decode(latents)))
    names = [generator.classes[label] for label in labels] if labels is not None else []
    return table(rows, columns=names, title=_title(generator.bundle))


def _title(bundle: Bundle) -> str:
    if bundle.privacy is None:
        return "public model (no private training)"
    epsilon, delta = rounded_up(bundle.privacy["epsilon"]), rounded_up(bundle.privacy["delta"])
    return f"synthetic, epsilon = {epsilon}, delta = {delta}"


def _write_picture(path: Path, picture: Pixels) -> None:
    with replacing(path) as target:
        Image.fromarray(picture).save(target)
