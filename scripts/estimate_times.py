"""How long the presets with the papers' sizes would take on one GPU: an estimate, from a count of operations.

The floating-point operations of one forward pass are counted on networks without memory (the meta device). A training
step takes three times as many: forward, and backward by activations and by weights. So does a private one, whose
backward pass by weights is by example (a tenth more where ghosts are cheaper, see `rapid.dp.gradients.forms`). Passes
have the precision of the stage; the part of the weights in private steps is always in float32 without shorter products
(see `rapid.precision`). What else a stage does (random draws, noise, optimiser, data, probe, knowledge base, access to
memory, starting kernels) is left out. The time follows from an assumed share of the GPU's peak. Nothing was measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from rapid.config.sections import DpSgdSettings, MethodSettings, Training
from rapid.files import replacing
from rapid.methods import load_settings
from rapid.methods.dp_classifier.settings import DpClassifierSettings
from rapid.methods.dp_diffusion.networks import build_denoiser
from rapid.methods.dp_diffusion.settings import DpDiffusionSettings
from rapid.methods.dp_gan.private_stage import TYPICAL_STEPS, build_discriminator, build_generator
from rapid.methods.dp_gan.settings import DpGanSettings
from rapid.methods.dpdm.private_stage import new_denoiser
from rapid.methods.dpdm.settings import DpdmSettings
from rapid.methods.rapid.objectives import uses_retrieval
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.nn.wide_resnet import WideResNet

BFLOAT16 = "--set private.precision=bfloat16"
PUBLIC, PASSES, WEIGHTS = 3, 2, 1
"""Operations over those of a forward pass: of a public step, of a private step's passes, of its gradients."""


class Images(NamedTuple):
    """The images of a preset.

    Attributes:
        classes: number of classes; 0 without labels.
        private: what stands for them in the command; empty if there is no private stage.
        public: the same for public images; empty if there is no public stage.
        epsilon: of the paper, or of its noise multiplier by rapid's accounting.
        delta: of the paper.
    """

    classes: int
    private: str
    public: str = ""
    epsilon: float = 10
    delta: str = "1e-5"


PRESETS = {
    "emnist-mnist": Images(10, "MNIST", "EMNIST"),
    "imagenet32-cifar10": Images(10, "CIFAR10", "IMAGENET32"),
    "ffhq32-celeba32": Images(0, "CELEBA", "FFHQ", delta="1e-6"),
    "ffhq64-celeba64": Images(0, "CELEBA", "FFHQ", delta="1e-6"),
    "dpdm-mnist": Images(10, "MNIST"),
    "dpdm-fashion-mnist": Images(10, "FASHION-MNIST"),
    "dpdm-celeba32": Images(0, "CELEBA", delta="1e-6"),
    "dpdm-celeba64": Images(0, "CELEBA", delta="1e-6"),
    "dpdm-cifar10": Images(10, "CIFAR10"),
    "dpdm-imagenet32": Images(1000, "IMAGENET32", delta="7e-7"),
    "dp-gan-mnist": Images(10, "MNIST", epsilon=9.32),
    "dp-gan-mnist-epsilon1": Images(10, "MNIST", epsilon=0.921),
    "dp-gan-mnist-fixed128": Images(10, "MNIST", epsilon=9.29),
    "dp-gan-mnist-fixed2048": Images(10, "MNIST", epsilon=9.28),
    "dp-gan-celeba32": Images(2, "CELEBA", epsilon=9.39, delta="1e-6"),
    "dp-diffusion-mnist": Images(10, "MNIST"),
    "dp-diffusion-cifar10": Images(10, "CIFAR10", "IMAGENET32"),
    "dp-diffusion-camelyon17": Images(2, "CAMELYON17", "IMAGENET32", delta="3e-6"),
    "edm-cifar10": Images(10, "", "FEW"),
    "classifier-cifar10": Images(10, "CIFAR10", "SYNTHETIC", epsilon=2),
    "classifier-cifar100": Images(100, "CIFAR100", "SYNTHETIC"),
}


