"""The Generator: a bundle in, images out; the command line and the server use this one object."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.bundle import Bundle
from rapid.config import GenerationSettings
from rapid.data import to_uint8, to_unit_range
from rapid.diffusion import Schedule
from rapid.diffusion.samplers import early_grid, late_grid, run
from rapid.entries import ClassEntries, choose_neighbours
from rapid.errors import InputError
from rapid.models import Denoiser, Judge
from rapid.runtime import choose_device
from rapid.selection import Selection

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Samples:
    """Generated images.

    Attributes:
        images: uint8, (N, H, W) grey or (N, H, W, 3) RGB.
        labels: int64 (N,), indices into the model's classes; None from an unconditional model.
        seed: the seed that makes the same images again.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64] | None
    seed: int


class Retrieved(NamedTuple):
    """Entries of the knowledge base for n images."""

    denoised: Tensor | None
    """One-step-denoised latents of step k, float (n, c, h, w): what the encoder sees; None without a query."""
    indices: NDArray[np.int64]
    """Entries of the knowledge base, (n,)."""
    values: Tensor
    """Their values of step v, float (n, c, h, w)."""


class Start(NamedTuple):
    """Where the denoising of n images begins."""

    x: Tensor
    """The states x_t, float (n, c, h, w)."""
    t: int
    retrieved: Retrieved | None
    """None if it begins with noise."""


