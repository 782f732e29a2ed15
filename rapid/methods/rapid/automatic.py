"""Settings of RAPID's public stage that follow from the public images, the device and the minutes it may take.

The rules were found on letters, on CIFAR-100 and on drawn blood smears; docs/methods/rapid-studies.md tells by what
measurements.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rapid.config.sections import ImageSettings, ScheduleSettings
from rapid.data import ImageSet, fit_images, join, to_unit_range
from rapid.data.canvas import LARGEST_SIDE, SIDE_STEP, rounded_side
from rapid.data.stored import Stored
from rapid.data.symmetry import content_share, has_plain_background, has_strokes, mirrored_alike, turned_alike
from rapid.diffusion import Schedule
from rapid.errors import InputError
from rapid.methods.base import Choice, Resources, Tree
from rapid.methods.rapid.automatic_networks import SMALLEST_SIDE, choose_networks
from rapid.methods.rapid.diagnosis import beyond_chance
from rapid.methods.rapid.distillation_settings import DistillationSettings

SIDES = (4, 8, 16, 32)
"""Sides of latents that are tried; one that is the side of the images has their pixels. With twice the side a private
step takes three times as long on a CPU, and its noise is spread over four times the numbers. Images whose size was set
to no multiple of 16 try all sides between the first and the last."""
MOST_CHANNELS = 24
"""Of latents. On coloured letters, whose 4x4 latents need 36, images with 8x8 of 12 were clearly better to the eye."""
REDUCTIONS = {8: [1, 2, 2], 4: [1, 2]}
"""Of images of writing, whose latents have a side of 4 at least, and the multipliers of their autoencoder."""
STROKE_CHANNELS = 4
"""Of latents of writing. On letters a Frechet distance of 231 with 8x8x12 principal components was 76 with 4x4x4."""
CLIP_RANGE = 3.0
"""Of latents of writing. Principal components have long tails: clipped, images of CIFAR-100 themselves lose 1.4 dB."""
FLOOR = 29.0
"""PSNR, dB, that the autoencoder reaches on public images which it was not fitted to."""
DECODER_NOISE = 0.15
"""The most with which 12 components of 4x4 pixels keep on CIFAR-100 what they keep without (29.7 dB)."""
SHARES_OF_T = (0.8, 0.65, 0.5, 0.35)
"""The k that are tried, from the paper's downwards."""
SIMILAR = 0.3
"""Share of neighbours with the class of their query from which on there is a knowledge base."""
TONES = 0.15
"""Share of epsilon of the tones. Shares add up as squares: it raises the noise of DP-SGD by 2 % at most. The Frechet
distance of letters and of coloured letters fell by half, that of classes of CIFAR-100 not at all."""
BEGINNING: Tree = {
    "private": {
        "objective": "late", "start": 700, "moments": {"share": 0.3}, "tones": {"share": TONES},
        "probe": {"weight_noise": 3.0},
    },
    "generation": {
        "sampler": "dpm-solver++", "steps": 16, "retrieval": "moments", "start": 600,
        "epsilon_scale": 1.1, "confidence": 0.9, "probe_guidance": 0.5
    },
}  # fmt: skip
"""Images begin from released moments: on letters those that began from records of similar classes were worse."""
EXAMPLES = 4096
"""Latents of public images that warm-up moves to the moments of private ones."""
ENOUGH = 0.33
"""Share of its candidates with which a class is guided no further. On drawn blood smears classifiers learnt 2 points
more than with the same guidance for all classes, on coloured letters 1 point less."""
ACCEPTED = 0.8
"""Share of candidates to which confidence is lowered. On drawn smears and coloured letters images then need half the
calls, and classifiers learn as much from them."""
PUBLIC_END = 62
"""Timestep below which the public denoiser takes the last of ten calls: images lose grain and the edges of patches, and
classifiers learn half a point less from them; with two calls, one or two points."""
PROBE: Tree = {"stages": 2, "features": 384}
"""With these and its noise of weights above it recognises, at epsilon 10 and 1, 98.2 and 93.6 % of drawn blood smears
(with the defaults 96.8 and 90.3), of such with classes that are alike 85.6 and 73.0 % (80.7 and 68.5), and of coloured
characters 95.0 and 88.3 % (94.0 and 88.5)."""
SAMPLE = 10_000
"""Images that choices are made by."""
PART = 500
"""Of these images at a time."""
RECORDS, QUERIES = 5000, 1000
FEW_IMAGES = 100_000
"""Up to this number of public images, four random views of each are trained on."""


