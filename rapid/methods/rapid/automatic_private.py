"""Settings of RAPID's private stage that follow from public facts: N, epsilon, and the time of a gradient."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from rapid.data.units import ONE_IMAGE
from rapid.dp.access import PublicFacts
from rapid.dp.calibration import rough_noise_multiplier, single_noise_multiplier
from rapid.dp.gradients import BookKeeper
from rapid.dp.releases import default_delta
from rapid.methods.base import Choice, Tree
from rapid.methods.rapid.networks import build_denoiser
from rapid.methods.rapid.pace import PLAIN_GRADIENT, candidate_work, levels_work
from rapid.methods.rapid.settings import RapidSettings
from rapid.recording import Recorder
from rapid.rounding import as_typed
from rapid.tones.release import is_hidden
from rapid.training.timing import LEAST_SECONDS, seconds_per_step

COUNT, BESIDE = {"cpu": 128, "cuda": 1024}, {"cpu": 1.05, "cuda": 1.2}
"""Examples of a measured step, and factor for noise, optimiser, average and draws."""
REFERENCE = 150, 60_000
"""Steps at epsilon 1 for this many images; found on letters."""
EXPONENT = 0.6
"""Steps grow by this power of N * epsilon."""
LEAST_STEPS, MOST_STEPS = 40, 2000
LARGEST_BATCH = 4096
SMALL_BATCH = 64
"""Of trainings before DP-SGD: many small steps teach more. Classifiers learnt 72 % (small CNN) and 71 % (ResNet) from
coloured letters, and 70 % and 64 % where these trainings had a quarter of the steps, of 256 images."""
WARMUP, MOST_WARMUP, WARMUP_RATE = 0.12, 2400, 1e-3
"""Share of the gradients' time for training on images drawn from moments, most steps of it, and learning rate."""
DISTILLATION, MOST_DISTILLATION, MOST_CANDIDATES = 0.15, 4000, 10_000
"""Share of the gradients' time for selection and distillation before DP-SGD, most steps of it, and most candidates."""
LEAST_CANDIDATES = 32
"""Of each class; fewer are no picture of it."""
LEAST_ACCEPTED = 1 / 3
"""Of the candidates beyond those that chance gives. On letters, where the probe took 62 % for their class, distillation
before DP-SGD raised the share of right images from 56 to 67 %. On classes of CIFAR-100, where it took 15 %, it changed
nothing."""
MULTIPLICITIES = 4, 2, 1
MEAN_OF_DRAWS = 0.3
"""A clipped gradient points the right way by this power of the draws that it is a mean of: on coloured letters 1.23,
1.49 and 1.68 times as far for 2, 4 and 8."""
LEAST_BATCH = 128
"""Images in a step that are more than one draw each."""
LEVELS, UNMEASURED = 0.25, {"enough_accepted": 0.0, "least_accepted": 0.0, "confidence": 0.0}
"""Largest share of the time for finding levels of guidance and confidence, and what images are drawn with instead."""
FEW_DRAWS = 32
"""Of examples in a step: with fewer no run begins. Epsilon cannot be had back, and minutes can."""


def choose_private(
    settings: RapidSettings, facts: PublicFacts, epsilon: float, gradients: float, processes: int = 1
) -> Choice:
    """The section `private` without its objective, which the public bundle decides, and parts of `generation`.

    The same on all machines for the same arguments.

    The signal-to-noise ratio of a step is at best about N * epsilon / sqrt(steps), whatever the batch. So the number of
    steps follows from N * epsilon; batch and multiplicity follow from the minutes (see `_divided`).

    Args:
        settings: of the public bundle.
        facts: of the private images.
        epsilon: of the whole run.
        gradients: number of per-example gradients for which there is time, of all processes together.
        processes: that share the steps; the first one does all else alone, while the others wait.
    """
    moments: Tree = settings.private.moments.model_dump(mode="json")
    levels, generation = processes * levels_work(settings, len(facts.classes)), Tree()
    if levels > LEVELS * gradients:
        levels, generation = 0.0, dict(UNMEASURED)
    gradients -= levels
    alone = gradients / processes
    distillation: Tree = {}
    if moments["share"] > 0:
        warmup = moments["warmup"]
        steps = int(WARMUP * alone / PLAIN_GRADIENT / SMALL_BATCH)
        warmup |= {
            "batch_size": SMALL_BATCH, "learning_rate": WARMUP_RATE, "steps": max(1, min(MOST_WARMUP, steps))
        }  # fmt: skip
        judged = len(facts.classes) > 1 and settings.probe.enabled
        distillation = _distillation(settings, alone, len(facts.classes)) if judged else {}
        gradients *= 1 - WARMUP - (DISTILLATION if distillation else 0)
    steps_at_1, size_at_1 = REFERENCE
    wanted = steps_at_1 * (epsilon * facts.dataset_size / size_at_1) ** EXPONENT
    steps = round(min(MOST_STEPS, max(LEAST_STEPS, wanted)))
    draws = gradients / steps
    multiplicity, batch = _divided(draws, steps, facts.dataset_size, epsilon)
    private: Tree = {
        "expected_batch": batch,
        "multiplicity": multiplicity,
        "steps": steps,
        "clip_norm": 0.3,
        "learning_rate": 2e-3,
        "ema_decay": round(max(0.9, 1 - 5 / steps), 4),
        # with people as units it would depend on how many images there are, which is private
        "physical_batch": "auto" if facts.unit == ONE_IMAGE else settings.private.physical_batch,
        "moments": moments,
    }
    if distillation:
        private["distillation"] = distillation
    size, tones = facts.dataset_size, settings.private.tones.share
    if tones and is_hidden(single_noise_multiplier(tones * epsilon, default_delta(size)), size, facts.image_shape):
        private["tones"] = {"share": 0.0}
    used = min(1.0, batch * multiplicity * steps / gradients)
    drawn = "draw" if multiplicity == 1 else "draws"
    first = f"{distillation['candidates']:,} candidates to distil; " if distillation else ""
    why = (
        f"private: {first}{steps} steps by N = {facts.dataset_size:,} and epsilon {as_typed(epsilon)}, of {batch} "
        f"images on average, {multiplicity} {drawn} each; about {used:.0%} of the time for DP-SGD, as measured"
    )
    lines, too_short = [why], ""
    if draws < FEW_DRAWS and draws < size:
        counted = "less than 1 gradient" if draws < 1 else "1 gradient" if draws < 2 else f"{int(draws)} gradients"
        too_short = (
            f"leave time for {counted} a step, too few for the noise, so that epsilon would be spent for nothing"
        )
    if generation:
        lines.append("images: no time to find levels of guidance and confidence; all classes get full guidance")
    return Choice({"private": private} | ({"generation": generation} if generation else {}), tuple(lines), too_short)


