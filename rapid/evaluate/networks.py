"""The classifiers of the utility protocol: a small CNN, and a ResNet, a WideResNet and a ResNeXt of moderate size.

The three residual networks follow the usual evaluation protocol, scaled down so that training on 60,000 grey images of
32x32 takes minutes on four CPU cores: a first convolution of stride 2, then three stages at 1/2, 1/4 and 1/8 of the
image side. They are trained on synthetic or open images, never with DP-SGD, so batch normalisation is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.runtime import place


class Classifier(nn.Module):
    """A feature extractor and a linear layer.

    Attributes:
        title: name in reports.
        features: maps images, float (N, C, S, S) in [-1, 1], to the penultimate layer, float (N, d).
        head: maps features to logits, (N, classes).
    """

    title: ClassVar[str]
    features: nn.Sequential
    head: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """Logits, float (N, classes), of images, float (N, C, S, S) in [-1, 1]."""
        logits: Tensor = self.head(self.features(x))
        return logits


class SmallCnn(Classifier):
    """Two convolutions with max pooling and a hidden layer of 128 units; S >= 4."""

    title = "small CNN"

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.5), nn.Linear(64 * (size // 4) ** 2, 128), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(128, classes)


class ResNet(Classifier):
    """Deep and narrow: the 20-layer network of He et al. (2016), nine blocks of two convolutions, widths 16, 32, 64."""

    title = "ResNet-20"

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        first = [_convolution(channels, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU()]
        self.features = nn.Sequential(*first, *_stages(_Basic, 16, (16, 32, 64), 3), *_pool())
        self.head = nn.Linear(64, classes)


class WideResNet(Classifier):
    """Shallow and wide (Zagoruyko and Komodakis 2016): depth 10, three pre-activation blocks, widths 48, 96, 192."""

    title = "WideResNet-10-3"

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        stages = _stages(_PreActivation, 16, (48, 96, 192), 1)
        last = [nn.BatchNorm2d(192), nn.ReLU()]
        self.features = nn.Sequential(_convolution(channels, 16, 3, 2), *stages, *last, *_pool())
        self.head = nn.Linear(192, classes)


class ResNeXt(Classifier):
    """Grouped convolutions (Xie et al. 2017): depth 20, six blocks with four groups, widths 32, 64, 128."""

    title = "ResNeXt-20"

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        first = [_convolution(channels, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU()]
        self.features = nn.Sequential(*first, *_stages(_Grouped, 32, (32, 64, 128), 2), *_pool())
        self.head = nn.Linear(128, classes)


CLASSIFIERS: dict[str, type[SmallCnn | ResNet | WideResNet | ResNeXt]] = {
    "small": SmallCnn,
    "resnet": ResNet,
    "wideresnet": WideResNet,
    "resnext": ResNeXt,
}
"""By the names that `--classifiers` accepts."""

PROTOCOL = ("resnet", "wideresnet", "resnext")
"""The networks whose mean accuracy is reported as the utility."""


class _Basic(nn.Module):
    """Two 3x3 convolutions, each followed by normalisation."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            _convolution(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs), nn.ReLU(),
            _convolution(outputs, outputs, 3), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.skip = _skip(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x) + self.skip(x))


class _PreActivation(nn.Module):
    """Two 3x3 convolutions, each preceded by normalisation."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU())
        self.inner = nn.Sequential(
            _convolution(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs), nn.ReLU(),
            _convolution(outputs, outputs, 3),
        )  # fmt: skip
        self.skip = _convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = self.before(x)
        result: Tensor = self.inner(active) + self.skip(active)
        return result


class _Grouped(nn.Module):
    """A 3x3 convolution with four groups between two 1x1 convolutions, each followed by normalisation."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            _convolution(inputs, outputs, 1), nn.BatchNorm2d(outputs), nn.ReLU(),
            _convolution(outputs, outputs, 3, stride, groups=4), nn.BatchNorm2d(outputs), nn.ReLU(),
            _convolution(outputs, outputs, 1), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.skip = _skip(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x) + self.skip(x))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


def _skip(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def _stages(
    block: type[_Basic | _PreActivation | _Grouped], inputs: int, widths: Sequence[int], depth: int
) -> list[nn.Module]:
    """`depth` blocks of each width; the first block of each stage, except the first stage, halves the side."""
    blocks: list[nn.Module] = []
    for stage, width in enumerate(widths):
        for number in range(depth):
            blocks.append(block(inputs, width, 2 if stage and not number else 1))
            inputs = width
    return blocks


def _pool() -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def build(name: str, channels: int, size: int, classes: int, device: torch.device, seed: int) -> Classifier:
    """A new classifier of `CLASSIFIERS` in channels-last layout; the seed determines its weights."""
    # they are drawn on the CPU, whatever the device
    with seeded(seed, torch.device("cpu")):
        return draw(name, channels, size, classes, device)


def draw(name: str, channels: int, size: int, classes: int, device: torch.device) -> Classifier:
    """As `build`, with weights of torch's global generator."""
    return place(CLASSIFIERS[name](channels, size, classes), device)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The seed determines what torch's global generators draw, of the CPU and of `device`; then they are as before."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
