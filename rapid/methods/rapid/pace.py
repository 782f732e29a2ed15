"""What the private stage computes beside the steps of DP-SGD, by rules of thumb, for `--minutes`."""

from __future__ import annotations

from rapid.methods.rapid.generation_settings import GenerationSettings
from rapid.methods.rapid.levels import SHARES, drawn_of_each, guides_less, levels_wanted, lowers_confidence
from rapid.methods.rapid.settings import RapidSettings

PLAIN_GRADIENT, CALL = 0.6, 0.3
"""Time of an example in training without clipping, and of a network call without gradients, relative to a per-example
gradient that is clipped; measured on the denoiser of `letters-mnist` on one CPU core."""
GUIDED = {"linear": 4, "none": 4, "kl": 9}
"""How much longer a network call takes with guidance by the probe, by kind of autoencoder."""


def typical(settings: RapidSettings) -> RapidSettings:
    """Without what comes before DP-SGD at no privacy cost, so that a measurement soon reaches its steps."""
    own = settings.private
    warmup = own.moments.warmup.model_copy(update={"steps": 1, "warmup_steps": 0})
    short = {
        "moments": own.moments.model_copy(update={"warmup": warmup}),
        "distillation": own.distillation.model_copy(update={"candidates": 0}),
    }
    return settings.model_copy(update={"private": own.model_copy(update=short)})


def other_work(settings: RapidSettings) -> float:
    """Warm-up, candidates, distillation and levels of guidance, in per-example gradients of DP-SGD that take as long.

    The overlap check and the probe are left out: their time depends on N, not on the denoiser.
    """
    own, work = settings.private, 0.0
    if own.moments.share > 0:
        work += PLAIN_GRADIENT * own.moments.warmup.steps * own.moments.warmup.batch_size
    # without a probe nothing is distilled
    if own.distillation.times and settings.probe.enabled and own.probe.share > 0:
        distillation, rounds = own.distillation, own.distillation.rounds_before + own.distillation.rounds
        drawn = distillation.candidates * candidate_work(settings, distillation.sampling or settings.generation)
        trained = PLAIN_GRADIENT * distillation.training.steps * distillation.training.batch_size
        guided = CALL * distillation.training.steps * distillation.training.batch_size
        work += rounds * (drawn + trained) + guided * bool(distillation.rounds and distillation.guidance > 1)
    return work + levels_work(settings)


def levels_work(settings: RapidSettings, classes: int = 2) -> float:
    """Time of finding levels of guidance and confidence, if all shares are tried for all classes, in the same unit.

    0 with fewer than two classes, which nothing is guided to.
    """
    probed = settings.probe.enabled and settings.private.probe.share > 0
    if not (classes > 1 and probed and levels_wanted(settings)):
        return 0.0
    plain = settings.generation.model_copy(update={"probe_guidance": 0.0})
    tried = SHARES if guides_less(settings.generation) else ()
    work = sum(candidate_work(settings, settings.generation if share else plain) for share in tried)
    work += candidate_work(settings, settings.generation) * lowers_confidence(settings.generation)
    return classes * drawn_of_each(classes) * work


def candidate_work(settings: RapidSettings, generation: GenerationSettings) -> float:
    """Time of drawing an image, in per-example gradients of DP-SGD."""
    longer = 1 if generation.guidance == 1 else 2
    if generation.probe_guidance:
        longer += GUIDED[settings.autoencoder.kind] - 1
    return CALL * generation.steps * longer
