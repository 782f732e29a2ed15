"""Runs with moments: images begin from them, and what cannot end well is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests_support import assert_same_images

from rapid.bundle import Bundle
from rapid.config.sections import MethodSettings
from rapid.data.private import PrivateImages
from rapid.errors import InputError
from rapid.methods import apply_overrides
from rapid.methods.rapid.generation_settings import GenerationSettings
from rapid.methods.rapid.generator import RapidGenerator
from rapid.methods.rapid.settings import RapidSettings
from rapid.sampling.generate import generate
from rapid.stages.private import train_private_bundle

CPU = torch.device("cpu")


def trained(base: Path, digits: Path, out: Path, settings: MethodSettings, *, resume: bool = False) -> Bundle:
    """A private bundle at epsilon 5."""
    found = train_private_bundle(
        base, PrivateImages(digits), out, settings, epsilon=5.0, delta=None, device=CPU, resume=resume
    )
    assert found is not None
    return found


@pytest.fixture(scope="module")
def with_moments(
    public_bundle: Path, digits: Path, tiny_settings: RapidSettings, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    """A private bundle whose images begin from moments."""
    out = tmp_path_factory.mktemp("moments") / "private"
    return trained(public_bundle, digits, out, own_settings(tiny_settings))


def own_settings(tiny: RapidSettings) -> RapidSettings:
    overrides = [
        "private.objective=late",
        "private.start=700",
        "private.moments.share=0.3",
        "private.moments.warmup.steps=3",
        "private.moments.warmup.batch_size=8",
        "generation.retrieval=moments",
        "generation.start=500",
    ]
    made = apply_overrides(tiny.model_dump(mode="json"), overrides)
    assert isinstance(made, RapidSettings)
    return made


def test_images_begin_from_the_released_moments(with_moments: Bundle) -> None:
    releases = json.loads((with_moments.path / "privacy.json").read_text())["releases"]
    assert [one["name"] for one in releases] == ["overlap", "probe", "centre", "radius", "moments", "denoiser"]
    settings = with_moments.settings_as(RapidSettings).generation
    generator = RapidGenerator(with_moments, CPU, settings.model_copy(update={"attempts": 1}))
    assert generator.calls() == 10
    assert generator.start == 500
    labels = [0, 3, 3, 9]
    whole = generate(generator, 4, seed=1, labels=labels)
    single = generate(generator, 1, seed=1, labels=labels[:1])
    assert_same_images(single.images, whole.images[:1])


def test_moments_that_are_not_there_are_refused(
    private: Bundle, public_bundle: Path, digits: Path, tiny_settings: RapidSettings, tmp_path: Path
) -> None:
    settings = GenerationSettings.model_validate({"retrieval": "moments"})
    with pytest.raises(InputError, match="has no moments"):
        RapidGenerator(private, CPU, settings)
    base = tmp_path / "base"
    base.mkdir()
    for path in public_bundle.iterdir():
        if path.name != "subspace":
            (base / path.name).symlink_to(path)
    (base / "config.json").unlink()
    config = json.loads((public_bundle / "config.json").read_text())
    del config["components"]["subspace"]
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="without the subspace"):
        trained(base, digits, tmp_path / "out", own_settings(tiny_settings))
    assert not (tmp_path / "out").exists()


def test_a_warm_up_that_has_no_timesteps_is_refused(
    public_bundle: Path, digits: Path, tiny_settings: RapidSettings, tmp_path: Path
) -> None:
    low = apply_overrides(
        own_settings(tiny_settings).model_dump(mode="json"), ["private.start=200", "generation.start=200"]
    )
    with pytest.raises(InputError, match="warmup_from 300: is above 200"):
        trained(public_bundle, digits, tmp_path / "out", low)
    assert not (tmp_path / "out").exists()


def test_a_run_of_a_version_with_other_releases_is_not_resumed(
    with_moments: Bundle, public_bundle: Path, digits: Path, tiny_settings: RapidSettings, tmp_path: Path
) -> None:
    """It is refused before anything is read again or spent; the folder is left as it was."""
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    manifest = json.loads((with_moments.path / "checkpoints" / "manifest.json").read_text())
    releases = manifest["budget"]["releases"]
    manifest["budget"]["releases"] = [one for one in releases if one["spec"]["name"] not in ("centre", "radius")]
    (out / "checkpoints" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="of another version, with other releases"):
        trained(public_bundle, digits, out, own_settings(tiny_settings), resume=True)
    assert json.loads((out / "checkpoints" / "manifest.json").read_text()) == manifest
