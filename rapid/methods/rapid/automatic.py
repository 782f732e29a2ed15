"""Settings of RAPID's public stage that follow from the public images, the device and the minutes it may take.

The rules were found on letters and on CIFAR-100; docs/methods/rapid.md tells by what measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from rapid.config.sections import ImageSettings
from rapid.data import ImageSet, fit_images, join, to_unit_range
from rapid.data.symmetry import has_plain_background, mirrored_alike, turned_alike
from rapid.errors import InputError
from rapid.methods.base import Choice, Resources, Tree
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Denoiser
from rapid.probe.network import Probe
from rapid.training.timing import seconds_per_step

LARGEST_SIDE = 64
"""Pixels a side to which larger images are reduced."""
LATENT_SIDE = {"cpu": 8, "cuda": 16}
"""Side of the latents: a private step on a CPU takes four times as long at twice the side."""
FLOOR = 29.0
"""PSNR, dB, that the autoencoder reaches on public images which it was not fitted to."""
SHARES = {"denoiser": 0.58, "probe": 0.22, "encoder": 0.08}
"""Of the minutes of the public stage; latents, knowledge base and files take the rest."""
WIDTHS = (32, 48, 64, 96, 128)
"""Channels of the denoiser at its first resolution; the second has twice as many."""
LEAST_EXAMPLES = 300_000
"""Examples that a denoiser of the chosen width sees at least; a wider one would see fewer."""
BATCH = {"denoiser": 256, "probe": 128, "encoder": 128}
PART = 4
"""A step is measured with a batch smaller by this factor."""
FEW_IMAGES = 100_000
"""Up to this number of public images, four random views of each are trained on."""


def choose_public(sets: Sequence[ImageSet], resources: Resources) -> Choice:
    """Settings of the public stage, and defaults of the private one.

    Args:
        sets: the public image sets as they were given.
        resources: device, and minutes of the stage.

    Returns:
        Settings, and lines that say what was chosen and why.
    """
    image, why = _image(sets)
    images = join([fit_images(part, ImageSettings.model_validate(image), "public") for part in sets], "public")
    pixels = images.images
    side = LATENT_SIDE[resources.device.type]
    tree: Tree = {"method": "rapid", "preset": "auto", "image": image, "split": {"reference": 0.15}}
    latents, line = _autoencoder(pixels, image["size"] // side)
    tree["autoencoder"] = latents
    why.append(line)
    augment, line = _augment(pixels)
    why.append(line)
    few = len(images) < FEW_IMAGES
    tree["augmentations"] = {"training": 4 * len(images) if few else 0, "reference": 0, "augment": augment}
    tree["encoder"] = {"augment": augment}
    tree["probe"] = {"augment": augment, "enabled": images.labels is not None}
    tree |= {
        "private": {"objective": "ldm"},
        "generation": {"sampler": "dpm-solver++", "steps": 10, "retrieval": "none"},
    }
    why.append(_networks(tree, len(images.classes) or 1, images.labels is not None, resources))
    return Choice(tree, tuple(why))


def _image(sets: Sequence[ImageSet]) -> tuple[Tree, list[str]]:
    """Size, channels and fit: the largest public images decide."""
    height, width = (max(part.images.shape[axis] for part in sets) for axis in (1, 2))
    channels = max(part.channels for part in sets)
    side = max(height, width)
    colour = "colour" if channels == 3 else "grey"
    if side <= LARGEST_SIDE:
        size = max(16, -(-side // 16) * 16)
        how = "padded" if (height, width) != (size, size) else "as they are"
        fit = "pad"
    else:
        size, fit, how = LARGEST_SIDE, "resize", f"reduced from {width}x{height}"
    return {"size": size, "channels": channels, "fit": fit}, [f"images: {size}x{size}, {colour}, {how}"]


def _autoencoder(pixels: NDArray[np.uint8], patch: int) -> tuple[Tree, str]:
    """The smallest linear autoencoder whose error on the second half of the images is small enough."""
    chosen = np.random.default_rng(0).permutation(len(pixels))[:10_000]
    rows = F.pixel_unshuffle(to_unit_range(pixels[chosen]), patch).movedim(1, -1).double()
    fitted, held = (part.flatten(0, -2) for part in (rows[::2], rows[1::2]))
    if len(held) == 0:
        raise InputError("public", "holds too few images to choose settings by", len(pixels))
    vectors = torch.linalg.eigh(fitted.T @ fitted)[1].flip(1)
    energy = (held @ vectors).square().mean(0)
    # what is left out, summed from the end
    errors = [*energy.flip(0).cumsum(0).flip(0)[1:].tolist(), 0.0]
    size = vectors.shape[1]
    psnr = [10 * math.log10(4 * size / error) if error > 0 else math.inf for error in errors]
    good = next((count for count, value in enumerate(psnr, 1) if value >= FLOOR), size)
    count = min(size, max(4, -(-good // 4) * 4))
    tree = {"kind": "linear", "patch": patch, "latent_channels": count}
    side = math.isqrt(rows.shape[1] * rows.shape[2])
    words = f"{count} principal components of {patch}x{patch} pixels, {side}x{side} of them"
    return tree, f"latents: {words}; {psnr[count - 1]:.1f} dB on held-out public images"


def _augment(pixels: NDArray[np.uint8]) -> tuple[Tree, str]:
    plain, mirror, turn = has_plain_background(pixels), mirrored_alike(pixels), turned_alike(pixels)
    tree = {
        "rotate": 180 if turn else 12 if plain else 5,
        "scale": 0.25 if plain else 0.1,
        "shift": 0.06,
        "flip": mirror,
        "border": "black" if plain else "reflect",
    }
    words = [
        "mirrored" if mirror else "not mirrored: the public images would look different",
        f"turned by up to {tree['rotate']} degrees",
    ]
    return tree, f"augmentation: {', '.join(words)}"


def _networks(tree: Tree, classes: int, labelled: bool, resources: Resources) -> str:
    """Fill in width and steps of each network from measured times."""
    seconds = {name: resources.seconds * share for name, share in SHARES.items()}
    if not labelled:
        seconds["denoiser"] += seconds.pop("probe")
    width, step = WIDTHS[0], 0.0
    for wider in WIDTHS:
        tree["denoiser"] = _denoiser(wider)
        needed = _denoiser_seconds(RapidSettings.model_validate(tree), classes, resources.device)
        if step and seconds["denoiser"] / needed * BATCH["denoiser"] < LEAST_EXAMPLES:
            break
        width, step = wider, needed
    steps = int(seconds["denoiser"] / step)
    tree["denoiser"] = _denoiser(width) | {"training": _training(steps, BATCH["denoiser"], 1e-3)}
    words = [f"denoiser {width} channels, {max(1, steps)} steps"]
    settings = RapidSettings.model_validate(tree)
    if labelled:
        steps = int(seconds["probe"] / _probe_seconds(settings, classes, resources.device))
        tree["probe"]["training"] = _training(min(steps, 6000), BATCH["probe"], 2e-3)
        words.append(f"probe {min(steps, 6000)} steps")
    # a step of the encoder runs the denoiser forward twice
    steps = min(400, int(seconds["encoder"] / (2 * step * BATCH["encoder"] / BATCH["denoiser"])))
    tree["encoder"]["training"] = _training(steps, BATCH["encoder"], 1e-3)
    words.append(f"encoder {max(1, steps)} steps")
    return f"networks: {', '.join(words)}; about {resources.minutes:g} min by the measured time of a step"


def _denoiser(width: int) -> Tree:
    return {"channels": width, "multipliers": [1, 2], "attention": [False, True], "heads": 4}


def _training(steps: int, batch: int, rate: float) -> Tree:
    steps = max(1, steps)
    decay = round(min(0.9998, max(0.98, 1 - 10 / steps)), 4)
    return {
        "steps": steps,
        "batch_size": batch,
        "learning_rate": rate,
        "warmup_steps": min(100, steps),
        "ema_decay": decay,
    }


def _denoiser_seconds(settings: RapidSettings, classes: int, device: torch.device) -> float:
    network, count = Denoiser.build(settings, classes).to(device), BATCH["denoiser"] // PART
    x = torch.randn(count, *settings.latent_shape, device=device)
    t = torch.randint(1, settings.schedule.timesteps + 1, (count,), device=device)
    labels = torch.randint(classes, (count,), device=device)
    # optimiser and average take a few per cent
    return 1.05 * PART * seconds_per_step(lambda: (network(x, t, labels) - x).square().mean().backward(), device)


def _probe_seconds(settings: RapidSettings, classes: int, device: torch.device) -> float:
    probe, count = Probe.build(settings.image, settings.probe, classes).to(device), BATCH["probe"] // PART
    x = torch.randn(count, settings.image.channels, settings.image.size, settings.image.size, device=device)
    # augmentation and the linear layers come on top
    return 1.25 * PART * seconds_per_step(lambda: probe.trunk(x).square().mean().backward(), device)
