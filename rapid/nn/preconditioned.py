"""A U-Net on pixels with preconditioning: the denoiser D(x; sigma, label) of continuous noise levels."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor
from torch.nn import functional as F

from rapid.diffusion.preconditioning import CONFIGURATIONS, SIGMA_DATA, Configuration
from rapid.nn.denoiser import Denoiser, DenoiserShape
from rapid.nn.storage import StoredNetwork


class PreconditionedDenoiser(StoredNetwork):
    """D(x; sigma, label), an estimate of the image in x.

    Labels are 0..num_classes - 1; label `num_classes` is the null class.

    Args:
        config: JSON-ready: configuration, sigma_data, patch, unet (of the `Denoiser`).
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.preconditioning = CONFIGURATIONS[config["configuration"]](config["sigma_data"])
        self.patch: int = config["patch"]
        self.unet = Denoiser(config["unet"])

    @classmethod
    def build(
        cls,
        shape: DenoiserShape,
        num_classes: int,
        configuration: Configuration,
        *,
        sigma_data: float = SIGMA_DATA,
        patch: int = 1,
    ) -> Self:
        """A new denoiser with random weights.

        Args:
            shape: of the U-Net; `latent_shape` is that of images whose patches became channels.
            num_classes: 0 for unlabelled images.
            configuration: of the preconditioning.
            sigma_data: of the preconditioning; a constant.
            patch: pixels of patch x patch are channels of the U-Net.
        """
        unet = Denoiser.build(shape, num_classes).config
        return cls({"configuration": configuration, "sigma_data": sigma_data, "patch": patch, "unet": unet})

    @property
    def num_classes(self) -> int:
        """Number of classes without the null class."""
        return self.unet.num_classes

    def forward(self, x: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        """D(x; sigma, label).

        Args:
            x: noisy images, float (N, C, H, W).
            sigma: standard deviation of their noise, float (N,).
            labels: int64 (N,), each in 0..num_classes.

        Returns:
            float (N, C, H, W).
        """

        def network(scaled: Tensor, time: Tensor) -> Tensor:
            # the U-Net gets one less than its timesteps, which count from 1
            out = self.unet(F.pixel_unshuffle(scaled, self.patch), time + 1, labels)
            return F.pixel_shuffle(out, self.patch)

        return self.preconditioning.denoise(network, x, sigma)

    def __call__(self, x: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        """See `forward`."""
        denoised: Tensor = super().__call__(x, sigma, labels)
        return denoised

    def null_labels(self, count: int) -> Tensor:
        """`count` labels of the null class, int64 (count,), on the device of the weights."""
        return self.unet.null_labels(count)


def denoising_losses(
    denoiser: PreconditionedDenoiser, x0: Tensor, labels: Tensor, sigma: Tensor, noise: Tensor
) -> Tensor:
    """The weighted error of D at x0 + sigma noise, float (N,); see `Preconditioning.losses`.

    Args:
        denoiser: D.
        x0: images in [-1, 1], float (N, C, H, W).
        labels: int64 (N,), each in 0..num_classes.
        sigma: noise levels, float (N,).
        noise: standard normal, as `x0`.
    """
    noisy = x0 + sigma.view(-1, 1, 1, 1) * noise
    return denoiser.preconditioning.losses(denoiser(noisy, sigma, labels), x0, sigma)
