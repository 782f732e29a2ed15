"""Settings of selection and distillation with RAPID."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rapid.config.sections import AugmentSettings, Section, Training
from rapid.methods.rapid.generation_settings import GenerationSettings

When = Literal["before", "after"]
"""DP-SGD."""


class DistillationSettings(Section):
    """Select and distil: the denoiser trains on those of its own images that the probe is surest of."""

    candidates: int = Field(
        0, ge=0, description="images that the probe judges in each round, at no privacy cost; 0: no distillation"
    )
    rounds: int = Field(1, ge=0, description="of drawing, judging and training after DP-SGD")
    rounds_before: int = Field(
        0, ge=0, description="the same before DP-SGD, which then begins from a denoiser that knows the classes"
    )
    keep: float = Field(
        0.3, gt=0, le=1, description="share of the images that the probe takes for their class that is kept: the surest"
    )
    least_accepted: float = Field(
        0.0,
        ge=0,
        le=1,
        description="where the probe takes a smaller share for their class, nothing is distilled before DP-SGD; "
        "only with rounds=0",
    )
    votes_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="of epsilon that votes of the private images for clusters of candidates would spend by themselves: "
        "after DP-SGD images are trained on as often as the votes say; 0: all that are kept equally often",
    )
    views: int = Field(1, ge=0, description="random views of each kept image that are trained on beside it")
    augment: AugmentSettings = AugmentSettings(rotate=8.0, scale=0.1, shift=0.04)
    label_dropout: float = Field(0.1, ge=0, le=1, description="share of examples trained with the null class")
    guidance: float = Field(
        1.0, ge=1, description="classifier-free guidance that the last round after DP-SGD trains in; 1: none"
    )
    sampling: GenerationSettings | None = Field(
        None, description="how the candidates of a first round are drawn; None: by `generation`, as later ones"
    )
    training: Training = Training(steps=1000, batch_size=256, ema_decay=0.99)

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        # which denoiser makes the early steps depends on whether there was a round after DP-SGD
        if self.least_accepted and self.rounds:
            raise ValueError(f"least_accepted must be 0 with rounds after DP-SGD, not {self.least_accepted:g}")
        if self.guidance > 1 and not self.label_dropout:
            raise ValueError("guidance must be 1 without label_dropout, which trains the null class")
        return self

    @property
    def times(self) -> tuple[When, ...]:
        """When there are rounds, before or after DP-SGD."""
        rounds: dict[When, int] = {"before": self.rounds_before, "after": self.rounds}
        return tuple(when for when, count in rounds.items() if count and self.candidates)
