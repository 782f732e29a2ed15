"""Releases about the private images: each has a name and a `dp_accounting` event.

A spec holds the public numbers of a release except its noise; `rapid.dp.budget.calibrate` adds the noise and makes it a
`Release`. Everything else (budget, ledger, resume, statement, card) iterates over releases and knows none by name.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from dp_accounting import DpEvent
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rapid.dp.correlation import noise_factor
from rapid.dp.events import dp_sgd_event, gaussian_event
from rapid.errors import InputError
from rapid.rounding import rounded_down

MIN_DELTA = 1e-10
"""Numerical composition can give too low an epsilon for deltas from 1e-11 down, which are near its rounding errors."""
MIN_SENSITIVITY = 1e-8
"""Squares of smaller float32 numbers are lost in inner products, and norms with them."""

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")]


class _Spec(BaseModel):
    """Public numbers of one release without its noise.

    Adjacency: adding or removing one image. The number of images N itself counts as public: it fixes the sample rate,
    which stays the same when an image is removed. So the guarantee compares the set with the same set in which one
    image contributes nothing.

    Attributes:
        name: unique in a budget; its checkpoint and its line in the statement have this name.
        title: what is released, in the words of the statement.
        share: of epsilon that the release alone would spend; None: what the other releases leave. Releases compose
            like squares rather than sums, so small shares cost the others little.
        least_noise_multiplier: noise that is added even if epsilon would allow less.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    title: str = ""
    share: float | None = Field(None, gt=0, lt=1)
    least_noise_multiplier: float = Field(0.0, ge=0)


class DpSgdSpec(_Spec):
    """DP-SGD: noisy sums of clipped gradients of Poisson-sampled batches.

    Attributes:
        dataset_size: N.
        expected_batch: B; the batch of a step has B examples on average.
        steps: number of steps.
        clip_norm: C, largest l2 norm of an example's gradient.
        multiplicity: K draws of an example are averaged before clipping, at no privacy cost.
        band: b; noise is correlated over b steps, and images are dealt into b groups that take turns: see
            `rapid.dp.correlation`. 1: independent noise.
    """

    kind: Literal["dp-sgd"] = "dp-sgd"
    dataset_size: int = Field(ge=1)
    expected_batch: int = Field(ge=1)
    steps: int = Field(ge=1)
    clip_norm: float = Field(ge=MIN_SENSITIVITY)
    multiplicity: int = Field(1, ge=1)
    band: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _batch_fits(self) -> Self:
        if self.expected_batch > self.dataset_size:
            raise ValueError("expected_batch must be at most dataset_size")
        if self.band * self.expected_batch > self.dataset_size:
            raise ValueError("band * expected_batch must be at most dataset_size")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the default band, which the records of earlier versions do not name."""
        found: dict[str, Any] = handler(self)
        if self.band == 1:
            found.pop("band", None)
        return found

    @property
    def sensitivity(self) -> float:
        """Largest l2 change of a sum by one image."""
        return self.clip_norm

    @property
    def sample_rate(self) -> float:
        """Probability that an image is in a batch; with a band, in one of its group, which every b-th batch is."""
        return self.band * self.expected_batch / self.dataset_size

    @property
    def gradient_computations(self) -> int:
        """Expected number of per-example gradients in all."""
        return self.expected_batch * self.steps * self.multiplicity

    def event(self, noise_multiplier: float, steps: int | None = None) -> DpEvent:
        """The event of `steps` consecutive steps (default: all), in which an image has ceil(steps / band) turns."""
        turns = -(-(self.steps if steps is None else steps) // self.band)
        return dp_sgd_event(noise_multiplier, self.sample_rate, turns)

    def round_end(self, step: int) -> int:
        """The number of steps when the round of `band` steps ends to which `step` steps lead: at least `step`."""
        return min(self.steps, -(-step // self.band) * self.band)


class QuerySpec(_Spec):
    """One Gaussian release over all images: a count, a mean or a histogram.

    Attributes:
        sensitivity: largest l2 change of the sum by one image: 1 for counts and histograms, the bound of a mean.
        dataset_size: N.
    """

    kind: Literal["count", "mean", "histogram"]
    sensitivity: float = Field(1.0, ge=MIN_SENSITIVITY)
    dataset_size: int = Field(ge=1)

    @model_validator(mode="after")
    def _unit_sensitivity(self) -> Self:
        if self.kind != "mean" and self.sensitivity != 1:
            raise ValueError(f"sensitivity of a {self.kind} is 1")
        return self

    @property
    def steps(self) -> int:
        """1: a query is one step."""
        return 1

    @property
    def sample_rate(self) -> float:
        """1: all images take part."""
        return 1.0

    @property
    def band(self) -> int:
        """1: there is one step, so no noise is correlated."""
        return 1

    def round_end(self, step: int) -> int:
        """The step itself."""
        return min(self.steps, step)

    def event(self, noise_multiplier: float, steps: int | None = None) -> DpEvent:
        """The event of the query; an empty one for `steps` 0."""
        return dp_sgd_event(noise_multiplier, 1.0, 0) if steps == 0 else gaussian_event(noise_multiplier)


Spec = Annotated[DpSgdSpec | QuerySpec, Field(discriminator="kind")]


class Release(BaseModel):
    """A spec and its noise.

    Attributes:
        spec: the public numbers.
        noise_multiplier: sigma; the noise has standard deviation sigma * sensitivity.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    spec: Spec
    noise_multiplier: float = Field(ge=0)

    @property
    def name(self) -> str:
        """Name of the spec."""
        return self.spec.name

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise that is added to a sum."""
        return self.noise_multiplier * self.spec.sensitivity

    def event(self, steps: int | None = None) -> DpEvent:
        """The event of `steps` steps (default: all), for any accountant."""
        return self.spec.event(self.noise_multiplier, steps)

    def signal_to_noise(self, parameters: int) -> float:
        """Signal-to-noise ratio of one step: the norm of an expected batch's sum if all its clipped gradients agree,
        over that of the noise.

        It is an upper bound, reached where the gradients are clipped and point the same way. Averages over all n steps
        have sqrt(n) times this; with correlated noise, this is what they have over sqrt(n).
        """
        noise = self.noise_multiplier * math.sqrt(parameters) * noise_factor(self.spec.band, self.spec.steps)
        examples = self.spec.sample_rate * self.spec.dataset_size / self.spec.band
        return examples / noise if noise else math.inf


def default_delta(dataset_size: int) -> float:
    """1 / (N ln N), the field's convention; 1 / (2 N) for fewer than 8 images."""
    return 1 / (dataset_size * max(2.0, math.log(dataset_size)))


def check_budget(epsilon: float, delta: float, dataset_size: int) -> None:
    """Reject an epsilon or delta out of range.

    Raises:
        InputError: epsilon or delta out of range.
    """
    if not epsilon > 0 or math.isinf(epsilon):
        raise InputError("epsilon", "must be a positive number, such as 1 or 10", epsilon)
    if not 0 < delta < 1:
        most = rounded_down(1 / dataset_size, 2)
        raise InputError("delta", f"must lie in (0, 1), and well under 1/N = {most}", delta)
    if delta < MIN_DELTA:
        raise InputError("delta", f"must be at least {MIN_DELTA:g}: below, epsilon cannot be computed reliably", delta)
