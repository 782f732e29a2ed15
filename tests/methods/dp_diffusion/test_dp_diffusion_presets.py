"""The presets with the paper's sizes against Table 3 of the paper, written out."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_processor import Attention

from rapid.config.presets import preset_names
from rapid.methods import find_method, load_settings
from rapid.methods.dp_diffusion.networks import build_denoiser
from rapid.methods.dp_diffusion.private_stage import trained_parameters
from rapid.methods.dp_diffusion.settings import DpDiffusionSettings, MixtureSettings

# pixels, parameters, channels, residual blocks, multipliers, sides with attention
NETWORKS = {
    "dp-diffusion-mnist": (28, 4.2e6, 64, 1, (1, 2, 2), set()),  # it has no side of 16 pixels
    "dp-diffusion-cifar10": (32, 80.4e6, 192, 2, (1, 2, 2, 2), {16}),
    "dp-diffusion-camelyon17": (32, 80.4e6, 192, 2, (1, 2, 2, 2), {16}),
}
# iterations, batch, multiplicity, clip norm, learning rate, EMA
PRIVATE = {
    "dp-diffusion-mnist": (4000, 4096, 128, 1e-3, 5e-4, 0.9999),
    "dp-diffusion-cifar10": (200, 16384, 128, 1e-3, 1e-3, 0.9999),
    "dp-diffusion-camelyon17": (200, 16384, 128, 1e-3, 1e-3, 0.9999),
}
MIXTURES = {
    "dp-diffusion-mnist": ((0.05, 0.9, 0.05), (0, 200, 800, 1000)),
    "dp-diffusion-cifar10": ((0.015, 0.785, 0.2), (0, 30, 600, 1000)),
    "dp-diffusion-camelyon17": ((0.015, 0.785, 0.2), (0, 30, 600, 1000)),
}
IMAGENET32 = ((0.03, 0.77, 0.2), (0, 30, 800, 1000))
HEAD_CHANNELS = 64


def preset(name: str) -> DpDiffusionSettings:
    found = load_settings(name)
    assert isinstance(found, DpDiffusionSettings)
    return found


def parts(mixture: MixtureSettings) -> tuple[tuple[float, ...], tuple[int, ...]]:
    return mixture.weights, mixture.breaks


def test_presets_of_the_method_are_listed() -> None:
    names = [name for name in preset_names() if load_settings(name).method == "dp-diffusion"]
    assert names == ["dp-diffusion", *sorted(NETWORKS)]
    assert find_method("dp-diffusion").name == "dp-diffusion"


@pytest.mark.parametrize("name", NETWORKS)
def test_the_network_is_that_of_the_paper(name: str) -> None:
    found = preset(name)
    pixels, parameters, channels, blocks, multipliers, attention = NETWORKS[name]
    own = found.denoiser
    assert (found.image.size, own.patch, own.channels, own.blocks) == (pixels, 1, channels, blocks)
    assert own.multipliers == multipliers
    assert {pixels >> level for level, has in enumerate(own.attention) if has} == attention
    assert trained_parameters(found, 10) == pytest.approx(parameters, rel=0.01)
    with torch.device("meta"):
        network = build_denoiser(found, 10)
    layers = [module for module in network.modules() if isinstance(module, Attention)]
    assert bool(layers) == bool(attention)
    assert all(layer.to_q.out_features == layer.heads * HEAD_CHANNELS for layer in layers)


@pytest.mark.parametrize("name", PRIVATE)
def test_the_private_stage_is_that_of_the_paper(name: str) -> None:
    own = preset(name).private
    numbers = (own.steps, own.expected_batch, own.multiplicity, own.clip_norm, own.learning_rate, own.ema_decay)
    assert numbers == PRIVATE[name]
    assert parts(own.timesteps) == MIXTURES[name]
    assert own.learning_rate_schedule == "constant"
    # MNIST has timesteps alone; crop and flip for the others
    assert (own.views.shift > 0, own.views.flip) == ((False, False) if name == "dp-diffusion-mnist" else (True, True))
    assert (own.views.rotate, own.views.scale, own.views.cutout) == (0, 0, 0)


@pytest.mark.parametrize("name", ["dp-diffusion-cifar10", "dp-diffusion-camelyon17"])
def test_the_public_stage_is_that_of_the_paper(name: str) -> None:
    """Table 3, ImageNet32: iterations, batch, linear rise of the learning rate, EMA."""
    found = preset(name)
    training = found.denoiser.training
    numbers = (training.steps, training.batch_size, training.warmup_steps, training.ema_decay)
    assert numbers == (200_000, 1024, 5000, 0.9999)
    assert parts(found.timesteps) == IMAGENET32
    assert found.denoiser.pretrained


def test_digits_are_trained_from_scratch() -> None:
    assert not preset("dp-diffusion-mnist").denoiser.pretrained
