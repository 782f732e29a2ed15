"""Trained networks without their bundle: exported in half precision, and built on with other public images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests_process import run
from tests_support import export_networks

from rapid.bundle import Bundle
from rapid.bundle.networks import builtin_names, open_networks
from rapid.config.presets import networks_settings
from rapid.data.private import PrivateImages
from rapid.errors import InputError
from rapid.methods.rapid import METHOD
from rapid.methods.rapid.generator import RapidGenerator
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.probe.network import Probe, class_similarity
from rapid.sampling.generate import generate
from rapid.stages.private import train_private_bundle
from rapid.stages.public import build_public_bundle

CPU = torch.device("cpu")
KEPT = {"autoencoder": Autoencoder, "encoder": TrajectoryEncoder}


@pytest.fixture(scope="module")
def built(networks: Bundle, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A public bundle of digits on the networks of letters."""
    own = networks.settings_as(RapidSettings)
    settings = networks_settings(own, METHOD.fixed_by_networks(own), None, [])
    out = tmp_path_factory.mktemp("built") / "public"
    return build_public_bundle([digits], out, settings, CPU, resume=False, networks=networks)


def test_an_export_holds_networks_alone(networks: Bundle, public_bundle: Path) -> None:
    assert {path.name for path in networks.path.iterdir()} == {
        "README.md", "autoencoder", "config.json", "denoiser", "encoder", "model_index.json", "probe"
    }  # fmt: skip
    base = Bundle.open(public_bundle, "base", "public")
    for name, kind in (KEPT | {"denoiser": Denoiser, "probe": Probe}).items():
        ours, theirs = (one.component(name, kind).state_dict() for one in (networks, base))
        for key, tensor in ours.items():
            assert tensor.dtype == theirs[key].dtype
            assert torch.equal(tensor, theirs[key].half().to(tensor.dtype)), f"{name}.{key}"


def test_networks_are_not_trained_further(networks: Bundle, built: Bundle) -> None:
    for name, kind in KEPT.items():
        ours, theirs = (one.component(name, kind).state_dict() for one in (built, networks))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    ours, theirs = (one.component("denoiser", Denoiser).state_dict() for one in (built, networks))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs if key != "class_table.weight")


def test_classes_become_those_of_the_images(networks: Bundle, built: Bundle) -> None:
    denoiser, known = (one.component("denoiser", Denoiser) for one in (built, networks))
    probe, old = (one.component("probe", Probe) for one in (built, networks))
    assert built.classes == tuple("0123456789")
    assert denoiser.num_classes == 10
    assert probe.prototypes.shape == (10, old.prototypes.shape[1])
    # embeddings are blends of those of the letters that a digit resembles; the null class stays as it was
    own, table = denoiser.class_table.weight, known.class_table.weight
    assert torch.equal(own[-1], table[-1])
    weights = class_similarity(probe.prototypes, old.prototypes)
    torch.testing.assert_close(own[:-1], weights @ table[:-1])


def test_the_card_names_networks_that_were_given(networks: Bundle, built: Bundle) -> None:
    card = (built.path / "README.md").read_text(encoding="utf-8")
    assert f"trained on other images: {networks.name}, sha256 {networks.digest}" in card
    assert "D_pre trained nothing" in card
    assert "images trained the networks" not in card


def test_similarity_of_classes() -> None:
    features = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    features[:, -1] = 0.3
    weights = class_similarity(features, features)
    torch.testing.assert_close(weights.sum(1), torch.ones(5))
    assert (weights.argmax(1) == torch.arange(5)).all()
    # by hand, for two of them
    first, second = features[0, :-1].double().numpy(), features[1, :-1].double().numpy()
    cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    ratio = float(weights[0, 1] / weights[0, 0])
    assert ratio == pytest.approx(np.exp((cosine - 1) / 0.05), rel=1e-3)


def test_private_training_and_generation_on_them(
    built: Bundle, letters: Path, tiny_settings: RapidSettings, tmp_path: Path
) -> None:
    model = train_private_bundle(
        built.path,
        PrivateImages(letters),
        tmp_path / "m",
        tiny_settings,
        epsilon=20.0,
        delta=None,
        device=CPU,
        resume=False,
    )
    assert generate(RapidGenerator(model, CPU), 2, seed=0, labels=[0, 1]).images.shape == (2, 32, 32)


