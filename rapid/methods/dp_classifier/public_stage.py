"""The public stage: a warm-up of the classifier on public images like the private ones, real or synthetic."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rapid.bundle.builder import BundleBuilder
from rapid.config.sections import ImageSettings
from rapid.data import to_unit_range
from rapid.data.views import DRAWS, random_views
from rapid.errors import InputError
from rapid.methods.base import Description, PublicImages
from rapid.methods.dp_classifier.images import NAME as IMAGES
from rapid.methods.dp_classifier.images import LabelledImages
from rapid.methods.dp_classifier.settings import DpClassifierSettings, NetworkSettings, WarmUpSettings
from rapid.nn.wide_resnet import WideResNet
from rapid.ranks import Ranks
from rapid.training import Checkpoint
from rapid.training.loss import Loss
from rapid.training.optimizers import MOMENTUM
from rapid.training.public import train
from rapid.training.recipe import Recipe

CLASSIFIER = "classifier"


class WarmUpRecipe(Recipe):
    """All inputs of the warm-up."""

    image: ImageSettings
    network: NetworkSettings
    warmup: WarmUpSettings


def train_public(builder: BundleBuilder, public: PublicImages, settings: DpClassifierSettings) -> Description:
    """Train the classifier on the public images: Warm, or WarmSyn where some sets are synthetic.

    Classes of equal names in several sets are the same class.

    Args:
        builder: collects the components.
        public: the public images.
        settings: the public sections are used.

    Raises:
        InputError: images without labels.
        Stopped: a stop was requested; the state is saved.
    """
    labels, classes = merged_labels(public)
    recipe = WarmUpRecipe(images=builder.images, image=settings.image, network=settings.network, warmup=settings.warmup)
    builder.make(
        CLASSIFIER,
        WideResNet,
        recipe,
        lambda state: warm_up(recipe, public, labels, classes, builder.device, state, builder.ranks),
    )
    if settings.warmup.kept:
        builder.add(IMAGES, _kept(public, labels, classes, settings.warmup.kept))
    count = len(public.images)
    sets = int(public.sources.max()) + 1
    about = (
        f"A classifier of {len(classes)} classes ({', '.join(classes)}), trained on {count:,} public images of {sets} "
        f"{'set' if sets == 1 else 'sets'}.\n"
    )
    return Description(about, bundle_facts(settings), pre_training=count)


def bundle_facts(settings: DpClassifierSettings) -> dict[str, object]:
    """Facts that `rapid info` shows of any classifier."""
    return {
        "task": "image-classification",
        "network": f"WRN-{settings.network.depth}-{settings.network.width}",
    }


def merged_labels(public: PublicImages) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Labels, int64 (N,), and class names, where equal names in several sets are one class.

    Raises:
        InputError: the images are unlabelled.
    """
    if public.images.labels is None:
        raise InputError("public", "has no labels, which a classifier needs", public.images.source)
    names = public.names or public.images.classes
    classes = tuple(dict.fromkeys(names))
    place = np.array([classes.index(name) for name in names], np.int64)
    return place[public.images.labels], classes


def warm_up(
    recipe: WarmUpRecipe,
    public: PublicImages,
    labels: NDArray[np.int64],
    classes: tuple[str, ...],
    device: torch.device,
    checkpoint: Checkpoint,
    ranks: Ranks | None = None,
) -> WideResNet:
    """Train by cross-entropy on random views, with sharpness-aware minimisation.

    Args:
        recipe: shape and training.
        public: images and the set of each.
        labels: int64 (N,), indices into `classes`.
        classes: names.
        device: where to train.
        checkpoint: of the training state.
        ranks: the processes that share each batch: each draws all of it and computes its own rows.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = WideResNet.build(recipe.image, recipe.network, classes).to(device)
    own, images, ranks = recipe.warmup, public.images.images, ranks or Ranks()
    groups = [torch.arange(len(images))]
    if own.sets == "even":
        groups = [torch.from_numpy(np.flatnonzero(public.sources == one)) for one in np.unique(public.sources)]

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        count = own.training.batch_size
        chosen = _draw(groups, count, generator)[ranks.rows].numpy()
        draws = torch.rand(count, DRAWS, generator=generator)[ranks.rows].to(device)
        views = random_views(to_unit_range(images[chosen], device), draws, own.views)
        return views, torch.from_numpy(labels[chosen]).to(device)

    def value(views: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(views), targets) * ranks.weight(own.training.batch_size)

    optimizer = _optimizer(model, own)
    loss = Loss(draw, value)
    train("warm-up", model, loss, own.training, checkpoint, optimizer=optimizer, rho=own.rho, ranks=ranks)
    return model


def _optimizer(model: WideResNet, settings: WarmUpSettings) -> torch.optim.Optimizer:
    rate, decay = settings.training.learning_rate, settings.weight_decay
    if settings.optimizer == "momentum":
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM, weight_decay=decay)
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)


def _draw(groups: list[Tensor], count: int, generator: torch.Generator) -> Tensor:
    """Indices of random images, int64 (count,), as many of each group, to within one; which have one more is random."""
    most = len(groups)
    first = int(torch.randint(most, (), generator=generator))
    shares = [count // most + ((number - first) % most < count % most) for number in range(most)]
    parts = [
        group[torch.randint(len(group), (share,), generator=generator)]
        for group, share in zip(groups, shares, strict=True)
    ]
    return torch.cat(parts)


def _kept(public: PublicImages, labels: NDArray[np.int64], classes: tuple[str, ...], most: int) -> LabelledImages:
    """Some images of the first set, which are evenly drawn from it."""
    own = np.flatnonzero(public.sources == 0)
    rows = np.sort(np.random.default_rng(0).permutation(own)[:most])
    return LabelledImages(np.ascontiguousarray(public.images.images[rows]), [classes[n] for n in labels[rows]])
