"""Training of the autoencoder, the denoiser and the trajectory encoder on public images.

Each function gets a recipe: all the settings that it may depend on, so its result can be reused by the recipe's hash.
With several ranks, each draws the whole batch and computes its own rows, so the result does not depend on their number.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rapid.config.sections import (
    AugmentSettings,
    AutoencoderSettings,
    ImageSettings,
    ScheduleSettings,
)
from rapid.data import to_unit_range
from rapid.data.augment import drawn, transformed
from rapid.data.augmented import AugmentedImages
from rapid.data.subset import Images
from rapid.diffusion import Schedule
from rapid.diffusion.losses import denoising_loss, info_nce
from rapid.mapped import Rows, parts
from rapid.methods.rapid.settings import EncoderSettings, LatentDenoiserSettings
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.nn.denoiser import DenoiserShape
from rapid.nn.patch_decoder import PatchDecoder
from rapid.progress import Progress
from rapid.ranks import Ranks
from rapid.stopping import check_stop
from rapid.training import Checkpoint
from rapid.training.loss import Loss
from rapid.training.public import train
from rapid.training.recipe import Recipe

ENCODE_BATCH = 500
DECODER_BATCH = 50
"""Its float64 products of patches take some ten times the memory of latents."""
DECODER_PATCHES = 640_000
"""That the decoder of principal components is fitted to, at most: those of 10,000 images with latents of 8x8."""


class AutoencoderRecipe(Recipe):
    """All inputs of the autoencoder."""

    image: ImageSettings
    views: int
    augment: AugmentSettings
    autoencoder: AutoencoderSettings


class DenoiserRecipe(Recipe):
    """All inputs of the public denoiser, besides the autoencoder."""

    views: int
    augment: AugmentSettings
    schedule: ScheduleSettings
    denoiser: LatentDenoiserSettings
    latent_shape: tuple[int, int, int]


class EncoderRecipe(Recipe):
    """All inputs of the trajectory encoder, besides autoencoder and denoiser."""

    schedule: ScheduleSettings
    encoder: EncoderSettings
    latent_shape: tuple[int, int, int]
    k: int


class DenoiserSource(DenoiserShape, Protocol):
    """The settings that a denoiser is made by."""

    @property
    def schedule(self) -> ScheduleSettings:
        """Of the diffusion."""
        ...

    @property
    def denoiser(self) -> LatentDenoiserSettings:
        """Its shape, and what it predicts."""
        ...


def build_denoiser(settings: DenoiserSource, num_classes: int) -> Denoiser:
    """A new denoiser with random weights."""
    velocity = settings.schedule if settings.denoiser.prediction == "velocity" else None
    return Denoiser.build(settings, num_classes, velocity)


def train_autoencoder(
    recipe: AutoencoderRecipe,
    views: AugmentedImages,
    device: torch.device,
    checkpoint: Checkpoint,
    ranks: Ranks | None = None,
) -> Autoencoder:
    """Train the KL autoencoder, or fit the linear one.

    The loss is the squared error plus `kl_weight` times the divergence from N(0, I), both means over elements. The
    latents are normalised by mean and standard deviation, per channel, over the same images.

    Args:
        recipe: shape and training.
        views: augmented images of D_pre.
        device: where to train.
        checkpoint: of the training state.
        ranks: the processes that share the work.
    """
    torch.manual_seed(0)
    own, ranks = recipe.autoencoder, ranks or Ranks()
    model = Autoencoder.build(recipe).to(device)
    if model.vae is not None:
        _train_vae(model, own, views, device, checkpoint, ranks)
    if own.kind == "linear":
        model.fit_basis(_patch_moment(views, own.patch))
    model.set_statistics(*_statistics(encode_views(model, views, ranks)))
    if model.decoder is not None:
        model.decoder.fit(_patch_products(model, model.decoder, views), model.std.flatten(), own.decoder_noise)
    return model.eval()


def _train_vae(
    model: Autoencoder,
    settings: AutoencoderSettings,
    views: AugmentedImages,
    device: torch.device,
    checkpoint: Checkpoint,
    ranks: Ranks,
) -> None:
    """See `train_autoencoder`."""
    count = settings.training.batch_size
    with torch.no_grad():
        shape = model.posterior(views.batch(0, 1))[0].shape[1:]

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = views.draw(count, generator, ranks.rows)
        noise = torch.randn(count, *shape, generator=generator)
        return x, noise[ranks.rows].to(device)

    def value(x: Tensor, noise: Tensor) -> Tensor:
        mean, logvar = model.posterior(x)
        latents = mean + (0.5 * logvar).exp() * noise
        error = (model.decode_raw(latents) - x).square().mean()
        divergence = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        return (error + settings.kl_weight * divergence) * ranks.weight(count)

    train("autoencoder", model, Loss(draw, value), settings.training, checkpoint, ranks=ranks)


def train_denoiser(
    recipe: DenoiserRecipe,
    latents: Tensor,
    labels: Tensor,
    num_classes: int,
    checkpoint: Checkpoint,
    ranks: Ranks | None = None,
) -> Denoiser:
    """Train the denoiser by `denoising_loss` over t in 1..T; labels become the null class at random.

    Args:
        recipe: shape and training.
        latents: normalised latents of D_pre, float (N, c, h, w).
        labels: int64 (N,); all `num_classes` (the null class) if the images are unlabelled.
        num_classes: number of public classes.
        checkpoint: of the training state.
        ranks: the processes that share the work.
    """
    torch.manual_seed(1)
    device, ranks = latents.device, ranks or Ranks()
    schedule = Schedule.build(recipe.schedule).to(device)
    model = build_denoiser(recipe, num_classes).to(device)
    own = recipe.denoiser

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        count = own.training.batch_size
        chosen = torch.randint(len(latents), (count,), generator=generator)
        t = torch.randint(1, schedule.timesteps + 1, (count,), generator=generator)
        dropped = torch.rand(count, generator=generator) < own.label_dropout
        # drawn on the CPU, so that a step draws the same noise on any device
        noise = torch.randn(count, *latents.shape[1:], generator=generator)
        chosen, t, dropped, eps = (rows[ranks.rows].to(device) for rows in (chosen, t, dropped, noise))
        y = torch.where(dropped, num_classes, labels[chosen])
        return latents[chosen], y, t, eps

    def value(x: Tensor, y: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        return denoising_loss(model, schedule, x, y, t, eps).mean() * ranks.weight(own.training.batch_size)

    train("denoiser", model, Loss(draw, value), own.training, checkpoint, ranks=ranks)
    return model


def train_encoder(
    recipe: EncoderRecipe,
    images: Images,
    autoencoder: Autoencoder,
    denoiser: Denoiser,
    device: torch.device,
    checkpoint: Checkpoint,
    ranks: Ranks | None = None,
) -> TrajectoryEncoder:
    """Train the trajectory encoder (Algorithm 1) by InfoNCE.

    Two augmented views of an image, each diffused to k with its own noise and denoised in one step by the frozen
    denoiser, are a positive pair; the views of the other images are negatives.

    Args:
        recipe: shape and training.
        images: D_ref, uint8 (N, H, W) or (N, H, W, 3).
        autoencoder: frozen.
        denoiser: frozen, unconditional here as in every query.
        device: where to train.
        checkpoint: of the training state.
        ranks: the processes that share the work.
    """
    torch.manual_seed(2)
    ranks = ranks or Ranks()
    schedule = Schedule.build(recipe.schedule).to(device)
    model = TrajectoryEncoder.build(recipe).to(device)
    own = recipe.encoder

    @torch.no_grad()
    def view(x: Tensor, generator: torch.Generator) -> Tensor:
        draws = drawn(count, generator)[:, ranks.rows].to(device)
        latents = autoencoder.encode(transformed(x, own.augment, draws))
        eps = torch.randn(count, *latents.shape[1:], generator=generator)[ranks.rows].to(device)
        return one_step_query(denoiser, schedule, latents, eps, recipe.k)

    count = min(own.training.batch_size, len(images))

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        # without replacement: an image must not be its own negative
        chosen = torch.randperm(len(images), generator=generator)[:count][ranks.rows]
        x = to_unit_range(images[chosen.numpy()], device)
        return view(x, generator), view(x, generator)

    def value(first: Tensor, second: Tensor) -> Tensor:
        all_first, all_second = (ranks.of_all(model(views), count) for views in (first, second))
        whole = info_nce(all_first, all_second, own.temperature)
        # every rank has the loss of the whole batch, with the gradients of its own rows
        return whole - whole.detach() * (1 - 1 / ranks.count)

    # queries are differences of large numbers, and generation makes them in float32
    loss = Loss(draw, value, exchanges=ranks.count > 1)
    train("encoder", model, loss, own.training, checkpoint, exact=True, ranks=ranks)
    return model


def _patch_moment(views: AugmentedImages, patch: int) -> Tensor:
    """Mean of the outer products of all patches, float64 (C * patch^2, C * patch^2)."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    with Progress("autoencoder", len(views), "image") as progress:
        for batch in views.batches(ENCODE_BATCH):
            check_stop()
            rows = F.pixel_unshuffle(batch, patch).movedim(1, -1).flatten(0, -2).double()
            total = total.to(rows.device) + rows.T @ rows
            count += len(rows)
            progress.advance(len(batch))
    return total / count


