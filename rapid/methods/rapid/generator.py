"""RAPID's generator: early steps, retrieval, late steps (see `rapid.sampling.generator` for the protocol)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.bundle import Bundle
from rapid.data import to_unit_range
from rapid.data.fit import from_planes, to_planes, unit_range
from rapid.diffusion import Schedule
from rapid.diffusion.solvers import Solver, early_grid, late_grid
from rapid.errors import InputError
from rapid.methods.rapid.class_moments import ClassMoments
from rapid.methods.rapid.generation_settings import WITHOUT_RECORDS, GenerationSettings
from rapid.methods.rapid.guidance import ProbeGuidance, class_limits, least_confidence
from rapid.methods.rapid.knowledge_base import Retrieval
from rapid.methods.rapid.neighbours import ClassRecords, choose_neighbours
from rapid.methods.rapid.parts import Parts
from rapid.methods.rapid.search import Search, open_search
from rapid.nn.denoiser import guided
from rapid.precision import exact_float32
from rapid.runtime import place
from rapid.sampling.linear_trajectories import Entry, LinearTrajectories, Phase, Route
from rapid.sampling.streams import Streams, normal

PORTION = 64
"""Images that a CPU decodes at a time, so that activations stay in its caches."""
PUBLIC, PRIVATE = "public", "private"
"""Names of the two denoisers in a route: the one trained on public images only, and the bundle's own."""


class Retrieved(NamedTuple):
    """Records of the knowledge base for n images."""

    query: Tensor | None
    """One-step-denoised latents of step k, float (n, c, h, w), as the encoder sees them; None without a query."""
    records: NDArray[np.int64]
    """Indices into the knowledge base, int64 (n,)."""
    values: Tensor
    """Their latents of step v, float (n, c, h, w)."""


class Initialisation(NamedTuple):
    """First states of the late steps of n images."""

    x: Tensor
    """States x_t, float (n, c, h, w)."""
    retrieved: Retrieved | None
    """None if the late steps start from noise."""