@dataclass(frozen=True)
class Count:
    """Floating-point operations, a multiplication and an addition being two.

    Attributes:
        convolutions: of convolutions.
        products: of matrix products.
    """

    convolutions: float = 0.0
    products: float = 0.0

    def __add__(self, other: Count) -> Count:
        return Count(self.convolutions + other.convolutions, self.products + other.products)

    def __rmul__(self, factor: float) -> Count:
        return Count(factor * self.convolutions, factor * self.products)

    @property
    def total(self) -> float:
        """Both."""
        return self.convolutions + self.products

    def hours(self, peak: Count, share: float) -> float:
        """The time at a share of a peak, which is in 10^12 operations a second."""
        return (self.convolutions / peak.convolutions + self.products / peak.products) / (share * 1e12 * 3600)


PEAKS = {"bfloat16": Count(989, 989), "float32": Count(494, 67), "exact": Count(67, 67)}
"""Peaks of an H200, dense, in 10^12 operations a second, by its data sheet; torch's float32 has TF32 convolutions,
private stages have none."""


@dataclass(frozen=True)
class Work:
    """Operations of a preset.

    Attributes:
        parameters: of the network that is trained last.
        forward: of that network and one image.
        public: of the public stage, in bfloat16 on a GPU.
        exact: those of the public stage that are in float32 whatever the settings say.
        passes: of the private stage, forward and backward, in `private.precision`.
        weights: of the gradients by example of the private stage.
    """

    parameters: int
    forward: Count
    public: Count = field(default=Count())
    exact: Count = field(default=Count())
    passes: Count = field(default=Count())
    weights: Count = field(default=Count())

    def public_hours(self, share: float) -> float:
        """Hours of the public stage."""
        return self.public.hours(PEAKS["bfloat16"], share) + self.exact.hours(PEAKS["float32"], share)

    def private_hours(self, precision: str, share: float) -> float:
        """Hours of the private stage; `precision` is a value of `private.precision`."""
        peak = PEAKS["exact" if precision == "float32" else precision]
        return self.passes.hours(peak, share) + self.weights.hours(PEAKS["exact"], share)


