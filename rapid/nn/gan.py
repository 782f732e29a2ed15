"""Generator and discriminator of a class-conditional DCGAN without batch normalisation.

Four convolutions each at 28 and 32 pixels: the DCGAN of Radford, Metz, Chintala (ICLR 2016) less its last layer, as in
"Private GANs, Revisited" (Bie, Kamath, Zhang; TMLR). That paper tells widths and numbers of parameters, not kernels,
latent size or how labels enter; what is here gives its numbers, such as 1.72 M and 2.27 M for MNIST with d = 128.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.nn.groups import group_count
from rapid.nn.storage import StoredNetwork

SMALLEST = 4
"""Side of the smallest feature maps, in pixels."""
SLOPE = 0.2
"""Of the discriminator's leaky ReLU."""


class GanDiscriminator(StoredNetwork):
    """Tells real images from fakes: logits, positive for real.

    With labels as planes, half of the first feature maps come from the label. With labels by projection (Miyato,
    Koyama; ICLR 2018), the last layer has a logit for all images and one for each class; that of the label is added.
    There is no normalisation, so the gradient of an example depends on that example alone.

    Args:
        config: JSON-ready: size, image_channels, classes (0: unconditional), channels (d, of the first convolution),
            labels ("planes", the default, or "projection").

    Raises:
        ValueError: a size that does not lead to 4 by halving, rounded up.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        sides, width = _sides(config["size"]), config["channels"]
        self._classes = config["classes"]
        planes = self._classes > 0 and config.get("labels", "planes") == "planes"
        of_label = width // 2 if planes else 0
        self.image = nn.Conv2d(config["image_channels"], width - of_label, _kernel(sides[0]), 2, 1)
        self.label = nn.Conv2d(self._classes, of_label, _kernel(sides[0]), 2, 1) if planes else None
        blocks = []
        for side in sides[1:-1]:
            blocks.append(nn.Conv2d(width, 2 * width, _kernel(side), 2, 1))
            width *= 2
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Conv2d(width, 1 if planes else 1 + self._classes, SMALLEST)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Logits, float (n,), of images, float (n, C, H, W) in [-1, 1], and labels, int64 (n,)."""
        hidden = self.image(images)
        if self.label is not None:
            # one plane a class: ones for the label's, zeros for the others
            planes = F.one_hot(labels, self._classes).to(images.dtype)[:, :, None, None]
            hidden = torch.cat([hidden, self.label(planes.expand(-1, -1, *images.shape[2:]))], 1)
        hidden = F.leaky_relu(hidden, SLOPE)
        for block in self.blocks:
            hidden = F.leaky_relu(block(hidden), SLOPE)
        logits: Tensor = self.last(hidden).flatten(1)
        if logits.shape[1] == 1:
            return logits.flatten()
        return logits[:, 0] + logits[:, 1:].gather(1, labels[:, None]).flatten()


class GanGenerator(StoredNetwork):
    """Maps latents and labels to images. Group normalisation, if any, so an image does not depend on its batch.

    Half of the first feature maps come from the latent, half from the label.

    Args:
        config: JSON-ready: size, image_channels, classes (0: unconditional), channels (d, before the last
            convolution), latent (length of a latent), normalisation ("group" or "none").

    Raises:
        ValueError: a size that does not lead to 4 by halving, rounded up.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        sides, classes = _sides(config["size"]), config["classes"]
        width = config["channels"] << (len(sides) - 2)
        self._label_width = width // 2 if classes else 0
        self.noise = nn.ConvTranspose2d(config["latent"], width - self._label_width, SMALLEST)
        self.label = nn.Embedding(classes, self._label_width * SMALLEST**2) if classes else None
        norms: list[nn.Module] = [_norm(config["normalisation"], width)]
        blocks: list[nn.Module] = []
        for side in sides[-2:0:-1]:
            blocks.append(nn.ConvTranspose2d(width, width // 2, _kernel(side), 2, 1))
            width //= 2
            norms.append(_norm(config["normalisation"], width))
        self.norms, self.blocks = nn.ModuleList(norms), nn.ModuleList(blocks)
        self.last = nn.ConvTranspose2d(width, config["image_channels"], _kernel(sides[0]), 2, 1)

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """Images, float (n, C, H, W) in [-1, 1], of standard normal latents, float (n, latent), labels int64 (n,)."""
        hidden = self.noise(latents[:, :, None, None])
        if self.label is not None:
            maps = self.label(labels).view(-1, self._label_width, SMALLEST, SMALLEST)
            hidden = torch.cat([hidden, maps.to(hidden.dtype)], 1)
        hidden = F.relu(self.norms[0](hidden))
        for block, norm in zip(self.blocks, self.norms[1:], strict=True):
            hidden = F.relu(norm(block(hidden)))
        return torch.tanh(self.last(hidden))


def _sides(size: int) -> list[int]:
    """Sides of the feature maps from the image down: each is half of the one before, rounded up."""
    sides = [size]
    while sides[-1] > SMALLEST:
        sides.append(-(-sides[-1] // 2))
    if len(sides) < 2 or sides[-1] != SMALLEST:
        raise ValueError(f"halving {size}, rounded up, does not lead to {SMALLEST}")
    return sides


def _kernel(side: int) -> int:
    """Kernel that leads from the larger side to half of it, rounded up, and back, with stride 2 and padding 1."""
    return 4 - side % 2


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.GroupNorm(group_count(channels), channels) if kind == "group" else nn.Identity()
