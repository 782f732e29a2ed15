"""The decoder of principal components against least squares with the noise drawn, and what it is for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from rapid.nn.patch_decoder import PatchDecoder


def smooth(count: int, side: int, seed: int) -> Tensor:
    """Images with a large form and some grain, (count, 1, side, side)."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 1, side // 4 + 2, side // 4 + 2, generator=rng)
    form = F.interpolate(coarse, side, mode="bicubic", align_corners=False)
    return form + 0.05 * torch.randn(form.shape, generator=rng)


def components(images: Tensor, patch: int, count: int) -> Tensor:
    """The leading singular vectors of patches, (count, patch squared)."""
    rows = F.pixel_unshuffle(images, patch).movedim(1, -1).flatten(0, -2)
    return torch.linalg.svd(rows, full_matrices=False)[2][:count]


def encoded(images: Tensor, basis: Tensor, patch: int) -> Tensor:
    return torch.einsum("dp,nphw->ndhw", basis, F.pixel_unshuffle(images, patch))


def fitted(images: Tensor, basis: Tensor, patch: int, noise: float) -> PatchDecoder:
    latents = encoded(images, basis, patch)
    model = PatchDecoder(len(basis), basis.shape[1], patch)
    half = len(images) // 2
    parts = (slice(half), slice(half, None))
    total = sum((model.products(latents[part], images[part]) for part in parts), torch.zeros(()))
    model.fit(total, latents.std((0, 2, 3)), noise)
    return model


def rows_around(latents: Tensor) -> np.ndarray:
    """The nine latents of each place and a one, place by place."""
    padded = np.pad(latents.double().numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
    height, width = latents.shape[2:]
    cut = [
        np.append(image[:, y : y + 3, x : x + 3].ravel(), 1.0) for image in padded
        for y in range(height) for x in range(width)
    ]  # fmt: skip
    return np.array(cut)


@settings(max_examples=15, deadline=None)
@given(
    patch=st.integers(1, 4),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    kept=st.integers(1, 4),
    noise=st.floats(0.05, 1),
    seed=st.integers(0, 99),
)
def test_weights_are_those_of_least_squares(
    patch: int, shape: tuple[int, int], kept: int, noise: float, seed: int
) -> None:
    """Noise of each latent is as one more row of its own, with nothing to tell."""
    torch.manual_seed(seed)
    images = torch.randn(30, 2, shape[0] * patch, shape[1] * patch)
    basis = torch.linalg.qr(torch.randn(2 * patch**2, 2 * patch**2))[0][: min(kept, 2 * patch**2)]
    model = fitted(images, basis, patch, noise)
    latents = encoded(images, basis, patch)
    known = rows_around(latents)
    wanted = F.pixel_unshuffle(images, patch).movedim(1, -1).flatten(0, -2).double().numpy()
    deviations = latents.double().std((0, 2, 3)).numpy().repeat(9) * noise * np.sqrt(len(known))
    more = np.append(np.diag(deviations), np.zeros((len(deviations), 1)), 1)
    expected = np.linalg.lstsq(np.concatenate([known, more]), np.pad(wanted, ((0, len(more)), (0, 0))), rcond=None)[0]
    np.testing.assert_allclose(model.weight.flatten(1).T, expected[:-1], atol=1e-4)
    np.testing.assert_allclose(model.bias, expected[-1], atol=1e-4)
    decoded = F.pixel_unshuffle(model(latents), patch).movedim(1, -1).flatten(0, -2)
    np.testing.assert_allclose(decoded, known @ expected, atol=1e-3)
    assert model(latents[:0]).shape == (0, *images.shape[1:])


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_errors_are_smaller_than_of_components_alone(noise: float) -> None:
    """On other images, of noisy latents; and less of an edge is left where patches meet."""
    patch = 4
    images, others = smooth(400, 16, seed=0), smooth(100, 16, seed=1)
    basis = components(images, patch, 4)
    model = fitted(images, basis, patch, noise)
    latents = encoded(others, basis, patch)
    latents = latents + noise * latents.std((0, 2, 3), keepdim=True) * torch.randn(
        latents.shape, generator=torch.Generator().manual_seed(2)
    )
    alone = F.pixel_shuffle(torch.einsum("dp,ndhw->nphw", basis, latents), patch)
    found = model(latents)
    assert (found - others).square().mean() < 0.8 * (alone - others).square().mean()
    assert edges(found, patch) < 0.6 * edges(alone, patch)


def edges(images: Tensor, patch: int) -> float:
    """How much more neighbouring columns differ at borders of patches than elsewhere."""
    steps = (images[..., 1:] - images[..., :-1]).square().mean((0, 1, 2))
    border = torch.arange(1, images.shape[-1]) % patch == 0
    return float(steps[border].mean() - steps[~border].mean())


@pytest.mark.parametrize("side", [2, 8])
def test_what_never_changes_is_decoded_as_it_is(side: int) -> None:
    """And noise as large as public statistics allow it changes nothing."""
    images = torch.linspace(-1, 1, 4).view(1, 1, 2, 2).repeat(30, 1, side // 2, side // 2)
    model = PatchDecoder(4, 4, 2)
    latents = F.pixel_unshuffle(images, 2)
    model.fit(model.products(latents, images), torch.full((4,), 1e-6), 0.15)
    noisy = latents + 1e-6 * torch.randn(latents.shape)
    torch.testing.assert_close(model(noisy), images, atol=1e-4, rtol=0)


def test_little_noise_leaves_what_is_certain() -> None:
    """With all components there is nothing to estimate."""
    images = smooth(50, 8, seed=3)
    basis = components(images, 2, 4)
    model = fitted(images, basis, 2, noise=1e-4)
    torch.testing.assert_close(model(encoded(images, basis, 2)), images, atol=1e-3, rtol=0)
