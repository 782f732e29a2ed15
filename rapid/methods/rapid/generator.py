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

from rapid.bundle.format import Bundle
from rapid.bundle.info import describe
from rapid.config.sections import GenerationSettings
from rapid.data import to_uint8, to_unit_range
from rapid.diffusion import Schedule
from rapid.diffusion.solvers import Solver, early_grid, late_grid
from rapid.errors import InputError
from rapid.methods.rapid.neighbours import ClassEntries, choose_neighbours
from rapid.nn import Denoiser
from rapid.probe.network import Probe
from rapid.runtime import choose_device, place
from rapid.sampling.request import Odds, Order

MAX_SEED = 2**63 - 1
PORTION = 64
"""Images that a processor decodes at a time: what lies between two layers must stay in its caches."""
Streams = Sequence[np.random.Generator]
"""One for each image: what it draws does not depend on the others."""


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


class Route(NamedTuple):
    """The network calls that make an image."""

    early: Solver | None
    """From noise to the query of step k; None without a query."""
    late: Solver
    """On from what was retrieved, or from noise."""

    @property
    def calls(self) -> int:
        """How many they are."""
        return len(self.late.timesteps) + (0 if self.early is None else len(self.early.timesteps))


class Start(NamedTuple):
    """Where the late steps of n images begin."""

    x: Tensor
    """The states x_t, float (n, c, h, w)."""
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
    entry is drawn among those of public classes that the private probe likens to the wanted class (see
    `ClassEntries`), post-processing again.

    If the bundle has a probe, images are candidates: each is taken for the class that the probe sees in it, until all
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
        self.device = device
        self._autoencoder = place(bundle.autoencoder(), device)
        self._denoiser = place(bundle.denoiser(), device)
        self._public_denoiser = place(bundle.public_denoiser(), device)
        self._encoder = bundle.encoder().to(device)
        probe = bundle.probe() if bundle.config.kind == "private" else None
        self._probe = None if probe is None or self.settings.attempts == 1 else place(probe, device)
        self._knowledge_base = bundle.knowledge_base()
        self._entries = self._class_entries(probe)
        self._schedule = Schedule.build(bundle.settings.schedule).to(self.device)
        self.trained = _last_private_timestep(bundle)
        from_noise = self.settings.retrieval == "none"
        self.begin = self.timesteps if from_noise else self.settings.start or bundle.settings.late_start
        self._routes: dict[int, Route] = {}
        self._odds = Odds()

    @classmethod
    def open(cls, path: Path, device: str = "auto", settings: GenerationSettings | None = None) -> Generator:
        """Open a bundle for sampling.

        Raises:
            InputError: no finished bundle, parts that do not belong together, or an unknown device.
        """
        return cls(Bundle.open(path, "--model"), choose_device(device), settings)

    @property
    def timesteps(self) -> int:
        """T."""
        return self._schedule.timesteps

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
        order = self.order(count, labels, seed)
        route = self.route()
        images = np.zeros((count, *self.image_shape), np.uint8)
        while order.missing:
            numbers, classes = order.draw(self.settings.batch_size)
            start = self.start(streams(order.seed, numbers), classes, route)
            made = self.decode(self.finish(start.x, classes, route))
            for placed in order.offer(numbers, made, self.probe(made)):
                images[placed.place] = placed.image
            if progress is not None:
                progress(count - order.missing, count)
        return Samples(images, order.labels, order.seed)

    def order(
        self,
        count: int,
        labels: Sequence[int] | None = None,
        seed: int | None = None,
        steps: int | None = None,
    ) -> Order:
        """A new order; see `generate` for the arguments and errors."""
        if count < 1:
            raise InputError(f"--count {count}: must be at least 1")
        if labels is not None and len(labels) != count:
            raise InputError(f"labels: {len(labels)} given for {count} images; give one for each")
        if labels is not None and not self.classes:
            raise InputError("--labels: the model has no classes; leave it out")
        if steps is not None and not 1 <= steps <= self.timesteps:
            raise InputError(f"steps {steps}: must lie in 1..{self.timesteps}")
        seed = secrets.randbits(53) if seed is None else seed
        if not 0 <= seed <= MAX_SEED:
            raise InputError(f"--seed {seed}: must lie in 0..{MAX_SEED}")
        chosen = None
        if self.classes:
            chosen = np.asarray(labels if labels is not None else np.arange(count) % len(self.classes), np.int64)
        attempts = self.settings.attempts if self._probe is not None else 1
        return Order(count, chosen, seed, attempts, steps or self.settings.steps, self._odds)

    def route(self, steps: int | None = None) -> Route:
        """The network calls of an image: `steps` of them from T to 0 if nothing were skipped; None as in the settings.

        They are T // steps apart, so a rest makes more of them, and numbers of steps between which the spacing does not
        change are the same.
        """
        stride = max(1, self.timesteps // (steps or self.settings.steps))
        if stride not in self._routes:
            late = Solver.build(self.settings.sampler, self._schedule, late_grid(self.begin, stride), stride)
            early = None
            if self.settings.retrieval != "none" and self._entries is None:
                grid = early_grid(self.timesteps, self.bundle.settings.retrieval.k, stride)
                early = Solver.build(self.settings.sampler, self._schedule, grid, stride, denoise_last=True)
            self._routes[stride] = Route(early, late)
        return self._routes[stride]

    def normal(self, streams: Streams) -> Tensor:
        """The next noise of each stream, float (n, c, h, w)."""
        shape = self.bundle.settings.latent_shape
        rows = [stream.standard_normal(shape, np.float32) for stream in streams]
        return torch.from_numpy(np.stack(rows)).to(self.device)

    def start(self, streams: Streams, labels: NDArray[np.int64] | None, route: Route | None = None) -> Start:
        """Where the late steps of new images begin; the streams are new ones, labels (n,)."""
        noise, early = self.normal(streams), (route or self.route()).early
        if early is not None:
            return self.retrieve(streams, early.run(lambda x, t: self.noise(x, t, None, public=True), noise))
        if self._entries is None:
            return Start(noise, None)
        assert labels is not None
        indices = self._entries.choose(labels, np.stack([stream.random(2) for stream in streams]))
        return self._lead_on(streams, Retrieved(None, indices, self._values(indices)))

    @torch.no_grad()
    def retrieve(self, streams: Streams, denoised: Tensor) -> Start:
        """From the one-step-denoised latents of step k, float (n, c, h, w), to where the late steps begin."""
        queries = self._encoder(denoised).cpu().numpy()
        several = self.bundle.settings.private.neighbours
        pick = np.array([stream.random() for stream in streams]) if several > 1 else None
        indices = choose_neighbours(self._knowledge_base, queries, several, pick)
        return self._lead_on(streams, Retrieved(denoised, indices, self._values(indices)))

    @torch.no_grad()
    def noise(self, x: Tensor, t: int | Tensor, labels: NDArray[np.int64] | None, *, public: bool) -> Tensor:
        """The noise that is taken away from x_t, float (n, c, h, w).

        Args:
            x: states, float (n, c, h, w).
            t: their timestep, or timesteps, int64 (n,).
            labels: their classes, int64 (n,); None without classes. The public denoiser does not look at them.
            public: whether to ask the public denoiser, as the early steps do, and those beyond what was trained.
        """
        t = torch.full((len(x),), t, device=self.device) if isinstance(t, int) else t
        if public:
            return self._public_denoiser(x, t, self._public_denoiser.null_labels(len(x)))
        y = self._denoiser.null_labels(len(x)) if labels is None else torch.from_numpy(labels).to(self.device)
        return guided(self._denoiser, x, t, y, self.settings.guidance) / self.settings.epsilon_scale

    @torch.no_grad()
    def finish(self, x: Tensor, labels: NDArray[np.int64] | None, route: Route | None = None) -> Tensor:
        """The late steps: with the bundle's denoiser where it was trained, with the public one above that."""
        late = (route or self.route()).late
        return late.run(lambda state, t: self.noise(state, t, labels, public=t > self.trained), x)

    @torch.no_grad()
    def entry_image(self, entry: int) -> NDArray[np.uint8]:
        """The public image that an entry of the knowledge base stands for: its value, denoised in one step.

        Raises:
            InputError: no such entry.
        """
        if not 0 <= entry < len(self._knowledge_base):
            raise InputError(f"entry {entry}: must lie in 0..{len(self._knowledge_base) - 1}")
        values, v = self._values(np.array([entry])), self.bundle.settings.retrieval.v
        t = torch.full((1,), v, device=self.device)
        image: NDArray[np.uint8] = self.decode(
            self._schedule.denoise(values, self.noise(values, t, None, public=True), t)
        )[0]
        return image

    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        """Images, uint8 (n, H, W) or (n, H, W, 3), of normalised latents."""
        return np.concatenate([to_uint8(self._autoencoder.decode(some)) for some in self._portions(latents)])

    def probe(self, images: NDArray[np.uint8]) -> NDArray[np.float32] | None:
        """What the probe sees in images: the probability of each class, (n, classes); None if there is none."""
        if self._probe is None:
            return None
        portions = self._portions(to_unit_range(images, self.device))
        return torch.cat([self._probe.probabilities(some) for some in portions]).cpu().numpy()

    def _portions(self, rows: Tensor) -> Sequence[Tensor]:
        """As many rows at a time as a decoder should take."""
        return rows.split(PORTION) if self.device.type == "cpu" else (rows,)

    def _lead_on(self, streams: Streams, retrieved: Retrieved) -> Start:
        """Diffuse retrieved values on from v to where the late steps begin."""
        v = self.bundle.settings.retrieval.v
        if self.begin == v:
            return Start(retrieved.values, retrieved)
        steps = (torch.full((len(retrieved.values),), step, device=self.device) for step in (v, self.begin))
        return Start(self._schedule.diffuse_on(retrieved.values, self.normal(streams), *steps), retrieved)

    def _values(self, indices: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self._knowledge_base.values(indices)).to(self.device)

    def _class_entries(self, probe: Probe | None) -> ClassEntries | None:
        """Entries by class: of the class itself in a public bundle, of public classes that look like it in others.

        None, and so a query, where there are no classes or no probe to compare them.
        """
        labels = self._knowledge_base.labels
        if self.settings.retrieval != "class" or not self.classes:
            return None
        if self.bundle.config.kind == "public":
            return ClassEntries(np.eye(len(self.classes)), labels)
        return None if probe is None else ClassEntries(probe.resemblance().numpy(), labels)


def streams(seeds: int | NDArray[np.int64], numbers: NDArray[np.int64]) -> Streams:
    """The noise streams of some candidates, by their numbers (n,), of a seed or of one each, (n,)."""
    keys = np.stack(np.broadcast_arrays(np.asarray(seeds, np.uint64), numbers.astype(np.uint64)), 1)
    return [np.random.Generator(np.random.Philox(key=key)) for key in keys]


def guided(denoiser: Denoiser, x: Tensor, t: Tensor, labels: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance: eps_null + scale (eps_label - eps_null); one call if scale is 1."""
    if scale == 1:
        return denoiser(x, t, labels)
    null = denoiser.null_labels(len(x))
    both = denoiser(torch.cat([x, x]), torch.cat([t, t]), torch.cat([labels, null]))
    conditional, unconditional = both.chunk(2)
    return unconditional + scale * (conditional - unconditional)


def _last_private_timestep(bundle: Bundle) -> int:
    """The last timestep for which the bundle's own denoiser is used."""
    settings = bundle.settings
    late = bundle.config.kind == "private" and settings.private.objective != "ldm"
    return settings.late_start if late else settings.schedule.timesteps
