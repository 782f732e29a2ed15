"""Settings of sampling with RAPID."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rapid.config.sections import SamplingSettings

WITHOUT_RECORDS = "must be none or moments without a knowledge base (retrieval.enabled=false)"
"""What `generation.retrieval` must be."""


class GenerationSettings(SamplingSettings):
    """How images are sampled."""

    confidence: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability of its class by the private probe that a candidate needs to be accepted; 0: it is "
        "enough that no other class is likelier. To raise it after training, set least_accepted=0, too",
    )
    sampler: Literal["ddim", "pndm", "dpm-solver++"] = "ddim"
    steps: int = Field(
        100,
        ge=1,
        description="network calls from T to 0 if nothing were skipped; T // steps apart: a rest makes more of them",
    )
    retrieval: Literal["query", "class", "moments", "none"] = Field(
        "query",
        description="how the start of the late steps is found: by a query of step k (the paper), or a record of a "
        "public class that looks like the wanted one (no early steps; without a probe: query); moments: drawn from the "
        "released moments of the wanted class, from noise in a public bundle, which has none; none: from noise",
    )
    guidance: float = Field(
        1.0,
        ge=0,
        description="classifier-free guidance, s of eps(null) + s (eps(label) - eps(null)): 1 is off (in dpdm: 0); "
        "train with label_dropout > 0",
    )
    probe_guidance: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability of the wanted class by the private probe, where there is one, up to which it pulls "
        "images towards that class; 0 is off; helps where the denoiser knows classes less well than the probe",
    )
    enough_accepted: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of its candidates that is enough: a class of which the probe accepts as many is guided less "
        "than probe_guidance says, or not at all. Found at the end of training; later only 0, all classes are guided "
        "alike, makes a difference",
    )
    least_accepted: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of candidates, of all classes together, that is to be accepted: confidence is lowered as "
        "far as that takes, so that images need fewer of them. Found at the end of training; later only 0, confidence "
        "as it is set, makes a difference",
    )
    start: int | None = Field(
        None,
        ge=1,
        description="timestep, retrieval.v to private.start, at which images begin; None: where training did",
    )
    clip_range: float | None = Field(
        None,
        gt=0,
        description="denoised latents are clipped to +- this number in every step (latents have variance 1): small "
        "errors of the network become large ones where noise dominates; None: not clipped",
    )
    epsilon_scale: float = Field(
        1.0, gt=0, description="the noise that is predicted is divided by this; more than 1: more varied, less clean"
    )
    public_below: int = Field(
        0,
        ge=0,
        description="steps below this timestep, the last ones, are the public denoiser's, without classes: they decide "
        "no class, and DP-SGD leaves grain there; 0: none of them",
    )
    gpu_index: bool = Field(
        False,
        description="with a knowledge base of index type ivf on --device cuda: let faiss search it on the GPU, where "
        "the installed faiss can; an image may then depend on those made beside it",
    )

    @property
    def uses_records(self) -> bool:
        """Whether images begin from records of the knowledge base."""
        return self.retrieval in ("query", "class")
