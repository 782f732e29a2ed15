"""Presets and overrides, and what a private run and sampling may change."""

from __future__ import annotations

import pytest

from rapid.config.presets import generation_settings, load_settings, preset_names, private_settings
from rapid.errors import InputError


def test_overrides_are_typed() -> None:
    chosen = load_settings("demo", ["denoiser.attention=[false]", "private.clip_norm=0.5", "image.fit=resize"])
    assert chosen.denoiser.attention == (False,)
    assert chosen.private.clip_norm == 0.5
    assert chosen.preset == "demo"
    assert {"demo", "letters-mnist", "emnist-mnist", "imagenet32-cifar10"} <= set(preset_names())


def test_a_private_run_keeps_the_public_sections() -> None:
    base = load_settings("demo")
    changed = private_settings(base, "letters-mnist", ["private.steps=7"])
    assert changed.private.steps == 7
    assert changed.private.expected_batch == load_settings("letters-mnist").private.expected_batch
    assert changed.denoiser == base.denoiser
    with pytest.raises(InputError, match="fixes 'denoiser'"):
        private_settings(base, None, ["denoiser.channels=3"])


def test_ldm_is_sampled_without_retrieval_unless_told() -> None:
    base = load_settings("demo")
    assert base.generation.retrieval == "query"
    assert private_settings(base, None, ["private.objective=ldm"]).generation.retrieval == "none"
    asked = ["private.objective=ldm", "generation.retrieval=query"]
    assert private_settings(base, None, asked).generation.retrieval == "query"
    assert private_settings(base, None, ["private.objective=late"]).generation.retrieval == "query"


def test_generation_settings_are_all_that_sampling_may_change() -> None:
    assert generation_settings(load_settings("demo"), ["generation.steps=50"]).steps == 50
    with pytest.raises(InputError, match="only generation settings"):
        generation_settings(load_settings("demo"), ["private.steps=50"])
