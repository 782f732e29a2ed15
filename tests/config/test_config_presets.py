"""Presets, which can extend each other; overrides; what a private run and sampling may change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rapid.config.presets import (
    check_overrides,
    generation_settings,
    preset_names,
    preset_tree,
    private_settings,
    section_overrides,
)
from rapid.config.sections import AugmentSettings, ImageSettings, MethodSettings
from rapid.errors import InputError
from rapid.methods import apply_overrides, load_settings, settings_class


def write(folder: Path, **presets: str) -> Path:
    for name, text in presets.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_overrides_are_typed() -> None:
    chosen = load_settings("demo", ["denoiser.attention=[false]", "private.clip_norm=0.5", "image.fit=resize"])
    assert chosen.denoiser.attention == (False,)
    assert chosen.private.clip_norm == 0.5
    assert chosen.preset == "demo"
    assert {"demo", "letters-mnist", "emnist-mnist", "imagenet32-cifar10"} <= set(preset_names())


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("generation.steps=true", "must be a whole number"),
        ("private.start=true", "must be a whole number"),
        ("private.clip_norm=true", "must be a number"),
        ("generation.confidence=no", "must be a number"),
        ("autoencoder.multipliers=[true, 2]", "must be a whole number"),
    ],
)
def test_true_and_false_are_no_numbers(override: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        load_settings("demo", [override])
    assert refused.value.field == override.partition("=")[0]


@pytest.mark.parametrize("method", ["rapid", "dpdm", "dp-gan", "dp-diffusion", "dp-classifier"])
def test_an_override_changes_one_setting_alone(method: str) -> None:
    """Of each nested section, with a value that is its own: nothing beside it changes."""
    before = apply_overrides({"method": method}, []).model_dump(mode="json")

    def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for name, value in tree.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    nested = [(name, value) for name, value in leaves(before) if "." in name]
    assert len(nested) > 20
    for name, value in nested:
        after = apply_overrides({"method": method}, [f"{name}={json.dumps(value)}"]).model_dump(mode="json")
        assert after == before, name


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("private.steps=0", "private.steps", "must be at least 1"),
        ("private.stps=3", "private.stps", "there is no such setting; did you mean private.steps?"),
        ("private.foo=3", "private.foo", "there is no such setting"),
        ("private.probe.shre=3", "private.probe.shre", "there is no such setting; did you mean private.probe.share?"),
        ("private.steps.more=3", "private.steps.more", "'steps' is a value"),
        ("retrieval.k=100", "set", "retrieval: k must be larger than v"),
        ("schedule.beta_end=0.1", "set", "at step 1000 the noise leaves 3e-09 of an image, less than 0.0001"),
        ("retrieval.k=2000", "set", "retrieval.k must lie in 1..1000"),
        ("nonsense=3", "set", "nonsense: there is no such setting"),
        ("nonsense", "set", "write it as section.name=value"),
        ("=3", "set", "write it as section.name=value"),
        ("private.steps=[", "set", "private.steps=[: the value is not valid YAML"),
        ("private.steps=2026-13-45", "set", "private.steps=2026-13-45: the value is not valid YAML"),
        (f"private.steps={'[' * 2000}", "set", "the value is not valid YAML"),
        ("private.steps=!!bool x", "set", "the value is not valid YAML"),
        ("private.steps=!!int ''", "set", "the value is not valid YAML"),
        ("private.steps=!!timestamp x", "set", "the value is not valid YAML"),
        # JSON has neither
        ("private.learning_rate=.inf", "private.learning_rate", "must be a finite number"),
        ("private.clip_norm=.nan", "private.clip_norm", "must be a finite number"),
        ("private.clip_norm=1e300", "private.clip_norm", "must be at most"),
        ("private.checkpoint_seconds=1e300", "private.checkpoint_seconds", "must be at most"),
        ("private.trainable=[]", "private.trainable", "at least 1 entry"),
        ("denoiser.multipliers=[]", "denoiser.multipliers", "at least 1 entry"),
        ("denoiser.multipliers=[1, 0]", "denoiser.multipliers.1", "must be at least 1"),
    ],
)
def test_a_bad_override_is_named(override: str, field: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load_settings("demo", [override])
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("retrieval.k=-1", "retrieval.k", "must be at least 1"),
        ("image.channels=2", "image.channels", "must be 1 or 3"),
        ("private.physical_batch=0", "private.physical_batch", "use a whole number of at least 1, or auto"),
        ("retrieval.kk=3", "retrieval.kk", "no such setting; did you mean retrieval.k?"),
        ("retreival.k=3", "set", "retreival: there is no such setting; did you mean retrieval?"),
        ("retrieval=3", "set", "retrieval: must be a section"),
        ("nonsense", "set", "write it as section.name=value"),
        ("retrieval.k.more=3", "retrieval.k.more", "'k' is a value"),
    ],
)
def test_what_fits_no_settings_is_refused_before_they_are_chosen(override: str, field: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        check_overrides(settings_class("rapid"), ["private.steps=7", override])
    assert caught.value.field == field
    assert words in str(caught.value)


def test_what_does_not_fit_the_defaults_may_fit_other_settings() -> None:
    """A step k below the default v, and a side that the default autoencoder cannot halve."""
    check_overrides(settings_class("rapid"), ["retrieval.k=100", "image.size=30", "autoencoder.latent_channels=99"])


def test_a_section_that_is_given_in_part_keeps_its_other_values() -> None:
    before = load_settings("demo")
    after = load_settings("demo", ["private={steps: 5, probe: {steps: 7}}"])
    alone = load_settings("demo", ["private.steps=5", "private.probe.steps=7"])
    assert after == alone != before


def test_the_tree_is_left_unchanged() -> None:
    tree = preset_tree("demo")
    apply_overrides(tree, ["private.steps=7", "split.seed=3"])
    assert tree == preset_tree("demo")


def test_a_preset_extends_another_section_by_section(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        first="image: {size: 32, channels: 3}\ndenoiser: {attention: [true, true], training: {steps: 5, heads: 2}}",
        second="extends: first\ndenoiser: {attention: [false], training: {steps: 6}}",
        third="extends: second\nimage: {size: 64}\nsplit: {seed: 1}",
    )
    assert preset_names(folder) == ["first", "second", "third"]
    assert preset_tree("third", folder) == {
        "image": {"size": 64, "channels": 3},
        "denoiser": {"attention": [False], "training": {"steps": 6, "heads": 2}},
        "split": {"seed": 1},
    }
    assert preset_tree("first", folder)["denoiser"]["attention"] == [True, True]


def test_presets_that_extend_each_other_or_nothing_are_refused(tmp_path: Path) -> None:
    folder = write(
        tmp_path, a="extends: b", b="extends: c", c="extends: a", own="extends: own", lost="extends: nowhere"
    )
    with pytest.raises(InputError, match="preset a: extends itself: a -> b -> c -> a"):
        preset_tree("a", folder)
    with pytest.raises(InputError, match="preset own: extends itself: own -> own"):
        preset_tree("own", folder)
    with pytest.raises(InputError, match="preset lost: lost extends 'nowhere', which does not exist"):
        preset_tree("lost", folder)
    with pytest.raises(InputError, match="preset none: unknown; choose one of auto, a, b"):
        preset_tree("none", folder)
    with pytest.raises(InputError, match="preset auto: is for build-kb, and for --base that it made; choose one of a,"):
        preset_tree("auto", folder)


def test_the_faces_differ_in_size_and_batch_only() -> None:
    small, large = (load_settings(f"ffhq{size}-celeba{size}").model_dump() for size in (32, 64))
    assert (small["image"]["size"], large["image"]["size"]) == (32, 64)
    for settings in (small, large):
        del settings["preset"], settings["image"]["size"], settings["private"]["physical_batch"]
        del settings["denoiser"]["training"]["batch_size"]
    assert small == large


def test_a_private_run_keeps_the_public_sections() -> None:
    base = load_settings("demo")
    changed = private_settings(base, "letters-mnist", ["private.steps=7"])
    assert changed.private.steps == 7
    assert changed.private.expected_batch == load_settings("letters-mnist").private.expected_batch
    assert changed.denoiser == base.denoiser
    with pytest.raises(InputError, match=r"denoiser\.channels: .*fixes 'denoiser'"):
        private_settings(base, None, ["denoiser.channels=3"])


@pytest.mark.parametrize(
    ("method", "fixed"),
    [
        ("dpdm", {"image", "network", "public"}),
        ("dp-diffusion", {"image", "views", "schedule", "timesteps", "denoiser"}),
        ("dp-classifier", {"image", "network", "warmup"}),
    ],
)
def test_a_method_says_what_a_public_bundle_fixes(method: str, fixed: set[str]) -> None:
    assert set(settings_class(method).fixed_sections()) == fixed


def test_a_public_bundle_fixes_what_a_method_does_not_speak_of() -> None:
    class Silent(MethodSettings):
        features: AugmentSettings = AugmentSettings()
        depth: int = 3

    class Forgetful(Silent):
        public_sections: ClassVar[tuple[str, ...]] = ("features",)

    assert set(Silent.fixed_sections()) == {"image", "features", "depth"}
    assert set(Forgetful.fixed_sections()) == {"image", "features"}
    base = Forgetful(method="silent")
    assert private_settings(base, None, ["depth=4", "private.group_size=2"]).depth == 4
    with pytest.raises(InputError, match="fixes 'image'"):
        private_settings(base, None, ["image.size=64"])
    with pytest.raises(InputError, match="fixes 'depth'"):
        private_settings(Silent(method="silent"), None, ["depth=4"])


def test_ldm_is_sampled_without_retrieval_unless_told() -> None:
    base = load_settings("demo")
    assert base.generation.retrieval == "query"
    assert private_settings(base, None, ["private.objective=ldm"]).generation.retrieval == "none"
    asked = ["private.objective=ldm", "generation.retrieval=query"]
    assert private_settings(base, None, asked).generation.retrieval == "query"
    assert private_settings(base, None, ["private.objective=late"]).generation.retrieval == "query"


def test_generation_settings_are_all_that_sampling_may_change() -> None:
    base = load_settings("demo")
    changed = generation_settings(base, ["generation.steps=50"])
    assert changed.generation.steps == 50
    assert changed.private == base.private
    for override in ("private.steps=50", "preset=demo"):
        with pytest.raises(InputError, match="only generation settings"):
            generation_settings(base, [override])


def test_what_is_set_of_a_section_is_known_before_the_other_settings() -> None:
    """28 does not fit the default autoencoder, which nobody asked for."""
    for overrides in (
        ["image.size=28", "private.steps=3"],
        ["image={size: 28}"],
        ["image={size: 20}", "image.size=28"],
    ):
        assert section_overrides("image", ImageSettings, overrides) == {"size": 28}
    assert section_overrides("image", ImageSettings, ["denoiser.channels=3"]) == {}
    for override, words in (
        ("image.size=many", "image.size: must be a whole number"),
        ("image.sise=28", "image.sise: there is no such setting"),
        ("image=28", "set image: "),
        ("image.size", "write it as section.name=value"),
    ):
        with pytest.raises(InputError, match=words):
            section_overrides("image", ImageSettings, [override])
