"""RAPID's public stage: networks, probe features and knowledge base from public images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rapid_index import KnowledgeBase, KnowledgeBaseError, check_index_type
from torch import Tensor

from rapid.bundle import Bundle, Thumbnails
from rapid.bundle.builder import BundleBuilder
from rapid.data import split_indices
from rapid.data.augmented import AugmentedImages
from rapid.data.subset import Subset
from rapid.data.thumbnails import thumbnails
from rapid.diffusion import Schedule
from rapid.errors import InputError
from rapid.files import replacing
from rapid.methods.base import Description, PublicImages
from rapid.methods.rapid.diagnosis import (
    Searched,
    as_facts,
    autoencoder_frechet,
    autoencoder_psnr,
    encoder_loss,
    findings,
    probe_accuracy,
)
from rapid.methods.rapid.knowledge_base import KIND, NAME, KnowledgeBaseRecipe, Models, build_knowledge_base
from rapid.methods.rapid.networks import (
    AutoencoderRecipe,
    DenoiserRecipe,
    EncoderRecipe,
    encode_views,
    train_autoencoder,
    train_denoiser,
    train_encoder,
)
from rapid.methods.rapid.retrieval import Recall, RetrievalAccuracy, measure_recall, measure_retrieval
from rapid.methods.rapid.settings import RapidSettings
from rapid.methods.rapid.subspace import NAME as SUBSPACE
from rapid.methods.rapid.subspace import VIEWS, Subspace, SubspaceRecipe, fit_subspace
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.probe.features import ProbeRecipe, class_prototypes, train_features
from rapid.probe.network import COMPONENT as PROBE
from rapid.probe.network import Probe, class_similarity
from rapid.ranks import Ranks
from rapid.training import Checkpoint


def train_public(builder: BundleBuilder, public: PublicImages, settings: RapidSettings) -> Description:
    """Make all components of a public bundle; components from an earlier run are not made again.

    Args:
        builder: collects the components.
        public: the public images.
        settings: the public sections are used.

    Raises:
        InputError: too few images, or faiss is missing or of a version that is not known.
        Stopped: a stop was requested; the state is saved.
    """
    if settings.retrieval.enabled:
        try:
            # fail now, not after half an hour of training
            check_index_type(settings.knowledge_base.index_type)
        except KnowledgeBaseError as error:
            raise InputError("", str(error)) from None
    pre, reference = split_indices(len(public.images), settings.split)
    if builder.ranks.first:
        with replacing(builder.out / "split.npz") as target, target.open("wb") as stream:
            np.savez(stream, pre_training=pre, reference=reference)
    stage = _Stage(builder, public, settings, pre, reference)
    autoencoder, denoiser = stage.networks()
    probe = stage.probe() if settings.probe.enabled and stage.labelled else None
    stage.subspace(autoencoder)
    searched = stage.retrieval(autoencoder, denoiser) if settings.retrieval.enabled else None
    builder.add("thumbnails", Thumbnails(thumbnails(public.images.images)))
    facts = bundle_facts(settings, None if searched is None else searched.records)
    if searched is not None:
        measured = {"retrieval": searched.accuracy, "recall": searched.recall}
        facts |= {name: found._asdict() for name, found in measured.items() if found is not None}
    facts["quality"], lines = stage.quality(autoencoder, probe, searched)
    about = _about(settings, lines, trained=builder.given is None)
    return Description(about, facts, len(pre), len(reference), tuple(lines))


def bundle_facts(settings: RapidSettings, records: int | None) -> dict[str, Any]:
    """Facts that `rapid info` shows of any RAPID bundle; without a knowledge base, `records` is None."""
    facts: dict[str, Any] = {"latent": list(settings.latent_shape), "timesteps": settings.schedule.timesteps}
    if records is not None:
        facts |= {"k": settings.retrieval.k, "v": settings.retrieval.v}
    facts["start"] = settings.late_start
    if records is not None:
        facts["knowledge_base"] = {"entries": records, "index": settings.knowledge_base.index_type}
    return facts


@dataclass(frozen=True)
class _Stage:
    """Inputs shared by the steps of the stage.

    Attributes:
        pre: indices of D_pre among the images, int64.
        reference: indices of D_ref, int64.
    """

    builder: BundleBuilder
    public: PublicImages
    settings: RapidSettings
    pre: NDArray[np.int64]
    reference: NDArray[np.int64]

    @property
    def device(self) -> torch.device:
        """Where networks are trained."""
        return self.builder.device

    @property
    def ranks(self) -> Ranks:
        """The processes that share the work."""
        return self.builder.ranks

    @property
    def labelled(self) -> bool:
        """Whether the images have classes."""
        return self.public.images.labels is not None

    @property
    def images_hash(self) -> str:
        """Hash of the images and their split."""
        return f"{self.builder.images}-{self.settings.split.model_dump_json()}"

    @property
    def labels(self) -> NDArray[np.int64]:
        """Labels of all images, int64 (N,); without labels every image has the null class."""
        images = self.public.images
        return np.full(len(images), len(images.classes), np.int64) if images.labels is None else images.labels

    def views(self, part: NDArray[np.int64], count: int) -> AugmentedImages:
        """Augmented images of D_pre or D_ref."""
        augment, own = self.settings.augmentations.augment, Subset(self.public.images.images, part)
        return AugmentedImages(own, self.public.sources[part], count, augment, self.device)

    def networks(self) -> tuple[Autoencoder, Denoiser]:
        """Make autoencoder and denoiser."""
        if (given := self.builder.given) is not None:
            return self._given_networks(given)
        s, make, classes = self.settings, self.builder.make, len(self.public.images.classes)
        shown = self.views(self.pre, s.augmentations.training)
        images, shape = self.images_hash, s.latent_shape
        views, augment = s.augmentations.training, s.augmentations.augment
        recipe = AutoencoderRecipe(
            images=images, image=s.image, views=views, augment=augment, autoencoder=s.autoencoder
        )
        autoencoder = make(
            "autoencoder",
            Autoencoder,
            recipe,
            lambda state: train_autoencoder(recipe, shown, self.device, state, self.ranks),
        ).to(self.device)
        denoiser_recipe = DenoiserRecipe(
            images=images,
            made_from={"autoencoder": recipe.digest},
            views=views,
            augment=augment,
            schedule=s.schedule,
            denoiser=s.denoiser,
            latent_shape=shape,
        )

        def denoiser_from(state: Checkpoint) -> Denoiser:
            latents = encode_views(autoencoder, shown, self.ranks)
            labels = torch.from_numpy(self.labels[self.pre[shown.rows]]).to(self.device)
            return train_denoiser(denoiser_recipe, latents, labels, classes, state, self.ranks)

        return autoencoder, make("denoiser", Denoiser, denoiser_recipe, denoiser_from).to(self.device)

    def retrieval(self, autoencoder: Autoencoder, denoiser: Denoiser) -> Searched:
        """Make trajectory encoder and knowledge base, and measure them on public images."""
        models = autoencoder, denoiser, self._encoder(autoencoder, denoiser)
        opened = self._knowledge_base(models)
        contrast = encoder_loss(self.settings, models, Subset(self.public.images.images, self.pre), self.device)
        return Searched(len(opened), contrast, self._retrieval_accuracy(models, opened), self._recall(models, opened))

    def _encoder(self, autoencoder: Autoencoder, denoiser: Denoiser) -> TrajectoryEncoder:
        """Make the trajectory encoder."""
        if (given := self.builder.given) is not None:
            return self.builder.keep("encoder", given.component("encoder", TrajectoryEncoder)).to(self.device)
        s = self.settings
        recipe = EncoderRecipe(
            images=self.images_hash,
            made_from={name: self.builder.recipes[name] for name in ("autoencoder", "denoiser")},
            schedule=s.schedule,
            encoder=s.encoder,
            latent_shape=s.latent_shape,
            k=s.retrieval.k,
        )

        def encoder_from(state: Checkpoint) -> TrajectoryEncoder:
            own = Subset(self.public.images.images, self.reference)
            return train_encoder(recipe, own, autoencoder, denoiser, self.device, state, self.ranks)

        return self.builder.make("encoder", TrajectoryEncoder, recipe, encoder_from).to(self.device)

    def _given_networks(self, given: Bundle) -> tuple[Autoencoder, Denoiser]:
        """Networks that were trained on other images; only the classes of the denoiser become those of the images.

        The embedding of a class is a blend of those of the classes that it resembles.
        """
        known = given.component("denoiser", Denoiser)
        denoiser = known.with_classes(len(self.public.images.classes))
        if self.labelled and given.has(PROBE):
            own = self._prototypes(given.component(PROBE, Probe))
            denoiser.blend_classes(known, class_similarity(own, given.component(PROBE, Probe).prototypes))
        keep = self.builder.keep
        return (
            keep("autoencoder", given.component("autoencoder", Autoencoder)).to(self.device),
            keep("denoiser", denoiser.eval()).to(self.device),
        )

    def _prototypes(self, probe: Probe) -> Tensor:
        """Mean features of the classes of D_pre, on the CPU."""
        images, labels = Subset(self.public.images.images, self.pre), self.labels[self.pre]
        count = len(self.public.images.classes)
        return class_prototypes(probe.to(self.device), images, labels, count, self.device).cpu()

    def subspace(self, autoencoder: Autoencoder) -> None:
        """Make the subspace in which moments of private images can be released."""
        s = self.settings
        recipe = SubspaceRecipe(
            images=self.images_hash,
            made_from={"autoencoder": self.builder.recipes["autoencoder"]},
            views=VIEWS,
            augment=s.augmentations.augment,
            dimensions=s.subspace.dimensions,
            examples=s.subspace.examples,
            latent_shape=s.latent_shape,
        )
        shown = self.views(self.pre, VIEWS)
        self.builder.make(
            SUBSPACE, Subspace, recipe, lambda state: fit_subspace(recipe, shown, autoencoder, self.ranks)
        )

    def probe(self) -> Probe:
        """Make the features of the probe; those of given networks get the prototypes of the images' classes."""
        if (given := self.builder.given) is not None:
            trained = given.component(PROBE, Probe)
            made = trained.with_prototypes(self._prototypes(trained).to(trained.mean.device))
            return self.builder.keep(PROBE, made.cpu()).to(self.device)
        recipe = ProbeRecipe(images=self.images_hash, image=self.settings.image, probe=self.settings.probe)

        def probe_from(state: Checkpoint) -> Probe:
            images, labels = Subset(self.public.images.images, self.pre), self.labels[self.pre]
            classes = len(self.public.images.classes)
            return train_features(recipe, images, labels, classes, self.device, state, self.ranks)

        return self.builder.make(PROBE, Probe, recipe, probe_from).to(self.device)

    def _knowledge_base(self, models: Models) -> KnowledgeBase:
        """Make the knowledge base of D_ref."""
        s, hashes = self.settings, {name: self.builder.hash_of(name) for name in ("autoencoder", "denoiser", "encoder")}
        recipe = KnowledgeBaseRecipe(
            images=self.images_hash,
            made_from={name: self.builder.recipes[name] for name in hashes},
            views=s.augmentations.reference,
            augment=s.augmentations.augment,
            schedule=s.schedule,
            knowledge_base=s.knowledge_base,
            latent_shape=s.latent_shape,
            k=s.retrieval.k,
            v=s.retrieval.v,
        )
        shown = self.views(self.reference, s.augmentations.reference)
        labels = self.labels[self.reference]
        self.builder.write(
            NAME,
            KIND,
            recipe,
            lambda folder: build_knowledge_base(folder, recipe, shown, labels, models, hashes, self.device, self.ranks),
        )
        return KnowledgeBase.open(self.builder.out / NAME, hashes, verify=False)

    def _retrieval_accuracy(self, models: Models, opened: KnowledgeBase) -> RetrievalAccuracy | None:
        """How well retrieval works; None without labels."""
        if self.public.images.labels is None:
            return None
        schedule = Schedule.build(self.settings.schedule).to(self.device)
        images, labels = Subset(self.public.images.images, self.pre), self.labels[self.pre]
        return measure_retrieval(schedule, self.settings.retrieval.k, images, labels, models, opened, self.device)

    def _recall(self, models: Models, opened: KnowledgeBase) -> Recall | None:
        """How many of the nearest records an approximate index finds; None for an exact one."""
        if self.settings.knowledge_base.index_type == "flat":
            return None
        schedule = Schedule.build(self.settings.schedule).to(self.device)
        images = Subset(self.public.images.images, self.pre)
        return measure_recall(schedule, self.settings.retrieval.k, images, models, opened, self.device)

    def quality(
        self, autoencoder: Autoencoder, probe: Probe | None, searched: Searched | None
    ) -> tuple[dict[str, Any], list[str]]:
        """What public images tell about the parts: as facts, and in words."""
        reference = Subset(self.public.images.images, self.reference)
        psnr, floor, known = autoencoder_psnr(autoencoder, reference, self.device), None, None
        if probe is not None:
            floor = autoencoder_frechet(autoencoder, probe, reference, self.device)
            known = probe_accuracy(probe, reference, self.labels[self.reference], self.device)
        steps = self.settings.denoiser.training.steps if self.builder.given is None else None
        return as_facts(psnr, floor, searched, known), findings(psnr, floor, searched, known, steps=steps)


def _about(settings: RapidSettings, lines: Sequence[str], *, trained: bool) -> str:
    """Text for the model card."""
    retrieval, T = settings.retrieval, settings.schedule.timesteps
    use = "is in the knowledge base" if retrieval.enabled else "tested them (there is no knowledge base)"
    used = "trained the networks" if trained else "trained nothing"
    steps = f"Query at step k = {retrieval.k}, value at step v = {retrieval.v}, of T = {T}."
    text = (
        f"D_pre {used}, D_ref {use}; the split is in `split.npz`. `thumbnails/` holds a grey\n"
        "thumbnail of each image, by which `train-private` sees that no private images are among them.\n\n"
        f"Latents: {'x'.join(str(n) for n in settings.latent_shape)}. {steps if retrieval.enabled else f'T = {T}.'}\n"
    )
    text += "\nMeasured on public images:\n\n" + "".join(f"- {line}\n" for line in lines)
    return text