class RapidSampler:
    """Samples images with the parts of a bundle: all of `RapidGenerator` but the bundle.

    x_T ~ N(0, I); T -> k with the public denoiser, unconditionally; z_k = h(x_k); the nearest key's value at v; v -> 0
    with the bundle's denoiser. With 100 steps, k = 0.8 T and v = 0.2 T these are 20 + 20 network calls. The knowledge
    base is public and the query starts from noise, so all of it is post-processing of the private denoiser.

    Five settings go beyond the paper. With `private.start` (or `generation.start`) above v, the retrieved value is
    first diffused to that step with fresh noise. With `generation.epsilon_scale` above 1, less than the predicted noise
    is removed (epsilon scaling; Ning et al., ICLR 2024): a denoiser trained with noise predicts too close to the mean,
    and its images vary too little. With `generation.retrieval` = class there is no query: the record is drawn from the
    public classes that the private probe finds similar to the requested class (see `ClassRecords`); with `moments`
    images begin from the released Gaussian of their class (see `ClassMoments`). With `generation.probe_guidance` above
    0 the private probe pulls images towards their class. Steps below `generation.public_below` are public ones.

    Args:
        parts: networks, knowledge base and settings.
        device: where the networks run.
        settings: of generation.

    Raises:
        InputError: images are to begin from records or moments, and the parts have none.

    Attributes:
        classes: names of the classes; empty for an unconditional model.
        image_shape, latent_shape: (H, W) or (H, W, 3), and (c, h, w).
        settings, device: as given.
        probed: whether there is a probe.
        start: timestep at which the late steps start.
        private_from: highest timestep of the bundle's own denoiser.
    """

    def __init__(self, parts: Parts, device: torch.device, settings: GenerationSettings) -> None:
        if parts.retrieval is None and settings.uses_records:
            raise InputError("generation.retrieval", WITHOUT_RECORDS, settings.retrieval)
        self._parts = parts
        self._settings = parts.settings
        self.classes = parts.classes
        self.settings = settings
        self.image_shape = parts.image_shape
        self.latent_shape: tuple[int, ...] = parts.settings.latent_shape
        self.device = device
        self._autoencoder = place(parts.autoencoder, device)
        self._denoisers = {PRIVATE: place(parts.denoiser, device), PUBLIC: place(parts.public_denoiser, device)}
        if parts.retrieval is not None:
            parts.retrieval.encoder.to(device)
        self._probe = None if parts.probe is None else place(parts.probe, device)
        self.probed = self._probe is not None
        self._class_records = self._records_by_class()
        self._moments = self._class_moments()
        self._tones = None if parts.tones is None else place(parts.tones, device)
        self._schedule = Schedule.build(parts.settings.schedule).to(device)
        self._guide = self._class_guide()
        self.private_from = parts.private_from
        from_noise = not settings.uses_records and self._moments is None
        self.start = self.max_steps if from_noise else settings.start or parts.settings.late_start
        self._routes: dict[int, Route] = {}

    @property
    def steps(self) -> int:
        """Network calls from T to 0 if retrieval skipped none."""
        return self.settings.steps

    @property
    def max_steps(self) -> int:
        """T."""
        return self._schedule.timesteps

    @property
    def attempts(self) -> int:
        """Candidates per image, at most and on average; 1 without a probe."""
        return 1 if self._probe is None else self.settings.attempts

    @property
    def confidence(self) -> float:
        """Probability of its class by the probe that a candidate needs to be accepted."""
        return least_confidence(self._parts.levels, self.settings)

    @property
    def batch_size(self) -> int:
        """Rows per network call when nothing else is served."""
        return self.settings.batch_size

    def calls(self, steps: int | None = None) -> int:
        """Network calls of one image."""
        return sum(len(phase.networks) for phase in self.route(steps))

    def trajectories(self) -> LinearTrajectories:
        """Make an empty set of rows."""
        return LinearTrajectories(self)

    @exact_float32()
    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        """Images, uint8 (n, H, W) or (n, H, W, 3), of normalised latents, float (n, c, h, w)."""
        return from_planes(self._planes(latents).cpu().numpy())

    @exact_float32()
    def label(self, images: NDArray[np.uint8]) -> NDArray[np.float32] | None:
        """Class probabilities by the probe, float32 (n, classes); None without a probe."""
        if self._probe is None:
            return None
        portions = self._portions(to_unit_range(images, self.device))
        return torch.cat([self._probe.probabilities(some) for some in portions]).cpu().numpy()

    @torch.no_grad()
    @exact_float32()
    def finish(self, latents: Tensor) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
        """`decode` and `label` at once; see the protocol."""
        planes = self._planes(latents)
        if self._probe is None:
            return from_planes(planes.cpu().numpy()), None
        chances = torch.cat([self._probe.probabilities(some) for some in self._portions(unit_range(planes))])
        # the bytes of both in one transfer: the host waits for each
        both = torch.cat([planes.flatten(1), chances.view(torch.uint8)], 1).cpu().numpy()
        pixels, rest = np.split(both, [planes[0].numel()], 1)
        return from_planes(pixels.reshape(planes.shape)), rest.copy().view(np.float32)

    @property
    def records(self) -> int:
        """Number of knowledge base records; 0 where retrieval is off."""
        return 0 if self._parts.retrieval is None else len(self._parts.retrieval.knowledge_base)

    @torch.no_grad()
    @exact_float32()
    def record_images(self, records: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The public images that knowledge base records represent: their values, denoised in one step.

        Raises:
            InputError: no such record; the field is "record".
        """
        if self._parts.retrieval is None:
            raise InputError("record", "this model has no knowledge base", records.tolist()[0])
        for record in records[(records < 0) | (records >= self.records)].tolist():
            raise InputError("record", f"must lie in 0..{self.records - 1}", record)
        values = self._values(records)
        t = torch.full((len(records),), self._settings.retrieval.v, device=self.device)
        latents = self._schedule.denoise(values, self.predict(PUBLIC, values, t, None), t)
        # the tones of private images are not theirs
        return from_planes(self._planes(latents, toned=False).cpu().numpy())

    def route(self, steps: int | None = None) -> Route:
        """The network calls of an image: an early phase unless there is no query, and the late phase.

        Calls are T // steps timesteps apart, so numbers of steps that do not divide T give more calls, and all numbers
        with the same spacing share one route.
        """
        stride = max(1, self.max_steps // (steps or self.settings.steps))
        if stride not in self._routes:
            late = Solver.build(self.settings.sampler, self._schedule, late_grid(self.start, stride), stride)
            own = range(self.settings.public_below, self.private_from + 1)
            networks = tuple(PRIVATE if t in own else PUBLIC for t in late.timesteps)
            route: Route = (Phase(late, networks),)
            if self._queries:
                grid = early_grid(self.max_steps, self._settings.retrieval.k, stride)
                early = Solver.build(self.settings.sampler, self._schedule, grid, stride, denoise_last=True)
                route = (Phase(early, (PUBLIC,) * len(early.timesteps)), *route)
            self._routes[stride] = route
        return self._routes[stride]

    def enter(self, phase: int, streams: Streams, labels: NDArray[np.int64] | None, x: Tensor | None) -> Entry:
        """First states of the early or the late phase; see `LinearModel`."""
        if self._queries and x is None:
            return Entry(self._normal(streams))
        state, retrieved = self.initialise(streams, labels, x)
        return Entry(state, None if retrieved is None else retrieved.records)

    @torch.no_grad()
    def initialise(self, streams: Streams, labels: NDArray[np.int64] | None, query: Tensor | None) -> Initialisation:
        """First states of the late steps.

        Args:
            streams: noise streams of n images.
            labels: their classes, int64 (n,); None without classes.
            query: one-step-denoised latents of step k, float (n, c, h, w), where the early steps end; None if there
                are no early steps.
        """
        if query is not None:
            records = self._nearest(streams, query)
        else:
            noise = self._normal(streams)
            if self._moments is not None:
                y = None if labels is None else self._sent(labels)
                t = torch.full((len(noise),), self.start, device=self.device)
                x = self._schedule.diffuse(self._moments.sample(y, noise), self._normal(streams), t)
                return Initialisation(x, None)
            if self._class_records is None:
                return Initialisation(noise, None)
            # the noise is drawn even if it is not used, so that a seed keeps its images
            assert labels is not None
            records = self._class_records.choose(labels, np.stack([stream.random(2) for stream in streams]))
        retrieved = Retrieved(query, records, self._values(records))
        return Initialisation(self._diffuse_to_start(retrieved.values, streams), retrieved)

    @torch.no_grad()
    @exact_float32()
    def sample(
        self, streams: Streams, labels: NDArray[np.int64] | None, steps: int | None = None
    ) -> tuple[Initialisation, Tensor]:
        """Sample candidates that take all steps together, and keep the intermediate states, for figures and tests.

        Args:
            streams: new noise streams of n images.
            labels: their classes, int64 (n,); None without classes.
            steps: as in `calls`.

        Returns:
            Where the late steps start, and the latents at their end, float (n, c, h, w), as `trajectories` makes them.
        """
        *early, late = self.route(steps)
        x = self._run(early[0], self._normal(streams), None) if early else None
        start = self.initialise(streams, labels, x)
        return start, self._run(late, start.x, labels)

    @torch.no_grad()
    def predict(self, network: str, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        """The noise to remove from x_t; see `LinearModel`. The public denoiser takes no labels."""
        denoiser = self._denoisers[network]
        if network == PUBLIC:
            public = denoiser(x, t, denoiser.null_labels(len(x)))
            return self._schedule.clipped_noise(x, public, t, self.settings.clip_range)
        y = denoiser.null_labels(len(x)) if labels is None else labels
        noise = guided(denoiser, x, t, y, self.settings.guidance) / self.settings.epsilon_scale
        noise = self._schedule.clipped_noise(x, noise, t, self.settings.clip_range)
        if self._guide is None or labels is None:
            return noise
        moved = self._guide.towards(self._schedule.denoise(x, noise, t), t, labels)
        towards = self._schedule.implied_noise(moved, x, t)
        return self._schedule.clipped_noise(x, towards, t, self.settings.clip_range)

    def _run(self, phase: Phase, x: Tensor, labels: NDArray[np.int64] | None) -> Tensor:
        solver, y = phase.sampler, None if labels is None else self._sent(labels)
        assert isinstance(solver, Solver)
        network_of = dict(zip(solver.timesteps, phase.networks, strict=True))

        def predict(state: Tensor, t: int) -> Tensor:
            return self.predict(network_of[t], state, torch.full((len(state),), t, device=self.device), y)

        return solver.run(predict, x)

    def _nearest(self, streams: Streams, query: Tensor) -> NDArray[np.int64]:
        """One of the nearest records of each query."""
        keys = self._retrieval.encoder(query)
        neighbours = self._settings.private.neighbours
        uniforms = np.array([stream.random() for stream in streams]) if neighbours > 1 else None
        return choose_neighbours(self._search, keys, neighbours, uniforms)

    @cached_property
    def _search(self) -> Search:
        return open_search(self._retrieval.knowledge_base, self.device, gpu_index=self.settings.gpu_index)

    @property
    def _retrieval(self) -> Retrieval:
        """For images that begin from records: without a knowledge base there are none."""
        assert self._parts.retrieval is not None
        return self._parts.retrieval

    @property
    def _queries(self) -> bool:
        """Whether early steps make a query."""
        return self.settings.uses_records and self._class_records is None

    def _normal(self, streams: Streams) -> Tensor:
        return self._sent(normal(streams, self.latent_shape))

    def _sent(self, values: NDArray[Any]) -> Tensor:
        """Copy to the device without waiting for it."""
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def _planes(self, latents: Tensor, *, toned: bool = True) -> Tensor:
        """Images, uint8 (n, C, H, W) on the device, of normalised latents, float (n, c, h, w)."""
        portions = self._portions(latents.to(self.device))
        planes = torch.cat([to_planes(self._autoencoder.decode(some)) for some in portions])
        return planes if self._tones is None or not toned else self._tones(planes)

    def _portions(self, rows: Tensor) -> Sequence[Tensor]:
        """Split rows into the portions that the device decodes at a time."""
        return rows.split(PORTION) if self.device.type == "cpu" else (rows,)

    def _diffuse_to_start(self, values: Tensor, streams: Streams) -> Tensor:
        """Diffuse retrieved values from v to where the late steps start."""
        v = self._settings.retrieval.v
        if self.start == v:
            return values
        timesteps = (torch.full((len(values),), t, device=self.device) for t in (v, self.start))
        return self._schedule.diffuse_on(values, self._normal(streams), *timesteps)

    def _values(self, records: NDArray[np.int64]) -> Tensor:
        return self._sent(self._retrieval.knowledge_base.values(records))

    def _class_guide(self) -> ProbeGuidance | None:
        """Guidance, if it is wanted and the probe knows the classes."""
        probe, most = self._parts.probe, self.settings.probe_guidance
        if not most or probe is None or not probe.num_classes:
            return None
        limits = class_limits(self._parts.levels if self.settings.enough_accepted else None, probe.num_classes, most)
        if not limits.any():
            return None
        return ProbeGuidance(place(probe, self.device), self._autoencoder, self._schedule, self._parts.moments, limits)

    def _class_moments(self) -> ClassMoments | None:
        """The moments of the classes, if images begin from them; a public bundle has none.

        Raises:
            InputError: the private bundle has none.
        """
        if self.settings.retrieval != "moments" or self._parts.kind == "public":
            return None
        if self._parts.moments is None:
            others = "none" if self._parts.retrieval is None else "query, class or none"
            words = f"this bundle has no moments (private.moments.share); choose {others}"
            raise InputError("generation.retrieval", words, "moments")
        return self._parts.moments.to(self.device)

    def _records_by_class(self) -> ClassRecords | None:
        """Records by class: in a public bundle from the class itself, else from similar public classes.

        None (retrieval by query) without classes, or without a probe to compare them.
        """
        if self.settings.retrieval != "class" or not self.classes:
            return None
        labels, probe = self._retrieval.knowledge_base.labels, self._parts.probe
        if self._parts.kind == "public":
            return ClassRecords(np.eye(len(self.classes)), labels)
        return None if probe is None else ClassRecords(probe.resemblance().cpu().numpy(), labels)


class RapidGenerator(RapidSampler):
    """Samples from a RAPID bundle; implements `rapid.sampling.generator.Generator`.

    Args:
        bundle: a public or a private bundle.
        device: where the networks run.
        settings: of generation; default: the bundle's own.

    Attributes:
        bundle: as given.
    """

    def __init__(self, bundle: Bundle, device: torch.device, settings: GenerationSettings | None = None) -> None:
        parts = Parts.of(bundle)
        super().__init__(parts, device, settings or parts.settings.generation)
        self.bundle = bundle