@torch.no_grad()
def _patch_products(model: Autoencoder, decoder: PatchDecoder, views: AugmentedImages) -> Tensor:
    """See `PatchDecoder.products`, of at most DECODER_PATCHES of views that are spread evenly over all."""
    most = max(1, DECODER_PATCHES // model.encode_raw(views.batch(0, 1))[0, 0].numel())
    starts = range(0, len(views), DECODER_BATCH * -(-len(views) // most))
    total = torch.zeros((), dtype=torch.float64)
    with Progress("decoder", len(starts), "batch") as progress:
        for start in starts:
            check_stop()
            images = views.batch(start, DECODER_BATCH)
            found = decoder.products(model.encode_raw(images), images)
            total = total.to(found.device) + found
            progress.advance(1)
    return total


@torch.no_grad()
def encode_views(autoencoder: Autoencoder, views: AugmentedImages, ranks: Ranks | None = None) -> Tensor:
    """Normalised latents of all augmented images, float (len(views), c, h, w), on all ranks, which share the work.

    Raises:
        LostRank: another rank is gone.
        Stopped: a stop was requested.
    """
    ranks, latents = ranks or Ranks(), Rows(len(views))
    device = next(iter(autoencoder.buffers())).device

    def encoded(start: int) -> Tensor:
        batch = autoencoder.encode(views.batch(start, ENCODE_BATCH))
        return batch if ranks.count == 1 else batch.cpu()

    with Progress("latents", len(views), "image") as progress:
        for batch in ranks.in_turn(range(0, len(views), ENCODE_BATCH), encoded):
            latents.append(batch.to(device))
            progress.advance(len(batch))
    return latents.all


@torch.no_grad()
def one_step_query(denoiser: Denoiser, schedule: Schedule, latents: Tensor, eps: Tensor, k: int) -> Tensor:
    """Input of the encoder: latents (N, c, h, w) diffused to k with `eps`, denoised unconditionally in one step."""
    t = torch.full((len(latents),), k, device=latents.device)
    x_k = schedule.diffuse(latents, eps, t)
    return schedule.denoise(x_k, denoiser(x_k, t, denoiser.null_labels(len(latents))), t)


def _statistics(latents: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, (c,), of latents (N, c, h, w), in bounded memory."""
    count = latents[:, 0].numel()
    mean = squares = torch.zeros(latents.shape[1], dtype=torch.float64, device=latents.device)
    for part in parts(latents):
        mean = mean + part.double().sum((0, 2, 3)) / count
    for part in parts(latents):
        squares = squares + (part.double() - mean.view(-1, 1, 1)).square().sum((0, 2, 3))
    return mean.float(), (squares / (count - 1)).sqrt().float()
