"""The spec of a method's DP-SGD training, from its settings and the public facts of the images."""

from __future__ import annotations

from rapid.config.sections import DpSgdSettings
from rapid.data.units import ONE_PERSON, plural
from rapid.dp.access import PublicFacts
from rapid.dp.releases import DpSgdSpec
from rapid.errors import InputError


def training_spec(name: str, title: str, settings: DpSgdSettings, facts: PublicFacts) -> DpSgdSpec:
    """The release of a training.

    Args:
        name: of the release.
        title: what is released, in the words of the statement.
        settings: steps, batch, clip norm, multiplicity, noise band.
        facts: of the private images.

    Raises:
        InputError: batch or band are too large for so few images.
    """
    size, units = facts.dataset_size, plural(facts.unit)
    if settings.expected_batch > size:
        problem = f"is larger than the private set; use at most its {size} {units}"
        if facts.unit == ONE_PERSON:
            problem += " (people are drawn, not images)"
        raise InputError("private.expected_batch", problem, settings.expected_batch)
    if settings.noise_band * settings.expected_batch > size:
        problem = f"times private.expected_batch is more than the {size} {units}; make one of them smaller"
        raise InputError("private.noise_band", problem, settings.noise_band)
    return DpSgdSpec(
        name=name,
        title=title,
        dataset_size=size,
        expected_batch=settings.expected_batch,
        steps=settings.steps,
        clip_norm=settings.clip_norm,
        multiplicity=settings.multiplicity,
        band=settings.noise_band,
    )
