"""Settings of public stages, and of work at no privacy cost, reach the trainings: what they change, in small runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rapid.data import ImageSet
from rapid.data.augmented import AugmentedImages
from rapid.methods import apply_overrides
from rapid.methods.base import PublicImages
from rapid.methods.dp_classifier.public_stage import WarmUpRecipe
from rapid.methods.dp_classifier.public_stage import warm_up as warm_up_classifier
from rapid.methods.dp_classifier.settings import DpClassifierSettings
from rapid.methods.rapid.class_moments import ClassMoments
from rapid.methods.rapid.networks import AutoencoderRecipe, train_autoencoder
from rapid.methods.rapid.settings import RapidSettings
from rapid.methods.rapid.warmup import warm_up as warm_up_denoiser
from rapid.nn import Denoiser
from rapid.training import Checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def images() -> ImageSet:
    rng = np.random.default_rng(0)
    return ImageSet(rng.integers(0, 256, (32, 16, 16), np.uint8), np.arange(32) % 2, ("a", "b"), "-")


def one_step(folder: Path, public: ImageSet, decay: float) -> dict[str, Tensor]:
    """Weights of a classifier after one step of gradient descent."""
    own = apply_overrides({"method": "dp-classifier"}, [
        "image.size=16", "network.depth=10", "network.groups=4", f"warmup.weight_decay={decay}", "warmup.rho=0",
        "warmup.training={steps: 1, batch_size: 8, learning_rate: 0.1, warmup_steps: 0}",
    ])  # fmt: skip
    assert isinstance(own, DpClassifierSettings)
    recipe = WarmUpRecipe(images="", image=own.image, network=own.network, warmup=own.warmup)
    pooled = PublicImages(public, np.zeros(len(public), np.int64))
    assert public.labels is not None
    made = warm_up_classifier(recipe, pooled, public.labels, public.classes, CPU, Checkpoint(folder / f"{decay}.pt"))
    return {name: parameter.detach() for name, parameter in made.named_parameters()}


def test_weight_decay_of_a_warm_up(images: ImageSet, tmp_path: Path) -> None:
    """A step of gradient descent differs by decay times the weights before it, which are those after it to 1 %."""
    plain, decayed = one_step(tmp_path, images, 0.0), one_step(tmp_path, images, 0.4)
    for name, weight in plain.items():
        if weight.ndim > 1:
            factor = (decayed[name] / weight).median().item()
            assert 0.9 < factor < 0.99, name


def divergence(folder: Path, public: ImageSet, weight: float) -> float:
    """From N(0, I), of the latents that an autoencoder gives images after some steps."""
    own = apply_overrides({"method": "rapid"}, [
        "image.size=16", f"autoencoder.kl_weight={weight}", "autoencoder.channels=8", "autoencoder.multipliers=[1, 2]",
        "autoencoder.training={steps: 40, batch_size: 16, learning_rate: 0.01, warmup_steps: 0}",
        "denoiser.multipliers=[1]", "denoiser.attention=[false]",
    ])  # fmt: skip
    assert isinstance(own, RapidSettings)
    assert public.labels is not None
    recipe = AutoencoderRecipe(
        images="", image=own.image, views=0, augment=own.augmentations.augment, autoencoder=own.autoencoder
    )
    views = AugmentedImages(public.images, public.labels, 0, own.augmentations.augment, CPU)
    model = train_autoencoder(recipe, views, CPU, Checkpoint(folder / f"{weight}.pt"))
    with torch.no_grad():
        mean, logvar = model.posterior(views.draw(16, torch.Generator().manual_seed(0)))
    return float(0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean())


def test_the_divergence_of_an_autoencoder_is_weighted(images: ImageSet, tmp_path: Path) -> None:
    assert divergence(tmp_path, images, 10.0) < 0.1 * divergence(tmp_path, images, 0.0)


def test_the_warm_up_on_moments_leaves_low_timesteps_out(tmp_path: Path) -> None:
    own = apply_overrides({"method": "rapid"}, [
        "private.objective=late", "private.start=700", "private.moments.warmup_from=650",
        "private.moments.warmup.steps=20", "private.moments.warmup.batch_size=32",
    ])  # fmt: skip
    assert isinstance(own, RapidSettings)
    denoiser, seen = Denoiser.build(own, 2), list[Tensor]()
    denoiser.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    shape, size = list(own.latent_shape), int(np.prod(own.latent_shape))
    moments = ClassMoments({"shape": shape, "dimensions": 3, "classes": 2, "covariances": 1})
    with torch.no_grad():
        moments.basis.copy_(nn.init.orthogonal_(torch.empty(3, size)))
    warm_up_denoiser(denoiser, moments, own, Checkpoint(tmp_path / "state.pt"))
    steps = torch.cat(seen)
    assert (steps.min(), steps.max()) == (650, 700)
