"""The linear autoencoder against the singular value decomposition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from rapid.data import load_images, sample_path, to_unit_range
from rapid.data.augmented import AugmentedImages
from rapid.errors import InputError
from rapid.methods import apply_overrides
from rapid.methods.rapid import networks
from rapid.methods.rapid.networks import AutoencoderRecipe, train_autoencoder
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Autoencoder
from rapid.training import Checkpoint

CPU = torch.device("cpu")


def fitted(images: np.ndarray, patch: int, channels: int, folder: Path, noise: float = 0) -> Autoencoder:
    own = [
        f"image.size={images.shape[1]}",
        f"image.channels={images.shape[3] if images.ndim == 4 else 1}",
        "autoencoder.kind=linear",
        f"autoencoder.patch={patch}",
        f"autoencoder.latent_channels={channels}",
        f"autoencoder.decoder_noise={noise}",
        "denoiser.multipliers=[1]",
        "denoiser.attention=[false]",
    ]
    chosen = apply_overrides({"method": "rapid"}, own)
    assert isinstance(chosen, RapidSettings)
    recipe = AutoencoderRecipe(
        images="", image=chosen.image, views=0, augment=chosen.augmentations.augment, autoencoder=chosen.autoencoder
    )
    views = AugmentedImages(images, np.zeros(len(images), np.int64), 0, chosen.augmentations.augment, CPU)
    model = train_autoencoder(recipe, views, CPU, Checkpoint(folder / "state.pt"))
    assert model.encode(to_unit_range(images[:1], CPU)).shape[1:] == chosen.latent_shape
    return model


def patches_of(images: Tensor, patch: int) -> np.ndarray:
    """Patches as rows, cut out one by one."""
    n, _, height, width = images.shape
    cut = [
        images[:, :, y : y + patch, x : x + patch].reshape(n, -1)
        for y in range(0, height, patch)
        for x in range(0, width, patch)
    ]
    return torch.cat(cut).double().numpy()


@settings(max_examples=15, deadline=None)
@given(
    patch=st.sampled_from([1, 2, 4]), colours=st.sampled_from([1, 3]), share=st.floats(0, 1), seed=st.integers(0, 99)
)
def test_no_other_basis_of_its_size_has_a_smaller_error(
    tmp_path_factory: pytest.TempPathFactory, patch: int, colours: int, share: float, seed: int
) -> None:
    """The error is the sum of the singular values that are left out (Eckart and Young)."""
    rng = np.random.default_rng(seed)
    smooth = rng.integers(0, 256, (20, 4, 4, colours)).repeat(2, 1).repeat(2, 2)
    images = (smooth * 0.8 + rng.integers(0, 50, (20, 8, 8, colours))).astype(np.uint8)
    images = images[..., 0] if colours == 1 else images
    size = colours * patch**2
    kept = max(1, round(share * size))
    model = fitted(images, patch, kept, tmp_path_factory.mktemp("state"))
    x = to_unit_range(images, CPU)
    decoded = model.decode(model.encode(x))
    values = np.linalg.svd(patches_of(x, patch), compute_uv=False)
    assert float((decoded - x).double().square().sum()) == pytest.approx((values[kept:] ** 2).sum(), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("noise", [0, 0.1])
def test_latents_have_mean_0_and_variance_1_and_are_stored(noise: float, tmp_path: Path) -> None:
    images = load_images(sample_path("letters"), "public").images[:300]
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    model = fitted(padded, 4, 8, tmp_path, noise)
    x = to_unit_range(padded, CPU)
    latents = model.encode(x)
    torch.testing.assert_close(latents.mean((0, 2, 3)), torch.zeros(8), atol=1e-3, rtol=0)
    torch.testing.assert_close(latents.std((0, 2, 3)), torch.ones(8), atol=1e-3, rtol=0)
    model.save(tmp_path / "saved")
    again = Autoencoder.load(tmp_path / "saved")
    assert torch.equal(again.encode(x), latents)
    assert torch.equal(again.decode(latents), model.decode(latents))
    with pytest.raises(TypeError, match="posterior"):
        model.posterior(x)


@pytest.mark.parametrize(("count", "images_a_batch"), [(20, 50), (120, 50), (40, 7), (300, 10)])
def test_the_decoder_sees_images_of_the_whole_set(
    count: int, images_a_batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the half that comes last, patches go on in the next one; those before have faint grain."""
    monkeypatch.setattr(networks, "DECODER_BATCH", images_a_batch)
    monkeypatch.setattr(networks, "DECODER_PATCHES", 2 * images_a_batch * 16)
    rng = np.random.default_rng(0)
    images = rng.integers(120, 136, (count, 8, 8), np.uint8)
    slope = rng.integers(-30, 30, (count - count // 2, 2, 1, 1)) * np.indices((8, 8))
    images[count // 2 :] = (128 + slope.sum(1) / 4).astype(np.uint8)
    model, alone = (fitted(images, 2, 1, tmp_path / str(noise), noise) for noise in (0.05, 0))
    x = to_unit_range(images[count // 2 :], CPU)
    errors = [float((one.decode(one.encode(x)) - x).square().mean()) for one in (model, alone)]
    assert errors[0] < 0.3 * errors[1]


def test_an_older_bundle_decodes_as_it_did(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    model = fitted(images, 2, 2, tmp_path)
    config = {name: value for name, value in model.config.items() if name != "decoder_noise"}
    older = Autoencoder(config)
    older.load_state_dict(model.state_dict())
    latents = model.encode(to_unit_range(images, CPU))
    assert torch.equal(older.decode(latents), model.decode(latents))


def test_all_components_lose_nothing(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)
    model = fitted(images, 2, 12, tmp_path)
    x = to_unit_range(images, CPU)
    torch.testing.assert_close(model.decode(model.encode(x)), x, atol=1e-4, rtol=0)
    assert model.encode_raw(x).shape == F.pixel_unshuffle(x, 2).shape


def test_more_components_than_a_patch_has_are_refused() -> None:
    overrides = ["autoencoder.kind=linear", "autoencoder.patch=2", "autoencoder.latent_channels=5"]
    with pytest.raises(InputError, match="at most 4, the numbers of a patch"):
        apply_overrides({"method": "rapid"}, overrides)
