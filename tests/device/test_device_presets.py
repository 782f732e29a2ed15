"""The networks of every preset at full size, on the meta device: shapes of a forward and a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rapid.config.presets import preset_names
from rapid.diffusion import Schedule
from rapid.diffusion.losses import info_nce, noise_prediction_loss
from rapid.methods import load_settings
from rapid.methods.dp_classifier.settings import DpClassifierSettings
from rapid.methods.dp_diffusion.networks import build_denoiser, build_schedule
from rapid.methods.dp_diffusion.settings import DpDiffusionSettings
from rapid.methods.dp_gan.fakes import loss_of_fakes
from rapid.methods.dp_gan.private_stage import build_discriminator, build_generator
from rapid.methods.dp_gan.settings import DpGanSettings
from rapid.methods.dpdm.private_stage import new_denoiser
from rapid.methods.dpdm.settings import DpdmSettings
from rapid.methods.rapid.objectives import trained_timesteps
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.nn.wide_resnet import WideResNet
from rapid.probe.network import Probe

META = torch.device("meta")
BATCH, CLASSES = 2, 10


def images_of(settings: Any) -> Tensor:
    return torch.empty(BATCH, settings.image.channels, settings.image.size, settings.image.size, device=META)


def labels() -> Tensor:
    return torch.zeros(BATCH, dtype=torch.int64, device=META)


def check(losses: Tensor, *networks: nn.Module) -> None:
    """One loss for each row, from which each trained parameter gets a gradient of its shape."""
    assert losses.shape == (BATCH,)
    parameters = [p for network in networks for p in network.parameters() if p.requires_grad]
    for parameter, gradient in zip(parameters, torch.autograd.grad(losses.sum(), parameters), strict=True):
        assert gradient.shape == parameter.shape


def rapid(settings: RapidSettings) -> None:
    autoencoder, denoiser = Autoencoder.build(settings), Denoiser.build(settings, CLASSES)
    encoder, probe = TrajectoryEncoder.build(settings), Probe.build(settings.image, settings.probe, CLASSES)
    x = images_of(settings)
    latents = autoencoder.encode(x)
    assert latents.shape == (BATCH, *settings.latent_shape)
    assert autoencoder.decode(latents).shape == x.shape
    if autoencoder.vae is not None:
        mean, logvar = autoencoder.posterior(x)
        check((autoencoder.decode_raw(mean) - x).square().flatten(1).mean(1) + logvar.flatten(1).mean(1), autoencoder)
    schedule = Schedule.build(settings.schedule)
    t = torch.full((BATCH,), trained_timesteps(settings), device=META)
    check(noise_prediction_loss(denoiser, schedule, latents, labels(), t, torch.empty_like(latents)), denoiser)
    features = encoder(latents)
    assert features.shape == (BATCH, settings.encoder.features)
    check(info_nce(features, features, 0.1).expand(BATCH), encoder)
    assert probe.features(x).shape == (BATCH, probe.prototypes.shape[1])


def dp_diffusion(settings: DpDiffusionSettings) -> None:
    denoiser = build_denoiser(settings, CLASSES)
    x = torch.empty(BATCH, *settings.latent_shape, device=META)
    schedule = build_schedule(settings.schedule)
    check(noise_prediction_loss(denoiser, schedule, x, labels(), labels() + 1, torch.empty_like(x)), denoiser)


def dpdm(settings: DpdmSettings) -> None:
    denoiser, x = new_denoiser(settings, CLASSES, "edm"), images_of(settings)
    found = denoiser(x, torch.empty(BATCH, device=META), labels())
    assert found.shape == x.shape
    check(found.flatten(1).mean(1), denoiser)


def dp_gan(settings: DpGanSettings) -> None:
    discriminator, generator = build_discriminator(settings, CLASSES), build_generator(settings, CLASSES)
    fakes = generator(torch.empty(BATCH, settings.generator.latent, device=META), labels())
    assert fakes.shape == images_of(settings).shape
    check(loss_of_fakes(discriminator, fakes, labels()), discriminator, generator)


def dp_classifier(settings: DpClassifierSettings) -> None:
    network = WideResNet.build(settings.image, settings.network, [str(number) for number in range(CLASSES)])
    logits = network(images_of(settings))
    assert logits.shape == (BATCH, CLASSES)
    check(logits.sum(1), network)


CHECKS: dict[str, Callable[[Any], None]] = {
    "rapid": rapid,
    "dp-diffusion": dp_diffusion,
    "dpdm": dpdm,
    "dp-gan": dp_gan,
    "dp-classifier": dp_classifier,
}


def distinct() -> list[str]:
    """One preset for each set of networks: some differ in their private stage alone."""
    others = {"preset", "private", "generation", "views", "warmup"}
    return list({load_settings(name).model_dump_json(exclude=others): name for name in preset_names()}.values())


@pytest.mark.parametrize("preset", distinct())
def test_a_preset_computes_at_full_size(preset: str) -> None:
    settings = load_settings(preset)
    with torch.device("meta"):
        CHECKS[settings.method](settings)