def _divided(draws: float, steps: int, size: int, epsilon: float) -> tuple[int, int]:
    """Draws of each image, and images in a step, for the best signal-to-noise ratio of its mean gradient.

    Where the noise multiplier is proportional to the sample rate, more images are no gain, and the mean of several
    draws of an image is a better gradient. At small rates it hardly falls with them, and more images have less noise.

    Args:
        draws: of a step.
        steps: of the training.
        size: number of private images.
        epsilon: of the whole run; the training is counted as if it had all of it.
    """

    def batch(multiplicity: int) -> int:
        return max(1, int(min(LARGEST_BATCH, size / 4, draws / multiplicity)))

    def signal(multiplicity: int) -> float:
        """In standard deviations of the noise, times an unknown factor."""
        images = batch(multiplicity)
        noise = rough_noise_multiplier(images / size, steps, epsilon, default_delta(size)) / images
        return float(multiplicity**MEAN_OF_DRAWS / noise)

    found = max((k for k in MULTIPLICITIES if k == 1 or draws >= LEAST_BATCH * k), key=signal)
    return found, batch(found)


def _distillation(settings: RapidSettings, gradients: float, classes: int) -> Tree:
    """Rounds before DP-SGD that take about a share of the time of all gradients."""
    time, chance = DISTILLATION * gradients, 1 / classes
    candidates = int(min(MOST_CANDIDATES, time / 3 / candidate_work(settings, settings.generation)))
    steps = int(min(MOST_DISTILLATION, time * 2 / 3 / PLAIN_GRADIENT / SMALL_BATCH))
    if candidates < LEAST_CANDIDATES * classes or not steps:
        return {}
    training = {"steps": steps, "batch_size": SMALL_BATCH, "learning_rate": 2e-3, "warmup_steps": min(50, steps // 10)}
    own: Tree = settings.private.distillation.model_dump(mode="json")
    return own | {
        "candidates": candidates,
        "rounds": 0,
        "rounds_before": 1,
        "least_accepted": round(chance + LEAST_ACCEPTED * (1 - chance), 3),
        "training": training | {"ema_decay": 0.98},
    }


def seconds_per_gradient(
    settings: RapidSettings, device: torch.device, least: float = LEAST_SECONDS, count: int | None = None
) -> float:
    """Seconds of one per-example gradient of the denoiser, clipped and summed, on random numbers.

    Args:
        settings: of the public bundle.
        device: where to compute.
        least: seconds to measure, at least.
        count: examples of a measured step, or half as many, again and again, until they fit into memory; by default
            enough to keep the device busy.
    """
    count = count or COUNT[device.type]
    while count > 1:
        with suppress(torch.OutOfMemoryError):
            return _seconds_of(settings, device, least, count)
        count //= 2
    return _seconds_of(settings, device, least, count)


def _seconds_of(settings: RapidSettings, device: torch.device, least: float, count: int) -> float:
    """See `seconds_per_gradient`; of just so many."""
    classes = 1
    network = build_denoiser(settings, classes).to(device).eval()
    keeper = BookKeeper(network)
    x = torch.randn(count, *settings.latent_shape, device=device)
    t = torch.randint(1, settings.schedule.timesteps + 1, (count,), device=device)
    labels = torch.randint(classes, (count,), device=device)

    def clipped(rows: Tensor) -> list[Tensor]:
        return keeper.clipped_sum(lambda: (network(rows, t, labels) - rows).square().mean((1, 2, 3)), count, 1.0)[0]

    step = Recorder(clipped, device)
    step(x)
    return BESIDE[device.type] * seconds_per_step(lambda: step(x), device, least) / count
