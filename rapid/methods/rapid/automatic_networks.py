"""Widths and steps of RAPID's public networks that fill some minutes, by the time that their own first steps take."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rapid.config.sections import AutoencoderSettings, Training
from rapid.data.augmented import AugmentedImages
from rapid.diffusion import Schedule
from rapid.methods.base import Resources, Tree
from rapid.methods.rapid.networks import (
    AutoencoderRecipe,
    DenoiserRecipe,
    EncoderRecipe,
    build_denoiser,
    encode_views,
    one_step_query,
    train_autoencoder,
    train_denoiser,
    train_encoder,
)
from rapid.methods.rapid.retrieval import QUERIES
from rapid.methods.rapid.settings import RapidSettings
from rapid.methods.rapid.subspace import VIEWS
from rapid.nn import Autoencoder, TrajectoryEncoder
from rapid.probe.features import ProbeRecipe, class_prototypes, train_features
from rapid.probe.network import Probe
from rapid.progress import hidden
from rapid.training import Checkpoint
from rapid.training.loss import Loss, LossGradient
from rapid.training.timing import seconds_per_step, seconds_per_training_step

SHARES = {"autoencoder": 0.4, "probe": 0.2, "encoder": 0.09}
"""Of the time for training, at most, where there is such a training; the denoiser has the rest."""
WIDTHS = (32, 48, 64, 96, 128)
"""Channels of the denoiser at its first resolution; a second one has twice as many."""
EXAMPLES_PER_SQUARE = 130
"""Examples that a denoiser of the chosen width sees at least, for each of its channels squared, as its weights are:
300,000 at 48 channels, 530,000 at 64, 2.1 million at 128. In seven minutes, 64 channels (120,000 examples) and 48
(230,000) learnt CIFAR-100 equally well, and the narrower one costs less in the private stage."""
BATCH = {"autoencoder": 64, "probe": 128, "encoder": 128}
RATES = {"autoencoder": 1e-3, "probe": 2e-3, "encoder": 1e-3}
DENOISER = {"cpu": (64, 2e-3), "cuda": (256, 1e-3)}
"""Batch and rate of the denoiser: many small steps teach more in the minutes of a CPU, and a GPU needs large ones to be
busy. After 400,000 examples of CIFAR-100 the loss of other images was 0.88, and 0.94 with 256 and 1e-3; at t up to 300,
which decides about grain, 0.65 and 0.75."""
MOST_STEPS = {"autoencoder": 2500, "probe": 6000, "encoder": 400}
SMALLEST_SIDE = 4
"""Of latents: up to it, the denoiser has one resolution."""
MOST_ATTENDED = 16
"""Side of maps in which all positions attend to each other."""
COMPARED = {"cpu": 64, "cuda": 256}
"""Examples of the steps that widths are compared by."""
MEASURED_SHARE, MEASURED_SECONDS = 0.01, 5.0
"""How long first steps are measured: a share of the time, at most so many seconds."""
SAMPLE = 500
"""Random images that are measured with."""
PASSES = {"linear": 3, "kl": 2}
"""Over the images, beside trainings, by kind of autoencoder: basis, statistics, and the latents that are trained on."""
ENCODED = 0.1
"""Share of the time for these passes, from which the number of views follows where an autoencoder is trained."""
LEAST_PART = 2
"""Examples of a process in a measured step; the encoder needs two to tell apart."""
LEFT = 0.03
"""Share of the time for files, and for what differs from the measurement."""


def choose_networks(tree: Tree, count: int, classes: int, labelled: bool, resources: Resources) -> str:
    """Fill in width and steps of each network.

    Args:
        tree: the other settings; sections of the networks are added to it.
        count: number of public images.
        classes: number of public classes, 1 or more.
        labelled: whether there is a probe.
        resources: device, and the time that is left.

    Returns:
        A line for the user.
    """
    device, least = resources.device, min(MEASURED_SECONDS, MEASURED_SHARE * resources.seconds)
    side = tree["image"]["size"] // AutoencoderSettings.model_validate(tree["autoencoder"]).reduction
    tree["denoiser"], trained = denoiser_of(WIDTHS[0], side), tree["autoencoder"]["kind"] == "kl"
    pace = _Pace(tree, classes, device, least, resources.processes)
    each = pace.encoding()
    if trained:
        views = int(ENCODED * resources.seconds / PASSES["kl"] / each)
        tree["augmentations"]["training"] = min(4 * count, max(SAMPLE, views))
    planned = pace.preparation(count, each) + (pace.prototypes(count) if labelled else 0.0)
    available = max(0.0, (1 - LEFT) * resources.seconds_left - planned)
    wanted = {
        "autoencoder": trained,
        "probe": labelled,
        "encoder": tree.get("retrieval", {}).get("enabled", True),
    }
    shares = {name: share for name, share in SHARES.items() if wanted[name]}
    width = WIDTHS[0]
    for wider in WIDTHS:
        tree["denoiser"] = denoiser_of(wider, side)
        seconds = _seconds_per_example(RapidSettings.model_validate(tree), classes, device)
        examples = (1 - sum(shares.values())) * available / seconds
        if wider > WIDTHS[0] and examples < EXAMPLES_PER_SQUARE * wider**2:
            break
        width = wider
    tree["denoiser"] = denoiser_of(width, side)
    if wanted["encoder"]:
        planned += pace.records(count)
    words = []
    for name, share in shares.items():
        seconds = {"autoencoder": pace.autoencoder, "probe": pace.probe, "encoder": pace.encoder}[name]()
        steps = min(MOST_STEPS[name], int(share * available / seconds))
        tree[name]["training"] = training(steps, BATCH[name], RATES[name])
        words.append(f"{name} {tree[name]['training']['steps']:,} steps")
        planned += steps * seconds
    step = pace.denoiser()
    # measuring took time, too
    steps = int(max(0.0, (1 - LEFT) * resources.seconds_left - planned) / step)
    tree["denoiser"]["training"] = training(steps, *DENOISER[device.type])
    words.insert(0, f"denoiser {width} channels, {max(1, steps):,} steps")
    return f"networks: {', '.join(words)}; about {resources.minutes:g} min by the measured time of first steps"


def training(steps: int, batch: int, rate: float) -> Tree:
    """Settings of a training, with an average over its last part."""
    steps = max(1, steps)
    decay = round(min(0.9998, max(0.98, 1 - 10 / steps)), 4)
    return {
        "steps": steps,
        "batch_size": batch,
        "learning_rate": rate,
        "warmup_steps": min(100, steps),
        "ema_decay": decay,
    }


def denoiser_of(width: int, side: int) -> Tree:
    """Settings of a denoiser of this width, for latents of this side."""
    levels = {"multipliers": [1, 2], "attention": [False, True]}
    # an odd side cannot be halved
    if side <= SMALLEST_SIDE or side % 2:
        levels = {"multipliers": [1], "attention": [side <= MOST_ATTENDED]}
    return {"prediction": "velocity", "channels": width, **levels, "heads": 4}


def _seconds_per_example(settings: RapidSettings, classes: int, device: torch.device) -> float:
    """Time of an example in a step of the denoiser without optimiser and average, for comparing widths."""
    network, count = build_denoiser(settings, classes).to(device), COMPARED[device.type]
    x = torch.randn(count, *settings.latent_shape, device=device)
    t = torch.randint(1, settings.schedule.timesteps + 1, (count,), device=device)
    labels = torch.randint(classes, (count,), device=device)
    loss = Loss(lambda _: [x], lambda rows: (network(rows, t, labels) - rows).square().mean())
    gradient = LossGradient(loss, list(network.parameters()), "auto")
    gradient([x])
    return seconds_per_step(lambda: gradient([x]), device) / count


class _Pace:
    """Times of the trainings of the public stage, which are run for a few steps on random images.

    Several processes share the batch of a step: one is measured, with its part, and times are those of all together.

    Args:
        tree: settings; those of the denoiser may change between two measurements.
        classes: number of public classes.
        device: where to train.
        least: seconds that a measurement takes, about.
        processes: that share each step.
    """

    def __init__(self, tree: Tree, classes: int, device: torch.device, least: float, processes: int = 1) -> None:
        self._tree = tree
        self._classes = classes
        self._device = device
        self._least = least
        self._processes = processes
        form = RapidSettings.model_validate(tree).image
        shape = (SAMPLE, form.size, form.size) + (3,) * (form.channels == 3)
        self._images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        self._labels = np.arange(SAMPLE) % classes

    @property
    def _settings(self) -> RapidSettings:
        return RapidSettings.model_validate(self._tree)

    def autoencoder(self) -> float:
        """Seconds of a step of an autoencoder that is trained."""

        def train(steps: int, checkpoint: Checkpoint) -> None:
            train_autoencoder(self._autoencoder_recipe(steps), self._views(), self._device, checkpoint)

        return self._processes * seconds_per_training_step(train, self._device, self._least)

    def denoiser(self) -> float:
        """Seconds of a step of the denoiser."""
        latents = torch.randn(SAMPLE, *self._settings.latent_shape, device=self._device)
        labels = torch.from_numpy(self._labels).to(self._device)

        def train(steps: int, checkpoint: Checkpoint) -> None:
            train_denoiser(self._denoiser_recipe(steps), latents, labels, self._classes, checkpoint)

        return self._processes * seconds_per_training_step(train, self._device, self._least)

    def probe(self) -> float:
        """Seconds of a step of the features of the probe."""
        s = self._settings

        def train(steps: int, checkpoint: Checkpoint) -> None:
            own = s.probe.model_copy(update={"training": self._few(steps, BATCH["probe"])})
            recipe = ProbeRecipe(images="", image=s.image, probe=own)
            train_features(recipe, self._images, self._labels, self._classes, self._device, checkpoint)

        return self._processes * seconds_per_training_step(train, self._device, self._least)

    def encoder(self) -> float:
        """Seconds of a step of the trajectory encoder, whose queries run the denoiser."""
        autoencoder = self._autoencoder()
        denoiser = build_denoiser(self._denoiser_recipe(1), self._classes).to(self._device).eval()

        def train(steps: int, checkpoint: Checkpoint) -> None:
            train_encoder(self._encoder_recipe(steps), self._images, autoencoder, denoiser, self._device, checkpoint)

        return self._processes * seconds_per_training_step(train, self._device, self._least)

    def encoding(self) -> float:
        """Seconds in which a view of an image is made and brought to its latent."""
        autoencoder, views = self._autoencoder(), self._views()
        with hidden():
            encode_views(autoencoder, views)
            begin = time.monotonic()
            encode_views(autoencoder, views)
        return (time.monotonic() - begin) / SAMPLE

    def preparation(self, count: int, each: float) -> float:
        """Seconds in which all images are brought to latents, as often as the stage does it.

        Args:
            count: number of public images.
            each: what `encoding` found.
        """
        s = self._settings
        shown = (1 - s.split.reference) * count if not s.augmentations.training else s.augmentations.training
        kept = s.split.reference * (s.augmentations.reference or count)
        return (PASSES[s.autoencoder.kind] * shown + kept + VIEWS) * each

    def prototypes(self, count: int) -> float:
        """Seconds in which the probe sees all images for its projection, and again for its prototypes.

        Args:
            count: number of public images.
        """
        s = self._settings
        probe = Probe.build(s.image, s.probe, self._classes).to(self._device).eval()
        class_prototypes(probe, self._images, self._labels, self._classes, self._device)
        begin = time.monotonic()
        class_prototypes(probe, self._images, self._labels, self._classes, self._device)
        return 2 * (1 - s.split.reference) * count * (time.monotonic() - begin) / SAMPLE

    def records(self, count: int) -> float:
        """Seconds in which the knowledge base is made and searched, beside what `preparation` counts.

        Args:
            count: number of public images.
        """
        s = self._settings
        denoiser = build_denoiser(self._denoiser_recipe(1), self._classes).to(self._device).eval()
        encoder = TrajectoryEncoder.build(self._encoder_recipe()).to(self._device).eval()
        schedule = Schedule.build(s.schedule).to(self._device)
        latents, eps = torch.randn(2, SAMPLE, *s.latent_shape, device=self._device)

        @torch.no_grad()
        def keys() -> Tensor:
            found: Tensor = encoder(one_step_query(denoiser, schedule, latents, eps, s.retrieval.k))
            return found

        made = s.split.reference * (s.augmentations.reference or count) + min(QUERIES, count)
        return made * seconds_per_step(keys, self._device) / SAMPLE

    def _views(self) -> AugmentedImages:
        s = self._settings
        count = SAMPLE if s.augmentations.training else 0
        return AugmentedImages(self._images, np.zeros(SAMPLE, np.int64), count, s.augmentations.augment, self._device)

    def _autoencoder(self) -> Autoencoder:
        with tempfile.TemporaryDirectory() as folder, hidden():
            recipe, state = self._autoencoder_recipe(1), Checkpoint(Path(folder) / "state")
            return train_autoencoder(recipe, self._views(), self._device, state)

    def _autoencoder_recipe(self, steps: int) -> AutoencoderRecipe:
        s = self._settings
        own = s.autoencoder.model_copy(update={"training": self._few(steps, BATCH["autoencoder"])})
        return AutoencoderRecipe(
            images="", image=s.image, views=0, augment=s.augmentations.augment, autoencoder=own
        )  # fmt: skip

    def _encoder_recipe(self, steps: int = 1) -> EncoderRecipe:
        s = self._settings
        own = s.encoder.model_copy(update={"training": self._few(steps, BATCH["encoder"])})
        return EncoderRecipe(images="", schedule=s.schedule, encoder=own, latent_shape=s.latent_shape, k=s.retrieval.k)

    def _denoiser_recipe(self, steps: int) -> DenoiserRecipe:
        s = self._settings
        own = s.denoiser.model_copy(update={"training": self._few(steps, DENOISER[self._device.type][0])})
        return DenoiserRecipe(
            images="",
            views=0,
            augment=s.augmentations.augment,
            schedule=s.schedule,
            denoiser=own,
            latent_shape=s.latent_shape,
        )

    def _few(self, steps: int, batch: int) -> Training:
        """A few steps of one process, with its part of the batch."""
        own = max(LEAST_PART, batch // self._processes)
        return Training(steps=steps, batch_size=own, warmup_steps=0, ema_decay=0.98)
