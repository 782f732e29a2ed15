"""The denoiser of pixels: how it is built, trained on public images, and given the classes of private ones."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rapid.config.sections import ViewSettings
from rapid.data.subset import Images
from rapid.diffusion import Schedule
from rapid.diffusion.losses import noise_prediction_loss
from rapid.diffusion.timesteps import TimestepMixture
from rapid.methods.dp_diffusion.settings import LinearScheduleSettings, MixtureSettings, PixelDenoiserSettings
from rapid.nn import Denoiser
from rapid.ranks import Ranks
from rapid.training import Checkpoint
from rapid.training.loss import Loss
from rapid.training.public import train
from rapid.training.recipe import Recipe
from rapid.training.view_batches import ViewBatches

NEW_CLASSES = 0.1
"""Standard deviation of new class embeddings around the null class of a network that knows no classes."""


class PixelShape(Protocol):
    """The settings that shape a denoiser."""

    @property
    def denoiser(self) -> PixelDenoiserSettings:
        """Widths, depth and attention."""
        ...

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image with its patches as channels."""
        ...


class PixelDenoiserRecipe(Recipe):
    """All inputs of the public denoiser."""

    views: ViewSettings
    schedule: LinearScheduleSettings
    timesteps: MixtureSettings
    denoiser: PixelDenoiserSettings
    latent_shape: tuple[int, int, int]


def build_denoiser(shape: PixelShape, num_classes: int) -> Denoiser:
    """A new denoiser with random weights; `num_classes` is 0 for a network that knows the null class only."""
    if not shape.denoiser.adaptive_norm:
        return Denoiser.build(shape, num_classes)
    with torch.device("meta"):
        config = Denoiser.build(shape, num_classes).config
    network = config["network"] | {"resnet_time_scale_shift": "scale_shift"}
    if shape.denoiser.conditioning == "embedding":
        # diffusers would leave out the normalisation before the attention in the middle
        network["attn_norm_num_groups"] = network["norm_num_groups"]
    return Denoiser(config | {"network": network})


def build_schedule(settings: LinearScheduleSettings) -> Schedule:
    """The variance schedule."""
    return Schedule.linear(settings.timesteps, settings.beta_start, settings.beta_end)


def to_patches(images: Tensor, patch: int) -> Tensor:
    """Pixels of patch x patch as channels: (N, C, H, W) -> (N, C patch^2, H / patch, W / patch)."""
    return F.pixel_unshuffle(images, patch)


def from_patches(latents: Tensor, patch: int) -> Tensor:
    """The inverse of `to_patches`."""
    return F.pixel_shuffle(latents, patch)


def train_denoiser(
    recipe: PixelDenoiserRecipe,
    images: Images,
    labels: NDArray[np.int64],
    num_classes: int,
    device: torch.device,
    checkpoint: Checkpoint,
    ranks: Ranks | None = None,
) -> Denoiser:
    """Train on views of public images by the plain loss, with timesteps of the mixture.

    Args:
        recipe: shape and training.
        images: uint8 (N, H, W) or (N, H, W, 3).
        labels: int64 (N,), all `num_classes` (the null class) without classes.
        num_classes: number of classes that are learnt.
        device: where to train.
        checkpoint: of the training state.
        ranks: the processes that share each batch: each draws all of it and computes its own rows.

    Raises:
        LostRank: another rank is gone; the last checkpoint remains.
        Stopped: a stop was requested; the state is saved.
    """
    torch.manual_seed(0)
    own, ranks = recipe.denoiser, ranks or Ranks()
    model = build_denoiser(recipe, num_classes).to(device)
    if not own.pretrained:
        return model
    schedule = build_schedule(recipe.schedule).to(device)
    mixture = TimestepMixture(recipe.timesteps.weights, recipe.timesteps.breaks)
    batches = ViewBatches(
        images,
        labels,
        num_classes,
        recipe.views,
        recipe.latent_shape,
        label_dropout=own.label_dropout,
        device=device,
        ranks=ranks,
    )

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        views, y, uniform, noise = batches.draw(own.training.batch_size, generator)
        return to_patches(views, own.patch), y, mixture.quantile(uniform).to(device), noise

    def value(x: Tensor, y: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        losses = noise_prediction_loss(model, schedule, x, y, times, noise)
        return losses.mean() * ranks.weight(own.training.batch_size)

    train("denoiser", model, Loss(draw, value), own.training, checkpoint, ranks=ranks)
    return model


@torch.no_grad()
def with_private_classes(public: Denoiser, num_classes: int) -> Denoiser:
    """A copy of a public denoiser with new classes, chosen without private images; see `Denoiser.with_classes`.

    A network without classes has seen the null class only, so the new embeddings stay close to it.
    """
    denoiser = public.with_classes(num_classes)
    if not public.num_classes:
        table = denoiser.class_table.weight
        table[:-1] = table[-1] + NEW_CLASSES * (table[:-1] - table[-1])
    return denoiser
