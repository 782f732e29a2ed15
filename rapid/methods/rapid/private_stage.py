"""RAPID's private stage (Algorithm 2): overlap check, probe, and DP-SGD of the late denoising steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.bundle import Bundle, Component, Thumbnails
from rapid.data import to_unit_range
from rapid.diffusion import Schedule
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.budget import Budget
from rapid.dp.execution import Execution
from rapid.dp.overlap import NAME as OVERLAP
from rapid.dp.overlap import check_overlap, overlap_note, overlap_spec
from rapid.dp.releases import DpSgdSpec, QuerySpec
from rapid.dp.rows import PrivateTensor
from rapid.dp.training_spec import training_spec
from rapid.errors import InputError
from rapid.methods.base import Description
from rapid.methods.rapid.candidates import draw_candidates
from rapid.methods.rapid.class_moments import ClassMoments
from rapid.methods.rapid.distillation import distil
from rapid.methods.rapid.generator import RapidSampler
from rapid.methods.rapid.guidance import NAME as LEVELS
from rapid.methods.rapid.knowledge_base import NAME as KNOWLEDGE_BASE
from rapid.methods.rapid.knowledge_base import open_knowledge_base, open_retrieval
from rapid.methods.rapid.levels import fit_levels, levels_wanted
from rapid.methods.rapid.moments import NAME as MOMENTS
from rapid.methods.rapid.moments import moments_specs, release_moments
from rapid.methods.rapid.networks import build_denoiser
from rapid.methods.rapid.objectives import PrivateObjective, Retriever, trained_timesteps, uses_retrieval
from rapid.methods.rapid.parts import Parts
from rapid.methods.rapid.public_stage import bundle_facts
from rapid.methods.rapid.settings import RapidSettings
from rapid.methods.rapid.subspace import NAME as SUBSPACE
from rapid.methods.rapid.subspace import Subspace
from rapid.methods.rapid.transport import MovedLatents
from rapid.methods.rapid.votes import NAME as VOTES
from rapid.methods.rapid.votes import release_votes, votes_spec
from rapid.methods.rapid.warmup import warm_up
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.precision import exact_float32
from rapid.probe.head import NAME as PROBE
from rapid.probe.head import probe_spec, train_head
from rapid.probe.network import Probe
from rapid.tones.curve import NAME as TONES
from rapid.tones.curve import ToneCurve
from rapid.tones.fit import tone_curve
from rapid.tones.release import release_tones, tones_specs
from rapid.training import Trainer
from rapid.training.optimizers import build_optimizer, noisy_schedule, select_trainable, trained_count

DENOISER = "denoiser"
OBJECTIVES = {
    "rapid": "late denoising steps, trained from retrieved public intermediates (Eq. 5 of the RAPID paper)",
    "late": "late denoising steps, trained with Gaussian noise",
    "ldm": "all denoising steps, trained with the plain diffusion loss",
}


def releases(settings: RapidSettings, facts: PublicFacts, base: Bundle | None) -> Sequence[DpSgdSpec | QuerySpec]:
    """Overlap check, probe, moments, denoiser, votes and tones; most only if they are enabled and possible.

    Args:
        settings: shares of epsilon, steps, batch, clip norms.
        facts: public facts of the private images.
        base: the public bundle; None before it exists: it is then assumed to fit.

    Raises:
        InputError: settings that do not fit the base or the images.
    """
    own, size = settings.private, facts.dataset_size
    if base is not None:
        check_base(base, settings)
    specs: list[DpSgdSpec | QuerySpec] = []
    if own.overlap.share > 0:
        specs.append(overlap_spec(size, own.overlap.share, facts.unit))
    has_probe = settings.probe.enabled if base is None else base.has(PROBE)
    # with one class there is nothing to tell apart
    judged = has_probe and len(facts.classes) > 1 and own.probe.share > 0
    if judged:
        specs.append(probe_spec(size, own.probe))
    specs += moments_specs(own.moments, size)
    specs.append(training_spec(DENOISER, OBJECTIVES[own.objective], own, facts))
    if judged and "after" in own.distillation.times and own.distillation.votes_share > 0:
        specs.append(votes_spec(own.distillation.votes_share, size))
    return [*specs, *tones_specs(own.tones, size)]


def train_private(access: PrivateAccess, base: Bundle | None, settings: RapidSettings) -> Mapping[str, Component]:
    """Spend the budget, and return the components of the private bundle.

    Args:
        access: the private images.
        base: the public bundle.
        settings: of the run.

    Raises:
        PrivacyRefused: private images are among the public ones.
        LostRank: another rank is gone.
        Stopped: a stop was requested; the state is saved.
    """
    assert base is not None
    own, components = settings.private, _copied(base)
    if OVERLAP in access.budget.names:
        check_overlap(access, base.component("thumbnails", Thumbnails).rows)
    probe = None
    if PROBE in access.budget.names:
        probe = train_head(
            access,
            base.component(PROBE, Probe),
            own.probe,
            checkpoint_seconds=own.checkpoint_seconds,
            noise_source=own.noise_source,
        )
        components[PROBE] = probe
    autoencoder = base.component("autoencoder", Autoencoder).to(access.device)

    @exact_float32()
    def encode(images: Tensor) -> Tensor:
        return autoencoder.encode(to_unit_range(images.numpy(), access.device))

    latents = access.map(encode, access.images, title="latents")
    moments, moved, frequencies = None, None, None
    if MOMENTS in access.budget.names:
        subspace = base.component(SUBSPACE, Subspace).to(access.device)
        moments, frequencies = release_moments(access, latents, subspace, own.moments.covariance)
        components[MOMENTS] = moments
        if _moves_public(settings) and subspace.examples is not None:
            moved = MovedLatents(moments.to(access.device), subspace.examples)
    denoiser = _train_denoiser(access, latents, base, settings, probe, moments, moved)
    parts = _parts(access, base, settings, denoiser, probe, moments)
    if "after" in own.distillation.times and probe is not None:
        # it takes all steps now, as `Parts.of` has it
        denoiser = _distil(access, parts, probe).eval()
        parts = replace(parts, denoiser=denoiser, private_from=settings.schedule.timesteps)
    components[DENOISER] = denoiser
    return components | _finish(access, parts, frequencies if access.facts.classes else None)


def _finish(access: PrivateAccess, parts: Parts, frequencies: NDArray[np.float64] | None) -> dict[str, Component]:
    """Curve of tones and levels of guidance, as far as they are wanted.

    The probe judges images with tones, so a curve for fully guided images comes before the levels. Images that are
    guided less have other tones: with the levels, the curve is fitted once more to the same release.
    """
    toned = TONES in access.budget.names
    # the only release here, and all ranks take part; what follows is the first one's
    released = release_tones(access) if toned else None
    if not access.ranks.first:
        return {}
    drawn = parts.settings.generation.model_copy(update={"attempts": 1})

    def curve(parts: Parts) -> ToneCurve:
        return tone_curve(access, lambda: RapidSampler(parts, access.device, drawn), released, frequencies)

    components: dict[str, Component] = {}
    if parts.probe is not None and levels_wanted(parts.settings):
        levels = fit_levels(replace(parts, tones=curve(parts) if toned else None), access.device)
        parts, components = replace(parts, levels=levels), {LEVELS: levels}
    return components | ({TONES: curve(parts)} if toned else {})


def _distil(access: PrivateAccess, parts: Parts, probe: Probe) -> Denoiser:
    """Select and distil after DP-SGD, on the first rank; all ranks vote."""
    first, votes = access.ranks.first, None
    candidates = draw_candidates(parts, access.device) if first else None
    if VOTES in access.budget.names:
        checkpoint = access.post_processing(f"{VOTES}-clusters") if first else None
        votes = release_votes(access, probe.to(access.device), candidates, checkpoint)
    if not first:
        return parts.denoiser
    return distil(parts, access.device, access.post_processing, candidates=candidates, votes=votes)


def describe_private(settings: RapidSettings, base: Bundle | None, budget: Budget) -> Description:
    """Describe a private bundle."""
    assert base is not None
    objective = settings.private.objective
    probe = ", and the linear layer of the probe, which labels what is sampled" if PROBE in budget.names else ""
    sources = ", ".join(base.config.public.sources) if base.config.public else ""
    about = f"Trained privately: {OBJECTIVES[objective]}{probe}.\n"
    about += f"Everything else comes from public images ({sources}): autoencoder, the features of the probe, "
    found = open_retrieval(base)
    if found is None:
        about += "and\nthe denoiser of the early steps. Retrieval is off: there is no knowledge base.\n"
    else:
        about += "encoder,\nknowledge base, and the denoiser that makes queries. "
        about += "Images can show traits of public neighbours.\n"
    times = " and ".join(settings.private.distillation.times).capitalize()
    if times and PROBE in budget.names:
        about += f"{times} DP-SGD the denoiser was trained on those of its own images that the probe was surest of.\n"
    records = None if found is None else len(found.knowledge_base)
    facts = bundle_facts(settings, records) | {"objective": objective}
    return Description(about, facts)


def privacy_notes(budget: Budget) -> Sequence[str]:
    """The note on the overlap check."""
    return [overlap_note(budget)]


def trained_parameters(settings: RapidSettings, classes: int) -> int:
    """Number of parameters of the denoiser that would be trained."""
    return trained_count(lambda: build_denoiser(settings, classes), settings.private.trainable)


def check_base(base: Bundle | None, settings: RapidSettings) -> None:
    """Check that the base fits the settings, before anything is spent.

    Raises:
        InputError: it does not.
    """
    assert base is not None
    select_trainable(base.component(DENOISER, Denoiser), settings.private.trainable)
    if settings.private.overlap.share > 0:
        base.component("thumbnails", Thumbnails)
    if settings.private.moments.share > 0 and not base.has(SUBSPACE):
        problem = "--base was made without the subspace that moments need; build it again"
        raise InputError("private.moments.share", problem, settings.private.moments.share)
    if settings.private.moments.share == 0:
        sampling = settings.private.distillation.sampling
        for name, own in (("generation", settings.generation), ("private.distillation.sampling", sampling)):
            if own is not None and own.retrieval == "moments":
                problem = "needs released moments; set private.moments.share above 0, or choose another"
                raise InputError(f"{name}.retrieval", problem, "moments")
    lowest, highest = settings.private.moments.warmup_from, trained_timesteps(settings)
    if settings.private.moments.share > 0 and lowest > highest:
        problem = f"is above {highest}, the last timestep that is trained privately; lower it, or raise private.start"
        raise InputError("private.moments.warmup_from", problem, lowest)
    if _moves_public(settings) and base.component(SUBSPACE, Subspace).examples is None:
        problem = "--base keeps no latents of public images; build it with subspace.examples above 0, or use gaussian"
        raise InputError("private.moments.warmup_on", problem, "public")
    found = open_retrieval(base)
    if found is not None and settings.private.neighbours > (records := len(found.knowledge_base)):
        raise InputError("private.neighbours", f"--base has {records:,} records", settings.private.neighbours)


def _moves_public(settings: RapidSettings) -> bool:
    moments = settings.private.moments
    return moments.share > 0 and moments.warmup_on == "public"


def _copied(base: Bundle) -> dict[str, Component]:
    """The public components, copied so that the private bundle is self-contained."""
    names = [name for name in ("autoencoder", "encoder", KNOWLEDGE_BASE) if base.has(name)]
    copied: dict[str, Component] = {name: base.stored(name) for name in names}
    return copied | {"public_denoiser": base.stored(DENOISER)}


def _train_denoiser(
    access: PrivateAccess,
    latents: PrivateTensor,
    base: Bundle,
    settings: RapidSettings,
    probe: Probe | None,
    moments: ClassMoments | None,
    moved: MovedLatents | None,
) -> Denoiser:
    """Fine-tune the denoiser. Class embeddings start as blends of the public classes that the probe finds similar."""
    own, device = settings.private, access.device
    public = base.component(DENOISER, Denoiser)
    denoiser = public.with_classes(len(access.facts.classes)).to(device)
    if probe is not None:
        denoiser.blend_classes(public, probe.resemblance())
    select_trainable(denoiser, own.trainable)
    # the other ranks get the first one's weights when DP-SGD begins
    if moments is not None and access.ranks.first:
        latents_of = moments.to(device) if moved is None else moved
        warm_up(denoiser, latents_of, settings, access.post_processing("warm-up"))
    if "before" in own.distillation.times and probe is not None and access.ranks.first:
        parts = _parts(access, base, settings, denoiser, probe, moments)
        denoiser.load_state_dict(distil(parts, device, access.post_processing, "before").state_dict())
    labels = (
        access.map(lambda numbers: numbers.to(device), access.labels)
        if access.facts.classes
        else access.map(lambda images: denoiser.null_labels(len(images)), access.images)
    )
    objective = PrivateObjective(settings, denoiser, _retriever(base, settings, device), access.draws)
    optimizer = build_optimizer(denoiser, own)
    access.train(
        DENOISER,
        Trainer(denoiser, optimizer, noisy_schedule(optimizer, own.steps), ema_decay=own.ema_decay),
        objective,
        [latents, labels],
        execution=Execution.of(own),
    )
    return denoiser


def _parts(
    access: PrivateAccess,
    base: Bundle,
    settings: RapidSettings,
    denoiser: Denoiser,
    probe: Probe | None,
    moments: ClassMoments | None,
) -> Parts:
    """What candidates are drawn with: results of releases, and public components."""
    return Parts(
        settings=settings,
        kind="private",
        classes=access.facts.classes,
        image_shape=settings.image.shape,
        autoencoder=base.component("autoencoder", Autoencoder),
        denoiser=denoiser.eval(),
        public_denoiser=base.component(DENOISER, Denoiser),
        retrieval=open_retrieval(base),
        probe=probe,
        moments=moments,
        private_from=trained_timesteps(settings),
    )


def _retriever(base: Bundle, settings: RapidSettings, device: torch.device) -> Retriever | None:
    if not uses_retrieval(settings):
        return None
    return Retriever(
        schedule=Schedule.build(settings.schedule).to(device),
        denoiser=base.component(DENOISER, Denoiser).to(device).requires_grad_(False),
        encoder=base.component("encoder", TrajectoryEncoder).to(device),
        knowledge_base=open_knowledge_base(base),
        k=settings.retrieval.k,
        neighbours=settings.private.neighbours,
    )
