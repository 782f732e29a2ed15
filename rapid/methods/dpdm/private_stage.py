"""DPDM's private stage: DP-SGD of a denoiser from random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rapid.bundle import Component
from rapid.diffusion.preconditioning import Configuration
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.budget import Budget
from rapid.dp.execution import Execution
from rapid.dp.releases import DpSgdSpec, QuerySpec
from rapid.dp.training_spec import training_spec
from rapid.methods.base import Description
from rapid.methods.dpdm.generator import DpdmSampler, can_guide
from rapid.methods.dpdm.networks import CHOSEN_FOR, DENOISER, build_denoiser
from rapid.methods.dpdm.objective import DenoisingObjective
from rapid.methods.dpdm.settings import DpdmSettings
from rapid.methods.dpdm.tuned import configuration_for
from rapid.nn.preconditioned import PreconditionedDenoiser
from rapid.tones.fit import released_tones
from rapid.tones.release import tones_specs
from rapid.training import Trainer
from rapid.training.optimizers import build_optimizer, noisy_schedule, select_trainable, trained_count


def releases(settings: DpdmSettings, facts: PublicFacts) -> Sequence[DpSgdSpec | QuerySpec]:
    """The denoiser, and tones if they have a share.

    Raises:
        InputError: settings that do not fit the images, or `private.trainable` matches no parameter.
    """
    trained_parameters(settings, len(facts.classes))
    can_guide(settings, facts.classes, settings.generation, private=True)
    title = "all weights of the denoiser, trained at random noise levels"
    denoiser = training_spec(DENOISER, title, settings.private, facts)
    return [denoiser, *tones_specs(settings.private.tones, facts.dataset_size)]


def train_private(access: PrivateAccess, settings: DpdmSettings) -> Mapping[str, Component]:
    """Train the denoiser, and fit tones to it if they are wanted.

    Raises:
        LostRank: another rank is gone.
        Stopped: a stop was requested; the state is saved.
    """
    own, classes = settings.private, access.facts.classes
    configuration = chosen_configuration(settings, access.budget.epsilon)
    denoiser = new_denoiser(settings, len(classes), configuration).to(access.device)
    select_trainable(denoiser, own.trainable)
    optimizer = build_optimizer(denoiser, own)
    schedule = noisy_schedule(optimizer, own.steps, own.learning_rate_schedule)
    access.train(
        DENOISER,
        Trainer(denoiser, optimizer, schedule, ema_decay=own.ema_decay),
        DenoisingObjective(denoiser, own.label_dropout, access.draws, own.level_scale),
        [access.images, access.labels] if classes else [access.images],
        execution=Execution.of(own),
    )
    return {DENOISER: denoiser} | released_tones(
        access,
        lambda: DpdmSampler(
            denoiser, settings, access.facts.classes, access.budget.epsilon, access.device, settings.generation
        ),
    )


def new_denoiser(settings: DpdmSettings, classes: int, configuration: Configuration) -> PreconditionedDenoiser:
    """A denoiser with random weights for private training."""
    return build_denoiser(settings, classes, configuration, settings.private.sigma_data, settings.network.patch)


def chosen_configuration(settings: DpdmSettings, epsilon: float) -> Configuration:
    """That of the settings, or the one for this epsilon."""
    own = settings.private.configuration
    return configuration_for(epsilon) if own == "auto" else own


def describe_private(settings: DpdmSettings, budget: Budget) -> Description:
    """Describe a private bundle."""
    configuration = chosen_configuration(settings, budget.epsilon)
    about = (
        "Trained privately from random weights, without public images: a diffusion model on pixels that predicts\n"
        f"images at all noise levels, in the configuration `{configuration}`, with noise multiplicity K = "
        f"{settings.private.multiplicity}.\n"
    )
    facts = {
        "configuration": configuration,
        CHOSEN_FOR: budget.epsilon,
        "sigma_data": settings.private.sigma_data,
        "multiplicity": settings.private.multiplicity,
    }
    return Description(about, facts)


def trained_parameters(settings: DpdmSettings, classes: int) -> int:
    """Number of parameters of the denoiser that would be trained."""
    return trained_count(lambda: new_denoiser(settings, classes, "edm"), settings.private.trainable)
