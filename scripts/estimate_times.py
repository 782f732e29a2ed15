"""How long the presets with the papers' sizes would take on one GPU: an estimate, from a count of operations.

The floating-point operations of one forward pass are counted on networks without memory (the meta device). A training
step of a public network takes three times as many (forward, and backward by activations and by weights). A private one
takes four: per-example norms and the clipped sum each need the weights' part of the backward pass. What else it does
(random draws, noise, optimiser, data) is left out. The time follows from an assumed share of the GPU's peak.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from rapid.config.sections import DpSgdSettings, MethodSettings
from rapid.files import replacing
from rapid.methods import load_settings
from rapid.methods.dp_classifier.settings import DpClassifierSettings
from rapid.methods.dp_diffusion.networks import build_denoiser
from rapid.methods.dp_diffusion.settings import DpDiffusionSettings
from rapid.methods.dp_gan.private_stage import TYPICAL_STEPS, build_discriminator, build_generator
from rapid.methods.dp_gan.settings import DpGanSettings
from rapid.methods.dpdm.private_stage import new_denoiser
from rapid.methods.dpdm.settings import DpdmSettings
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.nn.wide_resnet import WideResNet

PRESETS = {
    "emnist-mnist": 10,
    "imagenet32-cifar10": 10,
    "ffhq32-celeba32": 0,
    "ffhq64-celeba64": 0,
    "dpdm-mnist": 10,
    "dpdm-celeba32": 0,
    "dpdm-cifar10": 10,
    "dpdm-imagenet32": 1000,
    "dp-gan-mnist": 10,
    "dp-gan-celeba32": 2,
    "dp-diffusion-mnist": 10,
    "dp-diffusion-cifar10": 10,
    "classifier-cifar10": 10,
}
"""With the number of classes of the private images."""
PUBLIC, PRIVATE = 3, 4
"""Operations of a training step over those of a forward pass."""
PEAKS = {"bf16": 989.0, "tf32": 494.0}
"""Peak of an H200, dense, in 10^12 operations a second, by its data sheet."""


@dataclass(frozen=True)
class Work:
    """Operations of a preset.

    Attributes:
        parameters: of the network that is trained privately.
        forward: of that network and one image.
        public: of the public stage.
        private: of the private stage.
    """

    parameters: int
    forward: float
    public: float
    private: float


def operations(network: Callable[..., Any], *inputs: Tensor) -> float:
    """Floating-point operations of a call, counting a multiplication and an addition as two."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(*inputs)
    return float(counter.get_total_flops())


def work_of(settings: MethodSettings, classes: int) -> Work:
    """Count the operations of a preset.

    Args:
        settings: of the preset.
        classes: of the private images.

    Raises:
        TypeError: a method that is not known here.
    """
    own = settings.private
    assert isinstance(own, DpSgdSettings)
    gradients = own.expected_batch * own.steps * own.multiplicity
    with torch.device("meta"):
        if isinstance(settings, RapidSettings):
            return _rapid(settings, classes, gradients)
        image = torch.empty(1, settings.image.channels, settings.image.size, settings.image.size)
        label, level = torch.zeros(1, dtype=torch.int64), torch.ones(1)
        public = 0.0
        if isinstance(settings, DpdmSettings):
            denoiser = new_denoiser(settings, classes, "edm")
            forward = operations(denoiser, image, level, label)
            return Work(_size(denoiser), forward, public, PRIVATE * gradients * forward)
        if isinstance(settings, DpGanSettings):
            return _gan(settings, classes, image, label, gradients)
        if isinstance(settings, DpDiffusionSettings):
            network = build_denoiser(settings, classes)
            forward = operations(network, torch.empty(1, *settings.latent_shape), label + 1, label)
            if settings.denoiser.pretrained:
                training = settings.denoiser.training
                public = PUBLIC * training.steps * training.batch_size * forward
            return Work(_size(network), forward, public, PRIVATE * gradients * forward)
        if isinstance(settings, DpClassifierSettings):
            classifier = WideResNet.build(settings.image, settings.network, [str(n) for n in range(classes)])
            forward = operations(classifier, image)
            training = settings.warmup.training
            # sharpness-aware steps take two passes
            passes = 2 if settings.warmup.rho else 1
            public = passes * PUBLIC * training.steps * training.batch_size * forward
            return Work(_size(classifier), forward, public, PRIVATE * gradients * forward)
    raise TypeError(settings.method)


def _rapid(settings: RapidSettings, classes: int, gradients: int) -> Work:
    image = torch.empty(1, settings.image.channels, settings.image.size, settings.image.size)
    label, latent = torch.zeros(1, dtype=torch.int64), torch.empty(1, *settings.latent_shape)
    denoiser = Denoiser.build(settings, classes)
    forward = operations(denoiser, latent, label + 1, label)
    autoencoder, encoder = Autoencoder.build(settings), TrajectoryEncoder.build(settings)
    to_latent, to_image = operations(autoencoder.encode_raw, image), operations(autoencoder.decode_raw, latent)
    to_key = operations(encoder, latent)
    trained = {
        settings.autoencoder.training: PUBLIC * (to_latent + to_image),
        settings.denoiser.training: PUBLIC * forward,
        # two views of each image
        settings.encoder.training: 2 * (to_latent + forward + PUBLIC * to_key),
    }
    public = sum(training.steps * training.batch_size * each for training, each in trained.items())
    # each draw has a query, too
    return Work(_size(denoiser), forward, public, gradients * ((PRIVATE + 1) * forward + to_key))


def _gan(settings: DpGanSettings, classes: int, image: Tensor, label: Tensor, gradients: int) -> Work:
    discriminator, generator = build_discriminator(settings, classes), build_generator(settings, classes)
    latent = torch.empty(1, settings.generator.latent)
    forward, made = operations(discriminator, image, label), operations(generator, latent, label)
    every = settings.private.discriminator_steps or TYPICAL_STEPS
    # real images, as many fakes, and now and then a generator step
    step = 2 * PRIVATE * forward + made + PUBLIC * (forward + made) / every
    return Work(_size(discriminator), forward, 0.0, gradients * step)


def _size(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def table(share: float) -> str:
    """Markdown: the presets, their operations, and the hours at a share of the peaks."""
    columns = ["preset", "parameters", "GFLOP a forward pass", "FLOP public", "FLOP private"]
    columns += [f"hours, {name}" for name in PEAKS]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for name, classes in PRESETS.items():
        work = work_of(load_settings(name), classes)
        total = work.public + work.private
        cells = [f"`{name}`", f"{work.parameters / 1e6:.2f} M", f"{work.forward / 1e9:.3g}"]
        cells += [f"{amount:.2g}" if amount else "none" for amount in (work.public, work.private)]
        cells += [f"{total / (share * peak * 1e12) / 3600:.2g}" for peak in PEAKS.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Print the table, or write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--share", type=float, default=0.4, help="of the peak that is assumed; default: 0.4")
    parser.add_argument("--out", type=Path, help="file for the table; default: it is printed alone")
    options = parser.parse_args()
    if not 0 < options.share <= 1:
        parser.error(f"--share {options.share}: must lie in (0, 1]")
    found = table(options.share)
    print(found, end="")
    if options.out is not None:
        with replacing(options.out) as target:
            target.write_text(found, encoding="utf-8")


if __name__ == "__main__":
    main()
