"""Levels of guidance: what is found for each class, and what a bundle with levels draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rapid_variants import CPU
from torch import Tensor

from rapid.bundle import Bundle
from rapid.data.private import PrivateImages
from rapid.methods import apply_overrides
from rapid.methods.rapid.generator import RapidSampler
from rapid.methods.rapid.guidance import GuidanceLevels
from rapid.methods.rapid.levels import fit_levels, levels_wanted
from rapid.methods.rapid.parts import Parts
from rapid.methods.rapid.settings import RapidSettings
from rapid.probe.network import CONSTANT
from rapid.sampling.generate import generate
from rapid.stages.private import train_private_bundle

NOT_FOR_LEVELS = [{"probe_guidance": 0.0}, {"enough_accepted": 0.0}, {"attempts": 1}]


def parts_with(private: Bundle, **changes: float) -> Parts:
    """As if its generation settings were others, with guidance and levels if `changes` does not say otherwise."""
    parts = Parts.of(private)
    own = {"probe_guidance": 0.5, "enough_accepted": 0.3, "attempts": 4, "confidence": 0.5, **changes}
    generation = parts.settings.generation.model_copy(update=own)
    return replace(parts, settings=parts.settings.model_copy(update={"generation": generation}))


def always(parts: Parts, chances: list[float]) -> Parts:
    """With a probe that finds these probabilities in every image."""
    assert parts.probe is not None
    with torch.no_grad():
        parts.probe.head.weight.zero_()
        parts.probe.head.weight[:, -1] = torch.tensor(chances).log() / CONSTANT
    return parts


@pytest.mark.parametrize(("first", "expected"), [(0.55, 0.0), (0.46, 1.0)])
def test_a_class_that_is_accepted_without_guidance_gets_none(private: Bundle, first: float, expected: float) -> None:
    """A probe that always finds class 0, with a probability above or below the confidence of .5."""
    parts = always(parts_with(private), [first, *[(1 - first) / 9] * 9])
    assert fit_levels(parts, CPU).limits.tolist() == [expected, *[1.0] * 9]


@pytest.mark.parametrize(
    ("least", "expected"),
    [(0.1, 0.45), (0.05, 0.45), (0.11, 0.0), (0.0, 1.0)],
    ids=["enough", "more", "too few", "off"],
)
def test_the_confidence_is_lowered_until_enough_candidates_are_accepted(
    private: Bundle, least: float, expected: float
) -> None:
    """A probe that always finds class 0, with a probability of .46: a tenth of all candidates, from .45 downwards."""
    parts = always(parts_with(private, least_accepted=least), [0.46, *[0.06] * 9])
    levels = fit_levels(parts, CPU)
    assert levels.confidence == pytest.approx(expected)
    assert levels.limits.tolist() == [1.0] * 10
    sampler = RapidSampler(replace(parts, levels=levels), CPU, parts.settings.generation)
    assert sampler.confidence == pytest.approx(min(0.5, expected))


def test_a_confidence_that_enough_candidates_reach_stays(private: Bundle) -> None:
    """Also without guidance, for which nothing is found then."""
    parts = always(parts_with(private, least_accepted=0.1, probe_guidance=0.0), [0.55, *[0.05] * 9])
    levels = fit_levels(parts, CPU)
    assert (levels.confidence, levels.limits.tolist()) == (1.0, [1.0] * 10)


def test_levels_of_an_earlier_version_leave_the_confidence(private: Bundle, tmp_path: Path) -> None:
    """They have no confidence; the setting decides, as it does with least_accepted=0."""
    GuidanceLevels({"classes": 10}).save(tmp_path / "old")
    parts = parts_with(private, least_accepted=0.4)
    old = replace(parts, levels=GuidanceLevels.load(tmp_path / "old"))
    assert RapidSampler(old, CPU, parts.settings.generation).confidence == 0.5
    off = parts.settings.generation.model_copy(update={"least_accepted": 0.0})
    low = replace(parts, levels=GuidanceLevels({"classes": 10, "confidence": 0.2}))
    assert RapidSampler(low, CPU, off).confidence == 0.5


@pytest.mark.parametrize("changes", NOT_FOR_LEVELS)
def test_without_guidance_or_refusals_there_are_no_levels(private: Bundle, changes: dict[str, float]) -> None:
    assert levels_wanted(parts_with(private).settings)
    assert not levels_wanted(parts_with(private, **changes).settings)
    confident = {"least_accepted": 0.3, **changes}
    assert levels_wanted(parts_with(private, **confident).settings) == ("attempts" not in changes)
    assert not levels_wanted(parts_with(private, **confident, confidence=0.0).settings)


def test_levels_replace_what_the_setting_says(private: Bundle) -> None:
    """All 0: as without guidance; all at the setting's value or above it: as without levels; 0 accepted: ignored."""

    def images(limits: Tensor | None, **changes: float) -> Tensor:
        parts, levels = parts_with(private, **changes), None
        if limits is not None:
            levels = GuidanceLevels({"classes": 10})
            levels.limits.copy_(limits)
        sampler = RapidSampler(replace(parts, levels=levels), CPU, parts.settings.generation)
        return torch.from_numpy(generate(sampler, 10, seed=1).images)

    none, half = images(None, probe_guidance=0.0), images(None)
    assert not torch.equal(none, half)
    assert torch.equal(images(torch.zeros(10)), none)
    assert torch.equal(images(torch.full((10,), 0.9)), half)
    assert torch.equal(images(torch.zeros(10), enough_accepted=0.0), half)


def test_a_private_bundle_keeps_its_levels(
    public_bundle: Path, digits: Path, tiny_settings: RapidSettings, tmp_path: Path
) -> None:
    changes = ["generation.probe_guidance=0.5", "generation.enough_accepted=0.3"]
    changes += ["generation.confidence=0.9", "generation.least_accepted=0.3"]
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), changes)
    made = train_private_bundle(
        public_bundle, PrivateImages(digits), tmp_path / "out", settings,
        epsilon=5.0, delta=None, device=CPU, resume=False,
    )  # fmt: skip
    assert made is not None
    levels = Parts.of(made).levels
    assert levels is not None
    assert bool(torch.isin(levels.limits, torch.tensor([0.0, 0.1, 0.25, 1.0])).all())
    assert levels.confidence == levels.config["confidence"]
    assert generate(RapidSampler(Parts.of(made), CPU, Parts.of(made).settings.generation), 3).images.shape[0] == 3