def test_without_labels_there_is_no_probe(networks: Bundle, digits: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "bare.npz", images=np.load(digits)["images"])
    settings = networks.settings_as(RapidSettings)
    bundle = build_public_bundle(
        [tmp_path / "bare.npz"], tmp_path / "out", settings, CPU, resume=False, networks=networks
    )
    assert not bundle.has("probe")
    assert bundle.component("denoiser", Denoiser).num_classes == 0
    assert generate(RapidGenerator(bundle, CPU), 1, seed=0).images.shape == (1, 32, 32)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("build-kb --networks {networks} --set autoencoder.patch=1", "the networks (--networks) fix it"),
        ("build-kb --networks {networks} --set retrieval.k=500", "the networks (--networks) fix it"),
        ("build-kb --networks {networks} --preset auto", "trained already"),
        ("build-kb --networks {networks} --method dpdm", "of the method rapid"),
        ("build-kb --networks {networks} --minutes 3", "--minutes"),
        ("build-kb --networks builtin:nothing", "unknown; rapid ships"),
    ],
)
def test_what_does_not_fit_is_refused(
    arguments: str, words: str, networks: Bundle, digits: Path, tmp_path: Path
) -> None:
    line = f"{arguments.format(networks=networks.path)} --public {digits} --out {tmp_path / 'out'}"
    done = run(*line.split())
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_networks_alone_are_no_model(networks: Bundle) -> None:
    with pytest.raises(InputError, match="holds networks alone"):
        Bundle.open(networks.path, "model")
    with pytest.raises(InputError, match="is a networks bundle, expected a public one"):
        Bundle.open(networks.path, "base", "public")


def test_a_run_is_bound_to_its_networks(networks: Bundle, public_bundle: Path, digits: Path, tmp_path: Path) -> None:
    others = export_networks(public_bundle, tmp_path / "others", "--preset", "demo")
    settings = networks.settings_as(RapidSettings)
    build_public_bundle([digits], tmp_path / "out", settings, CPU, resume=False, networks=networks)
    with pytest.raises(InputError, match="networks"):
        build_public_bundle([digits], tmp_path / "out", settings, CPU, resume=True, networks=others)


def test_what_the_networks_fix_cannot_be_set(networks: Bundle) -> None:
    own = networks.settings_as(RapidSettings)
    fixed = METHOD.fixed_by_networks(own)
    for override in (
        "image.size=64",
        "image={size: 64}",
        "encoder.base_channels=8",
        "retrieval.k=3",
        "retrieval={k: 3}",
    ):
        with pytest.raises(InputError, match=r"the networks \(--networks\) fix it"):
            networks_settings(own, fixed, None, [override])
    # how larger images come to the size of the networks, and what else the networks leave open
    changed = networks_settings(own, fixed, None, ["image.fit=contain", "retrieval.v=7"])
    assert (changed.image.fit, changed.image.size, changed.retrieval.v) == ("contain", own.image.size, 7)


def test_larger_images_on_networks_are_scaled_down(networks: Bundle, tmp_path: Path) -> None:
    large = np.random.default_rng(0).integers(0, 256, (24, 48, 40), np.uint8)
    np.savez(tmp_path / "large.npz", images=large, labels=np.arange(24) % 3)
    own = networks.settings_as(RapidSettings)
    fixed = METHOD.fixed_by_networks(own)
    with pytest.raises(InputError, match=r"image\.fit=contain"):
        build_public_bundle([tmp_path / "large.npz"], tmp_path / "a", own, CPU, resume=False, networks=networks)
    settings = networks_settings(own, fixed, None, ["image.fit=contain"])
    built = build_public_bundle(
        [tmp_path / "large.npz"], tmp_path / "b", settings, CPU, resume=False, networks=networks
    )
    assert built.image_shape == (32, 32)
    assert built.settings_as(RapidSettings).image.fit == "contain"


def test_shipped_networks_open() -> None:
    for name in builtin_names():
        bundle = open_networks(Path(f"builtin:{name}"))
        assert sum(file.stat().st_size for file in bundle.path.rglob("*") if file.is_file()) < 8e6
        assert "licen" in (bundle.path / "README.md").read_text().lower()


def test_shipped_networks_have_the_settings_of_their_preset() -> None:
    for name in builtin_names():
        settings = open_networks(Path(f"builtin:{name}")).settings_as(RapidSettings)
        assert networks_settings(settings, METHOD.fixed_by_networks(settings), settings.preset, []) == settings