def choose_public(sets: Sequence[ImageSet], resources: Resources, image: Tree) -> Choice:
    """Settings of the public stage, and defaults of the private one.

    Args:
        sets: the public image sets as they were given.
        resources: device, and minutes of the stage.
        image: what the user set of the section of this name.

    Returns:
        Settings, and lines that say what was chosen and why.
    """
    image, why = _image(sets, image)
    form, count = ImageSettings.model_validate(image), sum(len(part) for part in sets)
    images = join([fit_images(_sampled(part, count), form, "public") for part in sets], "public")
    pixels = images.images
    tree: Tree = {"method": "rapid", "preset": "auto", "image": image, "split": {"reference": 0.15}}
    writing = form.channels == 1 and has_strokes(pixels)
    trained = writing and any(_reduces(reduction, form.size) for reduction in REDUCTIONS)
    found = _strokes(pixels, form.size) if trained else _latents(pixels, image)
    tree["autoencoder"], latents, line = found
    why.append(line)
    augment, line = _augment(pixels)
    why.append(line)
    tree["augmentations"] = {"training": 4 * count if count < FEW_IMAGES else 0, "reference": 0, "augment": augment}
    tree["encoder"] = {"augment": augment}
    tree["probe"] = {"augment": augment, "enabled": images.labels is not None} | PROBE
    tree |= copy.deepcopy(BEGINNING)
    views = DistillationSettings().augment.model_dump(mode="json") | {"border": augment["border"]}
    tree["private"]["distillation"] = {"augment": views}
    if trained:
        tree["generation"]["clip_range"] = CLIP_RANGE
    if not writing:
        tree["subspace"] = {"examples": EXAMPLES}
        tree["private"]["moments"]["warmup_on"] = "public"
        tree["generation"] |= {"enough_accepted": ENOUGH, "least_accepted": ACCEPTED, "public_below": PUBLIC_END}
        why.append(f"warm-up: public images are moved to private moments; the bundle keeps latents of {EXAMPLES:,}")
    tree["retrieval"], line = _retrieval(latents, images.labels)
    why.append(line)
    why.append("tones: images get the brightness of private ones, by channel")
    if writing:
        why.append("handwriting? --networks builtin:scripts begins with networks that know it, and takes minutes")
    labelled = images.labels is not None
    why.append(choose_networks(tree, count, len(images.classes) or 1, labelled, resources))
    return Choice(tree, tuple(why))


def _image(sets: Sequence[ImageSet], given: Tree) -> tuple[Tree, list[str]]:
    """Size, channels and fit, as set or by the largest public images. Private images may be larger."""
    if sum(map(len, sets)) == 1:
        raise InputError("public", "has a single image; give more, on which networks can be trained", sets[0].source)
    found = [part.stored or Stored.alike(part.images) for part in sets]
    side, channels = max(one.side for one in found), max(one.channels for one in found)
    size = min(LARGEST_SIDE, rounded_side(side))
    image: Tree = {"size": size, "channels": channels, "fit": "contain"} | given
    size, channels = image["size"], image["channels"]
    sizes = " and ".join(dict.fromkeys(one.sizes for one in found))
    if side > size:
        how = f"scaled down from {sizes} with their aspect ratio kept, and padded"
    else:
        how = "as they are" if sizes == f"{size}x{size}" else f"padded from {sizes}"
    line = f"images: {size}x{size}, {'colour' if channels == 3 else 'grey'}, {how}"
    return image, [line]


