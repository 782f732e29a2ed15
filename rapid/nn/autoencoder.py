"""The autoencoder between images and latents; the latents are normalised by public statistics."""

from __future__ import annotations

from typing import Any, Protocol, Self

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional as F

from rapid.config.sections import AutoencoderSettings, ImageSettings
from rapid.nn.groups import group_count
from rapid.nn.patch_decoder import PatchDecoder
from rapid.nn.storage import StoredNetwork


class AutoencoderShape(Protocol):
    """The settings that shape an autoencoder."""

    @property
    def image(self) -> ImageSettings:
        """Size and channels of the images."""
        ...

    @property
    def autoencoder(self) -> AutoencoderSettings:
        """Kind, widths and depth."""
        ...


class Autoencoder(StoredNetwork):
    """Maps images in [-1, 1] to latents and back. Over public images, latents have mean 0 and variance 1 per channel.

    Args:
        config: JSON-ready: kind, latent_channels, patch, for kind "kl" network, and for "linear" image_channels and
            decoder_noise. "kl" is diffusers' AutoencoderKL. With "linear" the latents are principal components of
            patches of pixels, with "none" the pixels, normalised in the same way.
    """

    mean: Tensor
    std: Tensor
    basis: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.vae: AutoencoderKL | None = None
        self.decoder: PatchDecoder | None = None
        self.patch: int = config["patch"]
        if config["kind"] == "kl":
            self.vae = AutoencoderKL(**config["network"])
        channels = config["latent_channels"]
        if config["kind"] == "linear":
            numbers = config["image_channels"] * self.patch**2
            # the first numbers of a patch, until `fit_basis`
            self.register_buffer("basis", torch.eye(channels, numbers))
            # bundles of earlier versions have none
            if config.get("decoder_noise"):
                self.decoder = PatchDecoder(channels, numbers, self.patch)
        self.register_buffer("mean", torch.zeros(1, channels, 1, 1))
        self.register_buffer("std", torch.ones(1, channels, 1, 1))

    @classmethod
    def build(cls, settings: AutoencoderShape) -> Self:
        """A new autoencoder with random weights."""
        s = settings.autoencoder
        latent_channels = settings.image.channels if s.kind == "none" else s.latent_channels
        config: dict[str, Any] = {"kind": s.kind, "latent_channels": latent_channels, "patch": s.patch}
        if s.kind == "linear":
            config |= {"image_channels": settings.image.channels, "decoder_noise": s.decoder_noise}
        if s.kind == "kl":
            widths = [s.channels * m for m in s.multipliers]
            attention = [settings.image.size // (s.patch << level) in s.attention for level in range(len(widths))]
            config["network"] = {
                "in_channels": settings.image.channels * s.patch**2,
                "out_channels": settings.image.channels * s.patch**2,
                "down_block_types": ["AttnDownEncoderBlock2D" if a else "DownEncoderBlock2D" for a in attention],
                "up_block_types": ["AttnUpDecoderBlock2D" if a else "UpDecoderBlock2D" for a in reversed(attention)],
                "block_out_channels": widths,
                "layers_per_block": s.blocks,
                "latent_channels": s.latent_channels,
                "norm_num_groups": group_count(s.channels),
                "sample_size": settings.image.size // s.patch,
                "mid_block_add_attention": bool(s.attention),
            }
        return cls(config)

    def posterior(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance, each (N, c, h, w), of the unnormalised latents of images (N, C, H, W).

        Raises:
            TypeError: `kind` is not "kl": there is no posterior and nothing to train.
        """
        if self.vae is None:
            raise TypeError("only an autoencoder of kind 'kl' has a posterior")
        distribution = self.vae.encode(F.pixel_unshuffle(images, self.patch)).latent_dist
        return distribution.mean, distribution.logvar

    def decode_raw(self, latents: Tensor) -> Tensor:
        """Images (N, C, H, W) of unnormalised latents."""
        if self.decoder is not None:
            return self.decoder.forward(latents)
        if self.config["kind"] == "linear":
            return F.pixel_shuffle(torch.einsum("dp,ndhw->nphw", self.basis, latents), self.patch)
        if self.vae is None:
            return latents
        return F.pixel_shuffle(self.vae.decode(latents).sample, self.patch)

    def unnormalised(self, latents: Tensor) -> Tensor:
        """Unnormalised latents (N, c, h, w) of normalised ones."""
        return latents * self.std + self.mean

    def encode_raw(self, images: Tensor) -> Tensor:
        """Unnormalised latents (N, c, h, w) of images (N, C, H, W): the mean of the posterior, where there is one."""
        if self.config["kind"] == "linear":
            return torch.einsum("dp,nphw->ndhw", self.basis, F.pixel_unshuffle(images, self.patch))
        return images if self.vae is None else self.posterior(images)[0]

    def fit_basis(self, second_moment: Tensor) -> None:
        """Set the basis of kind "linear" to the leading eigenvectors: no other basis of its size has a smaller error.

        Args:
            second_moment: mean of the outer products of the patches of PUBLIC images, float64 (p, p); its entries are
                in the order of `pixel_unshuffle`. Not centred: the mean brightness becomes part of the first
                component, so that the decoder needs no offset.
        """
        _, vectors = torch.linalg.eigh(second_moment)
        leading = vectors.flip(1)[:, : len(self.basis)].T
        # the sign of an eigenvector is arbitrary, and may differ between machines
        signs = leading.gather(1, leading.abs().argmax(1, keepdim=True)).sign()
        self.basis.copy_(leading * signs)

    def set_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Set mean and standard deviation per channel, (c,) each, of the unnormalised latents of PUBLIC images."""
        self.mean.copy_(mean.view_as(self.mean))
        self.std.copy_(std.clamp(min=1e-6).view_as(self.std))

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Normalised latents (N, c, h, w) of images (N, C, H, W) in [-1, 1]: the mean of the posterior."""
        return (self.encode_raw(images) - self.mean) / self.std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images (N, C, H, W) of normalised latents (N, c, h, w); about in [-1, 1], not clamped."""
        return self.decode_raw(self.unnormalised(latents))
