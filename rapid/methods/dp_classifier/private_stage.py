"""The private stage: DP-SGD of the classifier, with several views of an image, from the warm-up or from scratch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

import rapid.methods.dp_classifier.standardised  # noqa: F401 - adds the rule of its convolutions
from rapid.bundle import Bundle, Component
from rapid.data import to_unit_range
from rapid.data.views import DRAWS, random_views
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.budget import Budget
from rapid.dp.execution import Execution
from rapid.dp.objective import Objective
from rapid.dp.randomness import Randomness
from rapid.dp.releases import DpSgdSpec
from rapid.dp.training_spec import training_spec
from rapid.errors import InputError
from rapid.methods.base import Description
from rapid.methods.dp_classifier.images import NAME as IMAGES
from rapid.methods.dp_classifier.images import LabelledImages
from rapid.methods.dp_classifier.public_gradient import PublicGradient
from rapid.methods.dp_classifier.public_stage import CLASSIFIER, bundle_facts
from rapid.methods.dp_classifier.settings import DpClassifierSettings
from rapid.nn.wide_resnet import WideResNet
from rapid.training import Trainer
from rapid.training.optimizers import build_optimizer, noisy_schedule, select_trainable, trained_count


def releases(settings: DpClassifierSettings, facts: PublicFacts, base: Bundle | None) -> Sequence[DpSgdSpec]:
    """The one release: the training of the classifier.

    Args:
        settings: steps, batch, clip norm.
        facts: public facts of the private images.
        base: the public bundle; None for training from scratch.

    Raises:
        InputError: settings that do not fit the base or the images.
    """
    own = settings.private
    if not facts.classes:
        raise InputError("private", "has no labels, which a classifier needs; use one sub-folder per class")
    check_base(base, settings)
    if own.public_share > 0 and base is not None:
        known = set(base.component(IMAGES, LabelledImages).labels)
        if not known & set(facts.classes):
            problem = "no public image that --base keeps is of a class of the private ones; set it to 0"
            raise InputError("private.public_share", problem, own.public_share)
    network = _start(settings, facts.classes, base)
    select_trainable(network, own.trainable)
    return [training_spec(CLASSIFIER, "image classifier", own, facts)]


def check_base(base: Bundle | None, settings: DpClassifierSettings) -> None:
    """Check that there are public images if they are wanted.

    Raises:
        InputError: there are none.
    """
    share = settings.private.public_share
    if share > 0 and (base is None or not base.has(IMAGES)):
        problem = "needs public images in --base; build it with warmup.kept above 0, or leave this at 0"
        raise InputError("private.public_share", problem, share)


def train_private(
    access: PrivateAccess, base: Bundle | None, settings: DpClassifierSettings
) -> Mapping[str, Component]:
    """Spend the budget, and return the classifier.

    Args:
        access: the private images.
        base: the public bundle; None for training from scratch.
        settings: of the run.

    Raises:
        LostRank: another rank is gone.
        Stopped: a stop was requested; the state is saved.
    """
    own, device = settings.private, access.device
    network = _start(settings, access.facts.classes, base).to(device)
    select_trainable(network, own.trainable)
    optimizer = build_optimizer(network, own)
    trainer = Trainer(network, optimizer, noisy_schedule(optimizer, own.steps), ema_decay=own.ema_decay)
    public = None
    if own.public_share > 0:
        assert base is not None
        public = PublicGradient(base.component(IMAGES, LabelledImages), network, settings)
    access.train(
        CLASSIFIER,
        trainer,
        ViewLosses(settings, network, access.draws),
        [access.images, access.labels],
        execution=Execution.of(own),
        before_update=None if public is None else lambda: public.mix_in(trainer.steps_done),
    )
    network.requires_grad_(True)
    return {CLASSIFIER: network.eval()}


class ViewLosses(Objective):
    """Cross-entropies of random views, one for each row.

    Args:
        settings: the views.
        network: that is trained.
        randomness: of the views; as secret as the noise.
    """

    def __init__(self, settings: DpClassifierSettings, network: WideResNet, randomness: Randomness) -> None:
        self._views = settings.private.views
        self._network = network
        self._randomness = randomness

    def losses(self, images: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        """Losses, float (n,), for given draws; arguments as for `prepared`."""
        return self.compute(*self.prepared(images, labels, draws))

    def prepare(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """With fresh draws, what `compute` takes, of images and labels; see `prepared`."""
        images, labels = rows
        draws = self._randomness.uniform(DRAWS * len(images)).view(-1, DRAWS)
        return self.prepared(images, labels, draws)

    def prepared(self, images: Tensor, labels: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Views and labels.

        Args:
            images: uint8 (n, H, W) or (n, H, W, 3).
            labels: int64 (n,).
            draws: of the views, float (n, DRAWS).
        """
        device = self._network.head.weight.device
        x = to_unit_range(images.cpu().numpy(), device)
        return random_views(x, draws.float().to(device), self._views), labels.to(device)

    def compute(self, *prepared: Tensor) -> Tensor:
        """Losses, float (n,)."""
        views, labels = prepared
        return F.cross_entropy(self._network(views), labels, reduction="none")


def describe_private(settings: DpClassifierSettings, base: Bundle | None, budget: Budget) -> Description:
    """Describe a private bundle."""
    own = settings.private
    if base is None:
        start = "from scratch, without public images (Cold)"
    else:
        sources = ", ".join(base.config.public.sources) if base.config.public else ""
        start = f"from a warm-up on public images ({sources})"
    about = (
        f"An image classifier, trained {start}. The gradient of an image is the mean over {own.multiplicity} "
        f"random {'view' if own.multiplicity == 1 else 'views'}.\n"
    )
    if own.public_share > 0:
        about += f"In every step the gradient of public images has the weight {own.public_share:g} (WarmExt).\n"
    return Description(about, bundle_facts(settings) | {"warm_up": base is not None})


def trained_parameters(settings: DpClassifierSettings, classes: int) -> int:
    """Number of parameters that would be trained."""
    return trained_count(
        lambda: WideResNet.build(settings.image, settings.network, [str(n) for n in range(classes)]),
        settings.private.trainable,
    )


def _start(settings: DpClassifierSettings, classes: Sequence[str], base: Bundle | None) -> WideResNet:
    """The network before its first private step: that of the warm-up, or random weights."""
    if base is not None:
        return base.component(CLASSIFIER, WideResNet).with_classes(classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return WideResNet.build(settings.image, settings.network, classes)
