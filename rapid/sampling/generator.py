"""The sampling protocol: all that the command line and the server know of a model that makes images.

A sampler turns candidates into images. A candidate is a noise stream (seed and number, see `rapid.sampling.streams`)
and a class. `Trajectories` holds the candidates in flight, one per row, and advances any subset of them by one network
call in one batch, so that the batch can change at every step. A method with a single network call per image is the case
in which `advance` finishes every row that it is given.

What a row becomes depends on its seed, number, label and steps, and not on the other rows, except for rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from rapid.bundle import Bundle


class Finished(NamedTuple):
    """Rows that have taken their last network call."""

    rows: NDArray[np.int64]
    """Their numbers, int64 (n,); the rows are free again."""
    latents: Tensor
    """What `Sampler.decode` turns into images, float (n, ...)."""
    records: NDArray[np.int64]
    """Knowledge base record that each started from, int64 (n,); -1 if it started from noise alone."""


class Trajectories(Protocol):
    """Candidates in flight, one per row. Not thread-safe."""

    @property
    def search_seconds(self) -> float:
        """Time spent in knowledge base searches so far, in seconds; 0 for a method without one."""
        ...

    def begin(
        self,
        seeds: int | NDArray[np.int64],
        numbers: NDArray[np.int64],
        labels: NDArray[np.int64] | None,
        steps: int | None = None,
    ) -> NDArray[np.int64]:
        """Start candidates.

        Args:
            seeds: one seed for all, or one for each, int64 (n,).
            numbers: numbers of the candidates, int64 (n,); n may be 0.
            labels: their classes, int64 (n,); None for a model without classes.
            steps: as in `Sampler.calls`.

        Returns:
            The rows that they occupy, int64 (n,).
        """
        ...

    def advance(self, rows: NDArray[np.int64]) -> Finished:
        """Advance distinct rows, int64 (n,) with n >= 1, by one network call each; return those that are finished."""
        ...

    def drop(self, rows: NDArray[np.int64]) -> None:
        """Abandon unfinished rows, int64 (n,); they are free again. n may be 0."""
        ...


class Sampler(Protocol):
    """A model that makes images."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; empty for an unconditional model."""
        ...

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(H, W) or (H, W, 3)."""
        ...

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one row of `Finished.latents`."""
        ...

    @property
    def steps(self) -> int:
        """Sampling steps of a request that names none."""
        ...

    @property
    def max_steps(self) -> int:
        """The most steps that a request may name; the least is 1."""
        ...

    @property
    def attempts(self) -> int:
        """Candidates per image, at most and on average; 1 if every candidate is an image, and without a probe."""
        ...

    @property
    def probed(self) -> bool:
        """Whether there is a probe, so that `label` and `finish` give probabilities."""
        ...

    @property
    def confidence(self) -> float:
        """Probability of its class by the probe that a candidate needs to be accepted, in [0, 1)."""
        ...

    @property
    def batch_size(self) -> int:
        """Rows per network call when nothing else is served."""
        ...

    def calls(self, steps: int | None = None) -> int:
        """Network calls of one image with this many steps, >= 1; None takes `steps` of the generator."""
        ...

    def trajectories(self) -> Trajectories:
        """Make an empty set of rows."""
        ...

    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        """Turn latents, float (n, ...) on any device, into images, uint8 (n, H, W) or (n, H, W, 3); n >= 1."""
        ...

    def label(self, images: NDArray[np.uint8]) -> NDArray[np.float32] | None:
        """Class probabilities of images by the probe, float32 (n, classes); None if there is no probe."""
        ...

    def finish(self, latents: Tensor) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
        """`decode` and `label` at once; on a device the host waits only once. n >= 1."""
        ...

    @property
    def records(self) -> int:
        """Number of knowledge base records; 0 for a method without a knowledge base."""
        ...

    def record_images(self, records: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The public images of knowledge base records, uint8 (n, H, W) or (n, H, W, 3).

        Args:
            records: int64 (n,), n >= 1.

        Raises:
            InputError: there is no such record; the field is "record".
        """
        ...


class Generator(Sampler, Protocol):
    """A model that makes images, as read from a bundle."""

    @property
    def bundle(self) -> Bundle:
        """Where the model comes from: its name, digest and privacy statement."""
        ...
