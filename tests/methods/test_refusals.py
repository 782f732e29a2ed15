"""What cannot end well is refused by the plan of the releases, before any of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from methods.tiny import TINY

from rapid.bundle import Bundle
from rapid.dp import PublicFacts
from rapid.errors import InputError
from rapid.methods import apply_overrides, find_method
from rapid.methods.rapid.private_stage import check_base
from rapid.methods.rapid.settings import RapidSettings

FACTS = PublicFacts(100, ("0", "1"), (32, 32))
UNLABELLED = PublicFacts(100, (), (32, 32))


@pytest.mark.parametrize(
    ("name", "overrides", "facts", "words"),
    [
        ("dpdm", ["generation.guidance=1.0"], UNLABELLED, "generation.guidance 1.0: needs a model with classes"),
        ("dp-gan", ["private.steps=4", "private.discriminator_steps=5"], FACTS, "private.steps 4: are fewer than"),
    ],
)
def test_a_plan_that_would_waste_the_budget(name: str, overrides: list[str], facts: PublicFacts, words: str) -> None:
    method, tree = find_method(name), {"method": name} | TINY[name]["settings"]
    with pytest.raises(InputError) as caught:
        method.releases(apply_overrides(tree, overrides), facts, None)
    assert words in str(caught.value)


def test_the_same_guidance_is_accepted_with_classes() -> None:
    method, tree = find_method("dpdm"), {"method": "dpdm"} | TINY["dpdm"]["settings"]
    assert method.releases(apply_overrides(tree, ["generation.guidance=1.0"]), FACTS, None)
    assert method.releases(apply_overrides(tree, []), UNLABELLED, None)


@pytest.mark.parametrize("place", ["generation", "private.distillation.sampling"])
def test_moments_that_will_not_be_there(public_bundle: Path, tiny_settings: RapidSettings, place: str) -> None:
    base = Bundle.open(public_bundle, "base", "public")
    tree = tiny_settings.model_dump(mode="json")
    with_moments = ["private.moments.share=0.3", "private.objective=late", "private.start=700"]
    sampling = {"retrieval": "moments", "start": 500} | ({} if place == "generation" else {"attempts": 1})
    more = [f"{place}={{{', '.join(f'{name}: {value}' for name, value in sampling.items())}}}"]
    method = find_method("rapid")
    assert method.releases(apply_overrides(tree, [*with_moments, *more]), FACTS, base)
    settings = apply_overrides(tree, [*with_moments[1:], *more])
    assert isinstance(settings, RapidSettings)
    with pytest.raises(InputError, match=rf"{place}.retrieval moments: needs released moments"):
        check_base(base, settings)
