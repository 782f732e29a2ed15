"""RAPID's generator: early steps, retrieval, late steps (see `rapid.sampling.generator` for the protocol)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.bundle import Bundle
from rapid.data import to_uint8, to_unit_range
from rapid.diffusion import Schedule
from rapid.diffusion.solvers import Solver, early_grid, late_grid
from rapid.errors import InputError
from rapid.methods.rapid.knowledge_base import open_knowledge_base, public_denoiser_name
from rapid.methods.rapid.moments import NAME as MOMENTS
from rapid.methods.rapid.moments import ClassMoments
from rapid.methods.rapid.neighbours import ClassRecords, choose_neighbours
from rapid.methods.rapid.settings import GenerationSettings, RapidSettings
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.precision import exact_float32
from rapid.probe.network import Probe
from rapid.runtime import place
from rapid.sampling.solver_trajectories import Entry, Phase, Route, SolverTrajectories
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


class RapidGenerator:
    """Samples from a RAPID bundle; implements `rapid.sampling.generator.Generator`.

    x_T ~ N(0, I); T -> k with the public denoiser, unconditionally; z_k = h(x_k); the nearest key's value at v; v -> 0
    with the bundle's denoiser. With 100 steps, k = 0.8 T and v = 0.2 T these are 20 + 20 network calls. The knowledge
    base is public and the query starts from noise, so all of it is post-processing of the private denoiser.

    Three settings go beyond the paper. With `private.start` (or `generation.start`) above v, the retrieved value is
    first diffused to that step with fresh noise. With `generation.epsilon_scale` above 1, less than the predicted noise
    is removed (epsilon scaling; Ning et al., ICLR 2024): a denoiser trained with noise predicts too close to the mean,
    and its images vary too little. With `generation.retrieval` = class there is no query: the record is drawn from the
    public classes that the private probe finds similar to the requested class (see `ClassRecords`), which is
    post-processing, too. With `moments` images begin from the released Gaussian of their class (see `ClassMoments`).

    Args:
        bundle: a public or a private bundle.
        device: where the networks run.
        settings: of generation; default: the bundle's own.

    Attributes:
        bundle: as given.
        classes: names of the classes; empty for an unconditional model.
        image_shape: (H, W) or (H, W, 3).
        latent_shape: (c, h, w).
        settings: how images are sampled.
        device: as given.
        start: timestep at which the late steps start.
        private_from: highest timestep for which the bundle's own denoiser is used.
    """

    def __init__(self, bundle: Bundle, device: torch.device, settings: GenerationSettings | None = None) -> None:
        self.bundle = bundle
        self.classes = bundle.classes
        self._bundle_settings = bundle.settings_as(RapidSettings)
        self.settings = settings or self._bundle_settings.generation
        self.image_shape = bundle.image_shape
        self.latent_shape: tuple[int, ...] = self._bundle_settings.latent_shape
        self.device = device
        self._autoencoder = place(bundle.component("autoencoder", Autoencoder), device)
        self._denoisers = {
            PRIVATE: place(bundle.component("denoiser", Denoiser), device),
            PUBLIC: place(bundle.component(public_denoiser_name(bundle), Denoiser), device),
        }
        self._encoder = bundle.component("encoder", TrajectoryEncoder).to(device)
        own_probe = bundle.config.kind == "private" and bundle.has("probe")
        probe = bundle.component("probe", Probe) if own_probe else None
        self._probe = None if probe is None or self.settings.attempts == 1 else place(probe, device)
        self._knowledge_base = open_knowledge_base(bundle)
        self._class_records = self._records_by_class(probe)
        self._moments = self._class_moments()
        self._schedule = Schedule.build(self._bundle_settings.schedule).to(device)
        self.private_from = _highest_private_timestep(bundle, self._bundle_settings)
        from_noise = self.settings.retrieval == "none"
        self.start = self.max_steps if from_noise else self.settings.start or self._bundle_settings.late_start
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
    def batch_size(self) -> int:
        """Rows per network call when nothing else is served."""
        return self.settings.batch_size

    def calls(self, steps: int | None = None) -> int:
        """Network calls of one image."""
        return sum(len(solver.timesteps) for solver, _ in self.route(steps))

    def trajectories(self) -> SolverTrajectories:
        """Make an empty set of rows."""
        return SolverTrajectories(self)

    @exact_float32()
    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        """Images, uint8 (n, H, W) or (n, H, W, 3), of normalised latents, float (n, c, h, w)."""
        portions = self._portions(latents.to(self.device))
        return np.concatenate([to_uint8(self._autoencoder.decode(some)) for some in portions])

    @exact_float32()
    def label(self, images: NDArray[np.uint8]) -> NDArray[np.float32] | None:
        """Class probabilities by the probe, float32 (n, classes); None without a probe."""
        if self._probe is None:
            return None
        portions = self._portions(to_unit_range(images, self.device))
        return torch.cat([self._probe.probabilities(some) for some in portions]).cpu().numpy()

    @property
    def records(self) -> int:
        """Number of knowledge base records."""
        return len(self._knowledge_base)

    @torch.no_grad()
    @exact_float32()
    def record_images(self, records: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The public images that knowledge base records represent: their values, denoised in one step.

        Raises:
            InputError: no such record; the field is "record".
        """
        for record in records[(records < 0) | (records >= self.records)].tolist():
            raise InputError("record", f"must lie in 0..{self.records - 1}", record)
        values = self._values(records)
        t = torch.full((len(records),), self._bundle_settings.retrieval.v, device=self.device)
        return self.decode(self._schedule.denoise(values, self.predict(PUBLIC, values, t, None), t))

    def route(self, steps: int | None = None) -> Route:
        """The network calls of an image: an early phase unless there is no query, and the late phase.

        Calls are T // steps timesteps apart, so numbers of steps that do not divide T give more calls, and all numbers
        with the same spacing share one route.
        """
        stride = max(1, self.max_steps // (steps or self.settings.steps))
        if stride not in self._routes:
            late = Solver.build(self.settings.sampler, self._schedule, late_grid(self.start, stride), stride)
            networks = tuple(PUBLIC if t > self.private_from else PRIVATE for t in late.timesteps)
            route: Route = (Phase(late, networks),)
            if self._queries:
                grid = early_grid(self.max_steps, self._bundle_settings.retrieval.k, stride)
                early = Solver.build(self.settings.sampler, self._schedule, grid, stride, denoise_last=True)
                route = (Phase(early, (PUBLIC,) * len(early.timesteps)), *route)
            self._routes[stride] = route
        return self._routes[stride]

    def enter(self, phase: int, streams: Streams, labels: NDArray[np.int64] | None, x: Tensor | None) -> Entry:
        """First states of the early or the late phase; see `SolverModel`."""
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
                y = None if labels is None else torch.from_numpy(labels).to(self.device)
                t = torch.full((len(noise),), self.start, device=self.device)
                return Initialisation(
                    self._schedule.diffuse(self._moments.sample(y, noise), self._normal(streams), t), None
                )
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
    def predict(self, network: str, x: Tensor, t: Tensor, labels: NDArray[np.int64] | None) -> Tensor:
        """The noise to remove from x_t; see `SolverModel`. The public denoiser takes no labels."""
        denoiser = self._denoisers[network]
        if network == PUBLIC:
            return self._clipped(x, t, denoiser(x, t, denoiser.null_labels(len(x))))
        y = denoiser.null_labels(len(x)) if labels is None else torch.from_numpy(labels).to(self.device)
        noise = guided(denoiser, x, t, y, self.settings.guidance) / self.settings.epsilon_scale
        return self._clipped(x, t, noise)

    def _clipped(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """The predicted noise that leads to denoised latents within `clip_range`."""
        if (limit := self.settings.clip_range) is None:
            return noise
        return self._schedule.implied_noise(self._schedule.denoise(x, noise, t).clamp(-limit, limit), x, t)

    def _run(self, phase: Phase, x: Tensor, labels: NDArray[np.int64] | None) -> Tensor:
        network_of = dict(zip(phase.solver.timesteps, phase.networks, strict=True))

        def predict(state: Tensor, t: int) -> Tensor:
            return self.predict(network_of[t], state, torch.full((len(state),), t, device=self.device), labels)

        return phase.solver.run(predict, x)

    def _nearest(self, streams: Streams, query: Tensor) -> NDArray[np.int64]:
        """One of the nearest records of each query."""
        keys = self._encoder(query).cpu().numpy()
        neighbours = self._bundle_settings.private.neighbours
        uniforms = np.array([stream.random() for stream in streams]) if neighbours > 1 else None
        return choose_neighbours(self._knowledge_base, keys, neighbours, uniforms)

    @property
    def _queries(self) -> bool:
        """Whether early steps make a query."""
        return self.settings.retrieval in ("query", "class") and self._class_records is None

    def _normal(self, streams: Streams) -> Tensor:
        return torch.from_numpy(normal(streams, self.latent_shape)).to(self.device)

    def _portions(self, rows: Tensor) -> Sequence[Tensor]:
        """Split rows into the portions that the device decodes at a time."""
        return rows.split(PORTION) if self.device.type == "cpu" else (rows,)

    def _diffuse_to_start(self, values: Tensor, streams: Streams) -> Tensor:
        """Diffuse retrieved values from v to where the late steps start."""
        v = self._bundle_settings.retrieval.v
        if self.start == v:
            return values
        timesteps = (torch.full((len(values),), t, device=self.device) for t in (v, self.start))
        return self._schedule.diffuse_on(values, self._normal(streams), *timesteps)

    def _values(self, records: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self._knowledge_base.values(records)).to(self.device)

    def _class_moments(self) -> ClassMoments | None:
        """The moments of the classes, if images begin from them.

        Raises:
            InputError: the bundle has none.
        """
        if self.settings.retrieval != "moments":
            return None
        if not self.bundle.has(MOMENTS):
            problem = "this bundle has no moments (private.moments.share); choose query, class or none"
            raise InputError("generation.retrieval", problem, "moments")
        return self.bundle.component(MOMENTS, ClassMoments).to(self.device)

    def _records_by_class(self, probe: Probe | None) -> ClassRecords | None:
        """Records by class: in a public bundle from the class itself, else from similar public classes.

        None (retrieval by query) without classes, or without a probe to compare them.
        """
        labels = self._knowledge_base.labels
        if self.settings.retrieval != "class" or not self.classes:
            return None
        if self.bundle.config.kind == "public":
            return ClassRecords(np.eye(len(self.classes)), labels)
        return None if probe is None else ClassRecords(probe.resemblance().cpu().numpy(), labels)


def guided(denoiser: Denoiser, x: Tensor, t: Tensor, labels: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance: eps_null + scale (eps_label - eps_null); one network call if scale is 1."""
    if scale == 1:
        return denoiser(x, t, labels)
    null = denoiser.null_labels(len(x))
    both = denoiser(torch.cat([x, x]), torch.cat([t, t]), torch.cat([labels, null]))
    conditional, unconditional = both.chunk(2)
    return unconditional + scale * (conditional - unconditional)


def _highest_private_timestep(bundle: Bundle, settings: RapidSettings) -> int:
    """The highest timestep for which the bundle's own denoiser is used."""
    late = bundle.config.kind == "private" and settings.private.objective != "ldm"
    return settings.late_start if late else settings.schedule.timesteps
