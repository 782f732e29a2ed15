"""Public latents moved to the moments of private classes, and the warm-up on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from torch import Tensor

from rapid.bundle import Bundle
from rapid.data.private import PrivateImages
from rapid.errors import InputError
from rapid.methods import apply_overrides
from rapid.methods.rapid.class_moments import ClassMoments
from rapid.methods.rapid.settings import RapidSettings
from rapid.methods.rapid.subspace import Subspace
from rapid.methods.rapid.transport import MovedLatents
from rapid.stages.private import train_private_bundle
from rapid.stages.public import build_public_bundle

CPU = torch.device("cpu")
SHAPE, D = (2, 3, 3), 5


def public_latents(count: int) -> Tensor:
    """Not Gaussian, with covariances and a mean."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(18, 18, generator=generator) * torch.logspace(0, -1.5, 18)
    return (torch.rand(count, 18, generator=generator).pow(3) @ mixing.T + 0.3).view(-1, *SHAPE)


def moments_of(space: Subspace, classes: int, covariances: int, rank: int = D) -> ClassMoments:
    made = ClassMoments({**space.config, "classes": classes, "covariances": covariances})
    generator = torch.Generator().manual_seed(2)
    made.basis.copy_(space.basis)
    made.means.normal_(generator=generator)
    made.factors[:, :, :rank].normal_(generator=generator)
    made.rest.copy_(torch.tensor([0.5, 2.0]))
    return made


def space_of(latents: Tensor, examples: int) -> Subspace:
    made = Subspace({"shape": list(SHAPE), "dimensions": D, "examples": examples})
    made.fit(latents)
    return made


@pytest.mark.parametrize(("covariances", "rank"), [(1, D), (3, D), (3, 2)])
def test_moved_latents_have_the_moments_of_their_class(covariances: int, rank: int) -> None:
    latents = public_latents(3000)
    moments = moments_of(space_of(latents, 0), 3, covariances, rank)
    _, around = moments.split(latents - latents.mean(0))
    moments.rest.copy_(1.5 * around.square().mean((0, 2, 3)).sqrt())
    moved = MovedLatents(moments, latents)
    for label in range(3):
        x = moved.moved(torch.full((3000,), label), torch.arange(3000))
        inside, outside = moments.split(x)
        factor = moments.factors[label if covariances > 1 else 0].double().numpy()
        expected = factor @ factor.T
        assert inside.mean(0).numpy() == pytest.approx(moments.means[label].numpy(), abs=1e-3)
        found = np.cov(inside.double().T.numpy(), bias=True)
        assert found == pytest.approx(expected, abs=2e-3 * float(np.abs(expected).max()))
        assert outside.square().mean((0, 2, 3)).sqrt().numpy() == pytest.approx(moments.rest.numpy(), rel=1e-3)


def test_the_map_is_the_optimal_transport_by_scipy() -> None:
    latents = public_latents(2000)
    moments = moments_of(space_of(latents, 0), 1, 1)
    inside = moments.split(latents)[0].double().numpy()
    public, factor = np.cov(inside.T, bias=True), moments.factors[0].double().numpy()
    root = sqrtm(public).real
    inverse = np.linalg.inv(root)
    expected = inverse @ sqrtm(root @ factor @ factor.T @ root).real @ inverse
    found = moments.split(MovedLatents(moments, latents).moved(None, torch.arange(2000)))[0].double().numpy()
    wanted = (inside - inside.mean(0)) @ expected + moments.means[0].numpy()
    assert found == pytest.approx(wanted, abs=1e-3 * float(np.abs(wanted).max()))


@hypothesis_settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 8), scale=st.sampled_from([0.0, 1e-6, 1.0]), drawn=st.integers(0, 3))
def test_few_or_equal_latents_are_moved_without_infinities(count: int, scale: float, drawn: int) -> None:
    moments = moments_of(space_of(public_latents(50), 0), 2, 2)
    moved = MovedLatents(moments, (public_latents(count) * scale).half())
    labels = torch.arange(drawn) % 2
    x = moved.draw(labels, drawn, torch.Generator().manual_seed(0))
    assert x.shape == (drawn, *SHAPE)
    assert torch.isfinite(x).all()


def test_a_subspace_keeps_public_latents(tmp_path: Path) -> None:
    latents = public_latents(40)
    space = space_of(latents, 30)
    space.save(tmp_path / "subspace")
    kept = Subspace.load(tmp_path / "subspace").examples
    assert kept is not None
    assert torch.equal(kept, latents[:30].half())
    assert space_of(latents, 0).examples is None


def test_warm_up_on_public_latents_needs_a_base_that_keeps_some(
    public_bundle: Path, digits: Path, letters: Path, tiny_settings: RapidSettings, tmp_path: Path
) -> None:
    changes = ["private.objective=late", "private.start=700", "private.moments.share=0.3"]
    changes += ["private.moments.warmup_on=public", "private.moments.warmup.steps=3", "generation.start=500"]
    changes += ["generation.retrieval=moments", "subspace.examples=20"]
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), changes)

    def train(base: Path, out: Path, private: Path = digits) -> Bundle:
        return train_private_bundle(
            base, PrivateImages(private), out, settings, epsilon=5.0, delta=None, device=CPU, resume=False
        )

    with pytest.raises(InputError, match="keeps no latents of public images"):
        # before any private image is read: there is none in the file
        (tmp_path / "empty.npz").touch()
        train(public_bundle, tmp_path / "refused", tmp_path / "empty.npz")
    assert not (tmp_path / "refused").exists()
    base = build_public_bundle([letters], tmp_path / "base", settings, CPU, resume=False)
    examples = base.component("subspace", Subspace).examples
    assert examples is not None
    assert examples.shape[0] == 20
    assert train(base.path, tmp_path / "private").has("moments")