class Generator:
    """Samples from a bundle.

    x_T ~ N(0, I); T -> k with the public denoiser, unconditionally; z_k = h(x_k); the nearest key's value at v; v -> 0
    with the denoiser of the bundle. With 100 steps, k = 0.8 T and v = 0.2 T these are 20 + 20 network calls. The
    knowledge base is public and the query comes from noise, so all of it is post-processing.

    Three settings differ from the paper. With `private.start` (or `generation.start`) beyond v the value is first
    diffused on to that step with noise of its own. With `generation.epsilon_scale` above 1 less noise is taken away
    than is predicted (epsilon scaling; Ning et al., ICLR 2024): a denoiser that was trained with noise predicts too
    much like the mean, and its images vary too little. With `generation.retrieval` = class there is no query: the
    entry is drawn among those of public classes that the private judge likens to the wanted class (see
    `ClassEntries`), post-processing again.

    If the bundle has a judge, images are candidates: each is taken for the class that the judge sees in it, until all
    that were asked for are there (see `Selection`) or `attempts` times as many were drawn: post-processing, too.

    Candidate n of a seed has its own noise stream, so an image does not depend on how many images of the same classes
    are asked for at once.

    Attributes:
        name: name of the bundle's folder.
        classes: names of the classes; empty for an unconditional model.
        image_shape: (H, W) or (H, W, 3).
        privacy: content of `privacy.json`; None for a public bundle.
        settings: how images are sampled.
    """

    def __init__(self, bundle: Bundle, device: torch.device, settings: GenerationSettings | None = None) -> None:
        self.bundle = bundle
        self.name = bundle.path.resolve().name
        self.classes = bundle.config.classes
        self.privacy = bundle.privacy
        self.settings = settings or bundle.settings.generation
        image = bundle.settings.image
        self.image_shape: tuple[int, ...] = (image.size, image.size) + ((3,) if image.channels == 3 else ())
        self._device = device
        self._autoencoder = bundle.autoencoder().to(device)
        self._denoiser = bundle.denoiser().to(device)
        self._public_denoiser = bundle.public_denoiser().to(device)
        self._encoder = bundle.encoder().to(device)
        judge = bundle.judge() if bundle.config.kind == "private" else None
        self._judge = None if judge is None or self.settings.attempts == 1 else judge.to(device)
        self._knowledge_base = bundle.knowledge_base()
        self._entries = self._class_entries(judge)
        self._schedule = Schedule.build(bundle.settings.schedule).to(device)
        self._stride = max(1, self._schedule.timesteps // self.settings.steps)
        self._trained = _last_private_timestep(bundle)

    @classmethod
    def open(cls, path: Path, device: str = "auto", settings: GenerationSettings | None = None) -> Generator:
        """Open a bundle for sampling.

        Raises:
            InputError: no finished bundle, parts that do not belong together, or an unknown device.
        """
        return cls(Bundle.open(path, "--model"), choose_device(device), settings)

    @property
    def info(self) -> dict[str, Any]:
        """What is in the bundle, ready for JSON."""
        return describe(self.bundle)

    def resolve_labels(self, labels: Sequence[int | str]) -> list[int]:
        """Class indices of class names or indices; a name takes precedence over a number.

        Raises:
            InputError: a label that the model does not know.
        """
        names = {name: number for number, name in enumerate(self.classes)}
        resolved = []
        for label in labels:
            text = str(label)
            if text in names and not isinstance(label, int):
                resolved.append(names[text])
            elif text.isascii() and text.isdigit() and len(text) < 10 and int(text) < len(self.classes):
                resolved.append(int(text))
            else:
                known = f"the model knows {', '.join(self.classes)}" if self.classes else "the model has no classes"
                raise InputError(f"--labels {text}: unknown; {known}")
        return resolved

    def generate(
        self,
        count: int,
        labels: Sequence[int] | None = None,
        seed: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Samples:
        """Make `count` images.

        Args:
            count: at least 1.
            labels: `count` class indices; None takes all classes in turn.
            seed: 0..2^63 - 1; None draws one.
            progress: called with (images done, count).

        Raises:
            InputError: an argument out of range.
        """
        if count < 1:
            raise InputError(f"--count {count}: must be at least 1")
        if labels is not None and len(labels) != count:
            raise InputError(f"labels: {len(labels)} given for {count} images; give one for each")
        if labels is not None and not self.classes:
            raise InputError("--labels: the model has no classes; leave it out")
        seed = secrets.randbits(53) if seed is None else seed
        if not 0 <= seed <= MAX_SEED:
            raise InputError(f"--seed {seed}: must lie in 0..{MAX_SEED}")
        chosen = None
        if self.classes:
            chosen = np.asarray(labels if labels is not None else np.arange(count) % len(self.classes), np.int64)
        if self._judge is not None and chosen is not None:
            return Samples(self._select(chosen, seed, progress or (lambda done, total: None)), chosen, seed)
        parts = []
        for start in range(0, count, self.settings.batch_size):
            stop = min(count, start + self.settings.batch_size)
            parts.append(self._sample(seed, np.arange(start, stop), None if chosen is None else chosen[start:stop]))
            if progress is not None:
                progress(stop, count)
        return Samples(np.concatenate(parts), chosen, seed)

    def start(self, seed: int, numbers: NDArray[np.int64], labels: NDArray[np.int64] | None) -> Start:
        """Where some images of a seed begin, each from its own stream; numbers and labels are (n,)."""
        shape = self.bundle.settings.latent_shape
        streams = [np.random.Generator(np.random.Philox(key=[seed, int(number)])) for number in numbers]

        def normal() -> Tensor:
            rows = [stream.standard_normal(shape, np.float32) for stream in streams]
            return torch.from_numpy(np.stack(rows)).to(self._device)

        noise = normal()
        if self.settings.retrieval == "none":
            return Start(noise, self._schedule.timesteps, None)
        if self._entries is None:
            several = self.bundle.settings.private.neighbours > 1
            retrieved = self.retrieve(noise, np.array([stream.random() for stream in streams]) if several else None)
        else:
            assert labels is not None
            indices = self._entries.choose(labels, np.stack([stream.random(2) for stream in streams]))
            retrieved = Retrieved(None, indices, self._values(indices))
        begin, v = self.settings.start or self.bundle.settings.late_start, self.bundle.settings.retrieval.v
        if begin == v:
            return Start(retrieved.values, v, retrieved)
        steps = (torch.full((len(noise),), step, device=self._device) for step in (v, begin))
        return Start(self._schedule.diffuse_on(retrieved.values, normal(), *steps), begin, retrieved)

    @torch.no_grad()
    def retrieve(self, noise: Tensor, pick: NDArray[np.float64] | None = None) -> Retrieved:
        """From x_T, float (n, c, h, w), to the retrieved values: the steps T -> k and the search.

        `pick`, (n,) in [0, 1), chooses among several neighbours; None takes the nearest.
        """
        settings = self.bundle.settings
        grid = early_grid(self._schedule.timesteps, settings.retrieval.k, self._stride)
        null = self._public_denoiser.null_labels(len(noise))

        def predict(x: Tensor, t: int) -> Tensor:
            return self._public_denoiser(x, _fill(x, t), null)

        denoised = run(self.settings.sampler, self._schedule, predict, noise, grid, self._stride, denoise_last=True)
        queries = self._encoder(denoised).cpu().numpy()
        indices = choose_neighbours(self._knowledge_base, queries, settings.private.neighbours, pick)
        return Retrieved(denoised, indices, self._values(indices))

    @torch.no_grad()
    def finish(self, x: Tensor, start: int, labels: NDArray[np.int64] | None) -> Tensor:
        """From x_start to x_0: with the bundle's denoiser where it was trained, with the public one above that."""
        grid = late_grid(start, self._stride)
        count = len(x)
        null = self._public_denoiser.null_labels(count)
        y = self._denoiser.null_labels(count) if labels is None else torch.from_numpy(labels).to(self._device)

        def predict(state: Tensor, t: int) -> Tensor:
            if t > self._trained:
                return self._public_denoiser(state, _fill(state, t), null)
            noise = guided(self._denoiser, state, _fill(state, t), y, self.settings.guidance)
            return noise / self.settings.epsilon_scale

        return run(self.settings.sampler, self._schedule, predict, x, grid, self._stride)

    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        """Images, uint8 (n, H, W) or (n, H, W, 3), of normalised latents."""
        return to_uint8(self._autoencoder.decode(latents))

    def _select(self, labels: NDArray[np.int64], seed: int, progress: Callable[[int, int], None]) -> NDArray[np.uint8]:
        """Images of the wanted classes by the judge; candidates are drawn for the wanted classes in turn."""
        assert self._judge is not None
        selection, wanted = Selection(labels), np.unique(labels)
        drawn, most = 0, self.settings.attempts * len(labels)
        while selection.missing and drawn < most:
            numbers = np.arange(drawn, min(most, drawn + min(self.settings.batch_size, 2 * selection.missing)))
            images = self._sample(seed, numbers, wanted[numbers % len(wanted)])
            probabilities = self._judge.probabilities(to_unit_range(images, self._device))
            selection.offer(images, probabilities.cpu().numpy())
            drawn += len(numbers)
            progress(len(labels) - selection.missing, len(labels))
        progress(len(labels), len(labels))
        return selection.fill()

    def _sample(self, seed: int, numbers: NDArray[np.int64], labels: NDArray[np.int64] | None) -> NDArray[np.uint8]:
        start = self.start(seed, numbers, labels)
        return self.decode(self.finish(start.x, start.t, labels))

    def _values(self, indices: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self._knowledge_base.values(indices)).to(self._device)

    def _class_entries(self, judge: Judge | None) -> ClassEntries | None:
        """Entries by class: of the class itself in a public bundle, of public classes that look like it in others.

        None, and so a query, where there are no classes or no judge to compare them.
        """
        labels = self._knowledge_base.labels
        if self.settings.retrieval != "class" or not self.classes:
            return None
        if self.bundle.config.kind == "public":
            return ClassEntries(np.eye(len(self.classes)), labels)
        return None if judge is None else ClassEntries(judge.resemblance().numpy(), labels)


def guided(denoiser: Denoiser, x: Tensor, t: Tensor, labels: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance: eps_null + scale (eps_label - eps_null); one call if scale is 1."""
    if scale == 1:
        return denoiser(x, t, labels)
    null = denoiser.null_labels(len(x))
    both = denoiser(torch.cat([x, x]), torch.cat([t, t]), torch.cat([labels, null]))
    conditional, unconditional = both.chunk(2)
    return unconditional + scale * (conditional - unconditional)


def describe(bundle: Bundle) -> dict[str, Any]:
    """What is in a bundle, ready for JSON: networks, k, v, knowledge base, privacy statement."""
    settings, config = bundle.settings, bundle.config
    networks = {
        name: {"sha256": digest, "parameters": _parameters(bundle, name)} for name, digest in config.networks.items()
    }
    return {
        "name": bundle.path.resolve().name,
        "kind": config.kind,
        "rapid": config.rapid,
        "preset": settings.preset,
        "classes": list(config.classes),
        "image": {"size": settings.image.size, "channels": settings.image.channels},
        "latent": list(settings.latent_shape),
        "timesteps": settings.schedule.timesteps,
        "k": settings.retrieval.k,
        "v": settings.retrieval.v,
        "start": settings.late_start,
        "objective": settings.private.objective if config.kind == "private" else None,
        "generation": settings.generation.model_dump(mode="json"),
        "networks": networks,
        "knowledge_base": {"entries": len(bundle.knowledge_base()), "index": settings.knowledge_base.index_type},
        "public": config.public.model_dump(mode="json", exclude={"fingerprint"}),
        "retrieval": None if config.retrieval is None else config.retrieval.model_dump(mode="json"),
        "privacy": bundle.privacy,
    }


def _parameters(bundle: Bundle, name: str) -> int:
    from safetensors import safe_open

    from rapid.models.storage import WEIGHTS

    total = 0
    with safe_open(bundle.path / name / WEIGHTS, "pt") as weights:
        for key in weights.keys():  # noqa: SIM118 - not a dict
            total += int(np.prod(weights.get_slice(key).get_shape()))
    return total


def _last_private_timestep(bundle: Bundle) -> int:
    """The last timestep for which the bundle's own denoiser is used."""
    settings = bundle.settings
    late = bundle.config.kind == "private" and settings.private.objective != "ldm"
    return settings.late_start if late else settings.schedule.timesteps


def _fill(x: Tensor, t: int) -> Tensor:
    return torch.full((len(x),), t, device=x.device)
