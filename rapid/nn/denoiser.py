"""The denoiser eps_theta(x_t, t, label): a diffusers U-Net with an embedding of the classes and the null class."""

from __future__ import annotations

from typing import Any, Protocol, Self

import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from torch import Tensor, nn

from rapid.config.sections import DenoiserSettings, ScheduleSettings
from rapid.diffusion.schedule import Schedule
from rapid.nn.groups import group_count
from rapid.nn.storage import StoredNetwork


class _OneType:
    """Shortcut for `dtype`: diffusers walks all layers to find it, twice per call, a tenth of a small call's time."""

    conv_in: nn.Conv2d

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.conv_in.weight.dtype


class _UNet(_OneType, UNet2DModel):  # type: ignore[misc]
    """Conditioned by an embedding that is added to the timestep embedding."""


class _ConditionalUNet(_OneType, UNet2DConditionModel):  # type: ignore[misc]
    """Conditioned by cross-attention."""


class DenoiserShape(Protocol):
    """The settings that shape a denoiser."""

    @property
    def denoiser(self) -> DenoiserSettings:
        """Widths, depth, attention and conditioning."""
        ...

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of a latent."""
        ...


class Denoiser(StoredNetwork):
    """Predicts the noise in x_t.

    Labels are 0..num_classes - 1; label `num_classes` is the null class, used for unconditional queries and guidance.
    Timesteps are 1..T as in the paper; the U-Net gets t - 1, the index into the schedule.

    With a schedule in `config` the U-Net predicts the velocity v = sqrt(abar_t) eps - sqrt(1 - abar_t) x_0 (Salimans
    and Ho 2022, arXiv 2202.00512), and the noise is sqrt(1 - abar_t) x_t + sqrt(abar_t) v. Errors of the U-Net reach
    x_0 times sqrt(1 - abar_t); where it predicts the noise, they do so times sqrt(1 - abar_t) / sqrt(abar_t).

    Args:
        config: JSON-ready: num_classes, conditioning, context_dim, network, and for velocities schedule.
    """

    signal: Tensor
    noise: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.predicts_velocity: bool = "schedule" in config
        if self.predicts_velocity:
            abar = Schedule.build(ScheduleSettings.model_validate(config["schedule"])).abar
            self.register_buffer("signal", abar.sqrt().float().view(-1, 1, 1, 1), persistent=False)
            self.register_buffer("noise", (1 - abar).sqrt().float().view(-1, 1, 1, 1), persistent=False)
        self.num_classes: int = config["num_classes"]
        cross = config["conditioning"] == "cross-attention"
        self.unet: nn.Module = (_ConditionalUNet if cross else _UNet)(**config["network"])
        self.cross_attention = cross
        width = config["context_dim"] if cross else 4 * config["network"]["block_out_channels"][0]
        self.class_table = nn.Embedding(self.num_classes + 1, width)

    @classmethod
    def build(cls, settings: DenoiserShape, num_classes: int, velocity: ScheduleSettings | None = None) -> Self:
        """A new denoiser with random weights.

        Args:
            settings: of its shape.
            num_classes: without the null class.
            velocity: the schedule, if the U-Net predicts velocities.
        """
        s = settings.denoiser
        latent_channels, latent_size, _ = settings.latent_shape
        widths = [s.channels * m for m in s.multipliers]
        cross = s.conditioning == "cross-attention"
        kinds = ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D") if cross else ("AttnDownBlock2D", "AttnUpBlock2D")
        network: dict[str, Any] = {
            "sample_size": latent_size,
            "in_channels": latent_channels,
            "out_channels": latent_channels,
            "block_out_channels": widths,
            "layers_per_block": s.blocks,
            "down_block_types": [kinds[0] if a else "DownBlock2D" for a in s.attention],
            "up_block_types": [kinds[1] if a else "UpBlock2D" for a in reversed(s.attention)],
            "norm_num_groups": group_count(s.channels),
        }
        if cross:
            network |= {
                "cross_attention_dim": s.context_dim,
                # diffusers reads this argument of the conditional U-Net as the number of heads
                "attention_head_dim": s.heads,
                "transformer_layers_per_block": s.transformer_depth,
                "mid_block_type": "UNetMidBlock2DCrossAttn",
            }
        else:
            # "identity": the U-Net adds the class embedding as it is to the timestep embedding
            network |= {
                "attention_head_dim": s.channels // s.heads,
                "add_attention": any(s.attention),
                "class_embed_type": "identity",
            }
        config = {
            "num_classes": num_classes,
            "conditioning": s.conditioning,
            "context_dim": s.context_dim,
            "network": network,
        }
        return cls(config if velocity is None else config | {"schedule": velocity.model_dump(mode="json")})

    def with_classes(self, num_classes: int) -> Self:
        """A copy with `num_classes` new classes; the null class and all other weights are kept.

        The new class embeddings are drawn at random with the mean and standard deviation of the public ones. Equal ones
        would leave it to private training to separate the classes, which costs privacy.
        """
        model = type(self)(self.config | {"num_classes": num_classes})
        state = self.state_dict()
        known, null = state["class_table.weight"].split([self.num_classes, 1])
        centre, spread = (known.mean(0), known.std(0)) if self.num_classes > 1 else (null[0], torch.ones_like(null[0]))
        new = centre + spread * torch.randn(num_classes, known.shape[1], device=known.device)
        state["class_table.weight"] = torch.cat([new, null])
        model.load_state_dict(state)
        return model.train(self.training)

    @torch.no_grad()
    def blend_classes(self, other: Self, weights: Tensor) -> None:
        """Set each class embedding to a weighted mean of the class embeddings of `other`.

        Args:
            other: a denoiser with class embeddings of the same width.
            weights: float (num_classes, other.num_classes); rows sum to 1.
        """
        table = weights.to(other.class_table.weight) @ other.class_table.weight[:-1]
        self.class_table.weight[:-1] = table.to(self.class_table.weight)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """Predicted noise.

        Args:
            x: noisy latents, float (N, C, H, W).
            t: timesteps, int64 (N,), each in 1..T.
            labels: int64 (N,), each in 0..num_classes; num_classes is the null class.

        Returns:
            float (N, C, H, W).
        """
        context = self.class_table(labels)
        if self.cross_attention:
            predicted: Tensor = self.unet(x, t - 1, context[:, None, :]).sample
        else:
            predicted = self.unet(x, t - 1, class_labels=context).sample
        return self.noise[t] * x + self.signal[t] * predicted if self.predicts_velocity else predicted

    def __call__(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """See `forward`."""
        noise: Tensor = super().__call__(x, t, labels)
        return noise

    def null_labels(self, count: int) -> Tensor:
        """`count` labels of the null class, int64 (count,), on the device of the weights."""
        return torch.full((count,), self.num_classes, dtype=torch.int64, device=self.class_table.weight.device)


class Guidable(Protocol):
    """A network with classes and the null class."""

    def null_labels(self, count: int) -> Tensor:
        """`count` labels of the null class, int64 (count,), on the device of the weights."""
        ...

    def __call__(self, x: Tensor, t: Tensor, labels: Tensor, /) -> Tensor:
        """Its prediction, as `x`."""
        ...


def guided(network: Guidable, x: Tensor, t: Tensor, labels: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance: null + scale (label - null) of predictions; one network call if scale is 1.

    Args:
        network: with both kinds of predictions.
        x: noisy images or latents, float (N, C, H, W).
        t: timesteps or noise levels (N,), as the network takes them.
        labels: int64 (N,).
        scale: 1 is without guidance; 1 + w for papers that write (1 + w) label - w null.
    """
    if scale == 1:
        return network(x, t, labels)
    null = network.null_labels(len(x))
    both = network(torch.cat([x, x]), torch.cat([t, t]), torch.cat([labels, null]))
    conditional, unconditional = both.chunk(2)
    return unconditional + scale * (conditional - unconditional)
