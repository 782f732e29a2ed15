"""Releases as a tree of `dp_accounting.DpEvent`.

Every accountant reads the same tree, and the ledger keeps it as JSON. Only these events occur:

    NoOpDpEvent              nothing is released
    GaussianDpEvent          one release with Gaussian noise over all images
    PoissonSampledDpEvent    the same over a Poisson sample of the images
    SelfComposedDpEvent      one event, several times
    ComposedDpEvent          several events
    OneOfDpEvent             one of several events, chosen without regard to the images; our own
    RepeatAndSelectDpEvent   the best of a random number of trials (see `rapid.dp.trials`)

A noise multiplier is the standard deviation of the noise over the l2 sensitivity; 0 means no noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from rapid.dp.trials import LARGEST_MEAN, LARGEST_SHAPE, Trials

LEAST_NOISE = 1e-100
"""Noise multiplier below which accountants count a release as one without noise: its divergences exceed float64."""


@dataclass(frozen=True)
class OneOfDpEvent(DpEvent):  # type: ignore[misc]
    """One of several events, by a choice that does not depend on the images and may be published.

    Its Renyi divergence is at most the largest of theirs, at each order.

    Attributes:
        events: at least one.
    """

    events: tuple[DpEvent, ...]


def gaussian_event(noise_multiplier: float) -> DpEvent:
    """One release of a sum over all images with Gaussian noise.

    Args:
        noise_multiplier: finite, >= 0.

    Raises:
        ValueError: the noise multiplier is out of range.
    """
    return GaussianDpEvent(_number("noise_multiplier", noise_multiplier, math.inf))


def dp_sgd_event(noise_multiplier: float, sample_rate: float, steps: int) -> DpEvent:
    """Steps of DP-SGD: a Gaussian release over a fresh Poisson sample each.

    Args:
        noise_multiplier: finite, >= 0.
        sample_rate: probability with which each image takes part in a step, in [0, 1].
        steps: >= 0; a NoOpDpEvent for 0.

    Raises:
        ValueError: a number is out of range.
    """
    count = _count("steps", steps)
    event = PoissonSampledDpEvent(_number("sample_rate", sample_rate, 1.0), gaussian_event(noise_multiplier))
    return SelfComposedDpEvent(event, count) if count else NoOpDpEvent()


def compose(events: Iterable[DpEvent]) -> DpEvent:
    """All events together as one; a NoOpDpEvent for none."""
    parts = [event for event in events if not isinstance(event, NoOpDpEvent)]
    if len(parts) > 1:
        return ComposedDpEvent(parts)
    return parts[0] if parts else NoOpDpEvent()


def has_selection(event: DpEvent) -> bool:
    """Whether a tree has events that are no composition of single releases: the best of several trials, or one of many.

    Only Renyi divergences are known of them (`rapid.dp.renyi`).
    """
    match event:
        case RepeatAndSelectDpEvent() | OneOfDpEvent():
            return True
        case SelfComposedDpEvent():
            return has_selection(event.event)
        case ComposedDpEvent():
            return any(has_selection(part) for part in event.events)
    return False


def check_known(event: DpEvent) -> None:
    """Check that an accountant can read a tree of events.

    Raises:
        ValueError: it holds an event of a type that this module does not list, or a sample of something but a Gaussian.
    """
    match event:
        case RepeatAndSelectDpEvent() | SelfComposedDpEvent():
            check_known(event.event)
        case ComposedDpEvent() | OneOfDpEvent():
            for part in event.events:
                check_known(part)
        case _:
            poisson_gaussian_steps(event)


def event_to_json(event: DpEvent) -> dict[str, Any]:
    """The event as a JSON object: the class' name as `type`, and its attributes.

    Raises:
        ValueError: an event of a type that this module does not list.
    """
    name = type(event).__name__
    match event:
        case NoOpDpEvent():
            return {"type": name}
        case GaussianDpEvent():
            return {"type": name, "noise_multiplier": float(event.noise_multiplier)}
        case PoissonSampledDpEvent():
            rate = float(event.sampling_probability)
            return {"type": name, "sampling_probability": rate, "event": event_to_json(event.event)}
        case SelfComposedDpEvent():
            return {"type": name, "count": int(event.count), "event": event_to_json(event.event)}
        case ComposedDpEvent() | OneOfDpEvent():
            return {"type": name, "events": [event_to_json(part) for part in event.events]}
        case RepeatAndSelectDpEvent():
            numbers = {"mean": float(event.mean), "shape": float(event.shape)}
            return {"type": name, **numbers, "event": event_to_json(event.event)}
    raise ValueError(f"{name}: not an event that rapid releases")


def event_from_json(data: Any) -> DpEvent:  # noqa: PLR0911 - one for each event
    """The event that `event_to_json` wrote.

    Args:
        data: a JSON object; or, as old ledgers hold it, a list `[noise_multiplier, sample_rate, steps]`.

    Raises:
        ValueError: an unknown type, a missing or unknown attribute, or a number out of range; the message names it.
    """
    if isinstance(data, list | tuple):
        return _from_row(data)
    if not isinstance(data, Mapping):
        raise ValueError(f"{data!r}: not an event")
    name = data.get("type")
    attributes = {key: value for key, value in data.items() if key != "type"}
    match name, attributes:
        case "NoOpDpEvent", {**rest} if not rest:
            return NoOpDpEvent()
        case "GaussianDpEvent", {"noise_multiplier": noise, **rest} if not rest:
            return gaussian_event(noise)
        case "PoissonSampledDpEvent", {"sampling_probability": rate, "event": part, **rest} if not rest:
            return PoissonSampledDpEvent(_number("sampling_probability", rate, 1.0), event_from_json(part))
        case "SelfComposedDpEvent", {"count": count, "event": part, **rest} if not rest:
            return SelfComposedDpEvent(event_from_json(part), _count("count", count))
        case "ComposedDpEvent", {"events": list(parts), **rest} if not rest:
            return ComposedDpEvent([event_from_json(part) for part in parts])
        case "OneOfDpEvent", {"events": [_, *_] as parts, **rest} if not rest:
            return OneOfDpEvent(tuple(event_from_json(part) for part in parts))
        case "RepeatAndSelectDpEvent", {"mean": mean, "shape": shape, "event": part, **rest} if not rest:
            mean, shape = _number("mean", mean, LARGEST_MEAN), _number("shape", shape, LARGEST_SHAPE)
            if mean <= 1:
                raise ValueError(f"mean {mean!r}: must be above 1")
            return Trials(mean=mean, shape=shape).event(event_from_json(part))
    raise ValueError(f"{name!r} with {sorted(attributes)}: not an event that rapid releases")


def poisson_gaussian_steps(event: DpEvent) -> list[tuple[float, float, int]]:
    """The event as rows for accountants of the Poisson-subsampled Gaussian mechanism.

    Args:
        event: a tree of this module's types, whose Poisson samples hold one Gaussian release each.

    Returns:
        rows (noise_multiplier, sample_rate, steps); a Gaussian over all images has rate 1. Rows that release nothing
        (rate 0 or no steps) are left out.

    Raises:
        ValueError: the tree holds an event that has no such row.
    """
    return list(_rows(event, 1))


def _rows(event: DpEvent, times: int) -> Iterable[tuple[float, float, int]]:
    match event:
        case NoOpDpEvent():
            return
        case GaussianDpEvent() | PoissonSampledDpEvent(event=GaussianDpEvent()):
            sampled = isinstance(event, PoissonSampledDpEvent)
            gaussian, rate = (event.event, event.sampling_probability) if sampled else (event, 1.0)
            if times and rate:
                yield float(gaussian.noise_multiplier), float(rate), times
        case SelfComposedDpEvent():
            yield from _rows(event.event, times * event.count)
        case ComposedDpEvent():
            for part in event.events:
                yield from _rows(part, times)
        case PoissonSampledDpEvent():
            raise ValueError(f"PoissonSampledDpEvent of {type(event.event).__name__}: no step of DP-SGD")
        case _:
            raise ValueError(f"{type(event).__name__}: not an event that rapid releases")


def _from_row(row: list[Any] | tuple[Any, ...]) -> DpEvent:
    if len(row) != 3:
        raise ValueError(f"{list(row)!r}: not [noise_multiplier, sample_rate, steps]")
    noise_multiplier, sample_rate, steps = row
    if sample_rate == 1 and steps == 1:
        return gaussian_event(noise_multiplier)
    return dp_sgd_event(noise_multiplier, sample_rate, steps)


def _number(name: str, value: Any, most: float) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 <= value <= most or math.isinf(value):
        raise ValueError(f"{name} {value!r}: must be a number in [0, {most}]")
    return float(value)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} {value!r}: must be a whole number of at least 0")
    return value


def has_no_noise(history: Sequence[tuple[float, float, int]]) -> bool:
    """Whether a row (noise_multiplier, sample_rate, steps) has less noise than `LEAST_NOISE`."""
    return any(noise_multiplier < LEAST_NOISE for noise_multiplier, _, _ in history)