def operations(network: Callable[..., Any], *inputs: Tensor) -> Count:
    """Count the operations of a call."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(*inputs)
    found = Count()
    for name, amount in counter.get_flop_counts()["Global"].items():
        found += Count(amount) if "convolution" in str(name) else Count(products=amount)
    return found


def work_of(settings: MethodSettings, images: Images) -> Work:
    """Count the operations of a preset.

    Args:
        settings: of the preset.
        images: of the preset.

    Raises:
        TypeError: a method that is not known here.
    """
    own = settings.private
    assert isinstance(own, DpSgdSettings)
    gradients = own.expected_batch * own.steps * own.multiplicity if images.private else 0
    classes = images.classes
    with torch.device("meta"):
        if isinstance(settings, RapidSettings):
            return _rapid(settings, classes, gradients)
        image = torch.empty(1, settings.image.channels, settings.image.size, settings.image.size)
        label, level = torch.zeros(1, dtype=torch.int64), torch.ones(1)
        if isinstance(settings, DpdmSettings):
            edm = new_denoiser(settings, classes, "edm")
            forward = operations(edm, image, level, label)
            # private training does not start from what the public stage trains
            public = _trained(settings.public.training, forward) if images.public else Count()
            return _private(edm, forward, gradients, public)
        if isinstance(settings, DpGanSettings):
            return _gan(settings, classes, image, label, gradients)
        if isinstance(settings, DpDiffusionSettings):
            denoiser = build_denoiser(settings, classes)
            forward = operations(denoiser, torch.empty(1, *settings.latent_shape), label + 1, label)
            public = _trained(settings.denoiser.training, forward) if settings.denoiser.pretrained else Count()
            return _private(denoiser, forward, gradients, public)
        if isinstance(settings, DpClassifierSettings):
            classifier = WideResNet.build(settings.image, settings.network, [str(n) for n in range(classes)])
            forward = operations(classifier, image)
            # sharpness-aware steps take two passes
            passes = 2 if settings.warmup.rho else 1
            return _private(classifier, forward, gradients, passes * _trained(settings.warmup.training, forward))
    raise TypeError(settings.method)


def _private(network: torch.nn.Module, forward: Count, gradients: int, public: Count = Count()) -> Work:
    """DP-SGD of a network, after a public stage."""
    passes, weights = gradients * PASSES * forward, gradients * WEIGHTS * forward
    return Work(_size(network), forward, public, passes=passes, weights=weights)


def _trained(training: Training, forward: Count) -> Count:
    """Training of a public network."""
    return training.steps * training.batch_size * PUBLIC * forward


def _rapid(settings: RapidSettings, classes: int, gradients: int) -> Work:
    image = torch.empty(1, settings.image.channels, settings.image.size, settings.image.size)
    label, latent = torch.zeros(1, dtype=torch.int64), torch.empty(1, *settings.latent_shape)
    denoiser = Denoiser.build(settings, classes)
    forward = operations(denoiser, latent, label + 1, label)
    autoencoder, encoder = Autoencoder.build(settings), TrajectoryEncoder.build(settings)
    to_latent, to_image = operations(autoencoder.encode_raw, image), operations(autoencoder.decode_raw, latent)
    to_key = operations(encoder, latent)
    keys = settings.encoder.training if settings.retrieval.enabled else None
    return Work(
        _size(denoiser),
        forward,
        _trained(settings.autoencoder.training, to_latent + to_image) + _trained(settings.denoiser.training, forward),
        # two views of each image
        exact=keys.steps * keys.batch_size * 2 * (to_latent + forward + PUBLIC * to_key) if keys else Count(),
        # each draw has a query, too
        passes=gradients * (PASSES * forward + (forward + to_key if uses_retrieval(settings) else Count())),
        weights=gradients * WEIGHTS * forward,
    )


def _gan(settings: DpGanSettings, classes: int, image: Tensor, label: Tensor, gradients: int) -> Work:
    discriminator, generator = build_discriminator(settings, classes), build_generator(settings, classes)
    latent = torch.empty(1, settings.generator.latent)
    forward, made = operations(discriminator, image, label), operations(generator, latent, label)
    every = settings.private.discriminator_steps or TYPICAL_STEPS
    # real images, as many fakes, and now and then a generator step
    passes = 2 * PASSES * forward + made + PUBLIC / every * (forward + made)
    weights = 2 * WEIGHTS * forward
    return Work(_size(discriminator), forward, passes=gradients * passes, weights=gradients * weights)


def _size(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def command(name: str) -> str:
    """The commands that train a preset, for the shell."""
    images = PRESETS[name]
    parts = []
    if images.public:
        parts.append(f"rapid build-kb --preset {name} --public {images.public} --out base")
    if images.private:
        start = "--base base" if images.public else f"--preset {name}"
        labels = "" if images.classes else " --label-column none"
        budget = f"--epsilon {images.epsilon:g} --delta {images.delta}"
        parts.append(f"rapid train-private {start} --private {images.private}{labels} {budget} --out m")
    return " && ".join(parts)


def table(share: float) -> str:
    """Markdown: the presets, their operations, the hours at a share of the peaks, and the commands."""
    columns = ["preset", "parameters", "GFLOP a forward pass", "FLOP public", "FLOP private", "private steps"]
    columns += ["hours public (bfloat16)", "hours private (float32, the default)", f"hours private (`{BFLOAT16}`)"]
    columns.append("command")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for name, images in PRESETS.items():
        settings = load_settings(name)
        assert isinstance(settings.private, DpSgdSettings)
        work = work_of(settings, images)
        totals = work.public.total + work.exact.total, work.passes.total + work.weights.total
        hours = [work.public_hours(share), *(work.private_hours(each, share) for each in ("float32", "bfloat16"))]
        cells = [f"`{name}`", f"{work.parameters / 1e6:.2f} M", f"{work.forward.total / 1e9:.3g}"]
        cells += [f"{amount:.1e}".replace("e+", "e") if amount else "none" for amount in totals]
        cells.append(f"{settings.private.steps:,}" if images.private else "none")
        cells += [_shown(amount) for amount in hours]
        lines.append(f"| {' | '.join([*cells, f'`{command(name)}`'])} |")
    return "\n".join([*lines, ""])


def _shown(hours: float) -> str:
    if not hours:
        return "none"
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


def main() -> None:
    """Print the table, or write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--share", type=float, default=0.4, help="of the peak that is assumed; default: 0.4")
    parser.add_argument("--out", type=Path, help="file for the table; default: it is printed alone")
    options = parser.parse_args()
    if not 0 < options.share <= 1:
        parser.error(f"--share {options.share}: must lie in (0, 1]")
    if options.out is not None and options.out.is_dir():
        parser.error(f"--out {options.out}: is a folder; give the name of a file")
    found = table(options.share)
    print(found, end="")
    if options.out is not None:
        with replacing(options.out) as target:
            target.write_text(found, encoding="utf-8")


if __name__ == "__main__":
    main()
