"""The denoiser of pixels at continuous noise levels: how it is built, and trained on public images."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.config.sections import DenoiserSettings
from rapid.data.subset import Images
from rapid.diffusion.preconditioning import Configuration
from rapid.methods.dpdm.settings import AmplifierSettings
from rapid.nn.denoiser import DenoiserShape
from rapid.nn.preconditioned import PreconditionedDenoiser, denoising_losses
from rapid.ranks import Ranks
from rapid.training import Checkpoint
from rapid.training.loss import Loss
from rapid.training.public import train
from rapid.training.recipe import Recipe
from rapid.training.view_batches import ViewBatches

DENOISER = "denoiser"
CHOSEN_FOR = "chosen_for_epsilon"
"""The fact of a private bundle by which sampling is chosen as training was: of a tune, the epsilon of one trial."""
"""Of the component, and of the release behind it."""


class AmplifierRecipe(Recipe):
    """All inputs of a public denoiser."""

    denoiser: DenoiserSettings
    latent_shape: tuple[int, int, int]
    patch: int
    public: AmplifierSettings


def build_denoiser(
    shape: DenoiserShape, num_classes: int, configuration: Configuration, sigma_data: float, patch: int
) -> PreconditionedDenoiser:
    """A denoiser with random weights, always the same ones: they are public."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return PreconditionedDenoiser.build(shape, num_classes, configuration, sigma_data=sigma_data, patch=patch)


def train_denoiser(
    recipe: AmplifierRecipe,
    images: Images,
    labels: NDArray[np.int64],
    num_classes: int,
    device: torch.device,
    checkpoint: Checkpoint,
    ranks: Ranks | None = None,
) -> PreconditionedDenoiser:
    """Train an EDM (Karras et al. 2022) on views of public images.

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
    own, ranks = recipe.public, ranks or Ranks()
    model = build_denoiser(recipe, num_classes, "edm", own.sigma_data, recipe.patch).to(device)
    channels, side, _ = recipe.latent_shape
    shape = channels // recipe.patch**2, side * recipe.patch, side * recipe.patch
    batches = ViewBatches(
        images, labels, num_classes, own.views, shape, label_dropout=own.label_dropout, device=device, ranks=ranks
    )

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        x0, y, uniform, noise = batches.draw(own.training.batch_size, generator)
        # quantiles in (0, 1]
        sigma = model.preconditioning.level(1 - uniform).float().to(device)
        return x0, y, sigma, noise

    def value(x0: Tensor, y: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
        return denoising_losses(model, x0, y, sigma, noise).mean() * ranks.weight(own.training.batch_size)

    train(DENOISER, model, Loss(draw, value), own.training, checkpoint, ranks=ranks)
    return model