def _latents(pixels: NDArray[np.uint8], image: Tree) -> tuple[Tree, Tensor, str]:
    """The coarsest latents of those that keep images above the floor with few enough channels.

    Returns:
        Settings of the autoencoder; normalised latents, see `_components`; a line for the user.
    """
    size, passed = image["size"], []
    for side in _sides(size):
        tree, latents, psnr = _components(pixels, size // side)
        count, name = tree["latent_channels"], f"{side}x{side}"
        passed.append(f"{name} need {count} channels")
        if count <= MOST_CHANNELS:
            break
    # the last one is chosen, if none has few enough
    passed.pop()
    line = f"latents: {name}, {count} principal components of {size // side}x{size // side} pixels; "
    return tree, latents, "; ".join([f"{line}{psnr:.1f} dB on held-out public images", *passed])


def _sides(size: int) -> list[int]:
    """Sides of latents for images of a size.

    Raises:
        InputError: none divides it.
    """
    tried = SIDES if size % SIDE_STEP == 0 else range(SIDES[0], SIDES[-1] + 1)
    if not (found := [side for side in tried if size % side == 0]):
        problem = (
            f"{size} has no divisor from {SIDES[0]} to {SIDES[-1]}, as the side of latents; use {rounded_side(size)}"
        )
        raise InputError("image.size", problem)
    return found


def _strokes(pixels: NDArray[np.uint8], size: int) -> tuple[Tree, Tensor, str]:
    """A small autoencoder for writing: its decoder knows strokes, which principal components leave to the denoiser.

    Returns:
        As `_latents`, with normalised latents of principal components: the autoencoder is not trained yet.
    """
    reduction, levels = next((n, own) for n, own in REDUCTIONS.items() if _reduces(n, size))
    tree = {"kind": "kl", "patch": 2, "latent_channels": STROKE_CHANNELS, "channels": 48, "multipliers": levels}
    side = size // reduction
    line = f"latents: {side}x{side} with {STROKE_CHANNELS} channels of an autoencoder that is trained, as for writing"
    return tree, _components(pixels, SMALLEST_SIDE)[1], line


def _reduces(reduction: int, size: int) -> bool:
    return size % reduction == 0 and size // reduction >= SMALLEST_SIDE


def _components(pixels: NDArray[np.uint8], patch: int) -> tuple[Tree, Tensor, float]:
    """The smallest linear autoencoder with an error that is small enough, judged on images that it was not fitted to.

    The error is that of a pixel within the black frame that all images may have from padding.

    Returns:
        Settings; normalised latents of a sample of the images, float (n, d), in random order; PSNR, dB.
    """
    order = _order(len(pixels))
    if len(order) < 2:
        raise InputError("public", "holds too few images to choose settings by", len(pixels))
    fitted, held = (_patch_moment(pixels[order[half::2]], patch) for half in (0, 1))
    vectors = torch.linalg.eigh(fitted)[1].flip(1)
    # mean squares of the held-out patches along each vector
    energy = (vectors * (held @ vectors)).sum(0)
    # what is left out, summed from the end
    errors = [*energy.flip(0).cumsum(0).flip(0)[1:].tolist(), 0.0]
    size = vectors.shape[1]
    size_within = size * content_share(pixels)
    psnr = [10 * math.log10(4 * size_within / error) if error > 0 else math.inf for error in errors]
    good = next((count for count, value in enumerate(psnr, 1) if value >= FLOOR), size)
    count = min(size, max(4, -(-good // 4) * 4))
    latents = torch.cat([rows @ vectors[:, :count].float() for rows in _patches(pixels[order], patch)])
    deviation, mean = torch.std_mean(latents, (0, 1, 2), correction=0)
    normalised = ((latents - mean) / deviation.clamp_min(1e-6)).flatten(1)
    tree = {"kind": "linear", "patch": patch, "latent_channels": count, "decoder_noise": DECODER_NOISE}
    return tree, normalised, psnr[count - 1]


def _patches(pixels: NDArray[np.uint8], patch: int) -> Iterator[Tensor]:
    """The patches of images, float32 (n, h, w, channels * patch^2) for n images at a time."""
    for start in range(0, len(pixels), PART):
        yield F.pixel_unshuffle(to_unit_range(pixels[start : start + PART]), patch).movedim(1, -1)


def _patch_moment(pixels: NDArray[np.uint8], patch: int) -> Tensor:
    """Mean of the outer products of all patches, float64 (channels * patch^2, channels * patch^2)."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for part in _patches(pixels, patch):
        rows = part.flatten(0, -2).double()
        total, count = total + rows.T @ rows, count + len(rows)
    return total / count


def _retrieval(latents: Tensor, labels: NDArray[np.int64] | None) -> tuple[Tree, str]:
    """A knowledge base with its k and v, where the nearest latent of a noisy one often has its class.

    It is the search of the knowledge base without its networks, which are not trained yet: half of the images are
    diffused to k, and their neighbours among the other half are those that make x_k likeliest.
    """
    off: Tree = {"enabled": False}
    if labels is None:
        return off, "retrieval: off; without labels it cannot be tested"
    own = torch.from_numpy(labels[_order(len(labels))])
    records, queries = latents[::2][:RECORDS], latents[1::2][:QUERIES]
    wanted, classes = own[1::2][:QUERIES], own[::2][:RECORDS]
    chance = float((wanted[:, None] == classes).double().mean())
    schedule = Schedule.build(ScheduleSettings())
    generator = torch.Generator().manual_seed(0)
    tried = []
    for share in SHARES_OF_T:
        k = round(share * schedule.timesteps)
        signal = float(schedule.signal(torch.tensor([k])))
        noisy = signal * queries + math.sqrt(1 - signal**2) * torch.randn(queries.shape, generator=generator)
        scores = signal * noisy @ records.T - 0.5 * signal**2 * records.square().sum(1)
        top1 = float((classes[scores.argmax(1)] == wanted).double().mean())
        tried.append(f"{top1:.0%} at k = {k}")
        if top1 >= SIMILAR and beyond_chance(top1, chance, len(queries), 3.0):
            line = f"retrieval: k = {k}, v = {k // 4}; {top1:.0%} of the nearest public images have the class of a "
            line += f"query, by chance {chance:.0%}; with --set generation.retrieval=class images begin from them"
            return {"k": k, "v": k // 4}, line
    words = f"of the nearest public images {', '.join(tried)} have the class of a query, by chance {chance:.0%}"
    return off, f"retrieval: off; {words}"


def _order(count: int) -> NDArray[np.int64]:
    """Images that choices are made by, in random order."""
    return np.random.default_rng(0).permutation(count)[:SAMPLE]


def _sampled(part: ImageSet, total: int) -> ImageSet:
    """A random part of a set, of about SAMPLE images of all `total`: a set may be larger than memory."""
    rows = np.sort(np.random.default_rng(1).permutation(len(part))[: max(1, math.ceil(SAMPLE * len(part) / total))])
    labels = None if part.labels is None else part.labels[rows]
    return replace(part, images=part.images[rows], labels=labels)


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
