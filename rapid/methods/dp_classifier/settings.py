"""Settings of dp-classifier: the network, its public warm-up and its private stage."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rapid.config.sections import (
    DpSgdSettings,
    ImageSettings,
    MethodSettings,
    PhysicalBatch,
    Section,
    Training,
    ViewSettings,
)


class NetworkSettings(Section):
    """The wide residual network; WRN-16-4 of the paper has depth 16 and width 4."""

    depth: int = Field(16, ge=10, description="number of layers, 6 n + 4 for n blocks in each of the three stages")
    width: int = Field(1, ge=1, description="factor of the widths 16, 32, 64 of the stages")
    groups: int = Field(16, ge=1, description="of the group normalisations")
    stride: Literal[1, 2] = Field(2, description="of the first convolution; 2 takes a quarter of the time")

    @model_validator(mode="after")
    def _whole_blocks(self) -> Self:
        if (self.depth - 4) % 6:
            raise ValueError(f"depth must be 6 n + 4, such as 10, 16 or 40, not {self.depth}")
        return self


class WarmUpViews(ViewSettings):
    """Views of the warm-up."""

    # fields, not an instance with other values: a setting that is overridden must not reset the others
    rotate: float = Field(10.0, ge=0, description="degrees, uniform in +-")
    scale: float = Field(0.1, ge=0, lt=1, description="relative size, uniform in 1 +-")
    shift: int = Field(3, ge=0, description="pixels of padding on each side before a random crop to the same size")
    cutout: int = Field(8, ge=0, description="side of the square that is blanked at a random place, in pixels; 0: none")


class PrivateViews(ViewSettings):
    """Views of the private stage."""

    rotate: float = Field(8.0, ge=0, description="degrees, uniform in +-")
    scale: float = Field(0.08, ge=0, lt=1, description="relative size, uniform in 1 +-")
    shift: int = Field(2, ge=0, description="pixels of padding on each side before a random crop to the same size")


class WarmUpTraining(Training):
    """How the warm-up is trained."""

    steps: int = Field(1500, ge=1)
    learning_rate: float = Field(0.1, gt=0)
    warmup_steps: int = Field(100, ge=0, description="linear rise of the learning rate; it falls to 0 by a cosine")
    ema_decay: float = Field(0.995, ge=0, lt=1)


class WarmUpSettings(Section):
    """The public warm-up: training on public images, without privacy."""

    views: WarmUpViews = WarmUpViews()
    rho: float = Field(0.05, ge=0, description="radius of sharpness-aware minimisation; 0: plain gradients")
    optimizer: Literal["momentum", "adam"] = Field("momentum", description="momentum: gradient descent, momentum 0.9")
    weight_decay: float = Field(5e-4, ge=0)
    sets: Literal["even", "pooled"] = Field(
        "even", description="even: each public set gives as many images to a batch; pooled: each image as often"
    )
    kept: int = Field(
        2000,
        ge=0,
        description="most images of the first public set that the public bundle holds, for private.public_share",
    )
    training: WarmUpTraining = WarmUpTraining()


class ClassifierPrivateSettings(DpSgdSettings):
    """The private stage."""

    expected_batch: int = Field(1024, ge=1)
    steps: int = Field(750, ge=1)
    learning_rate: float = Field(0.3, gt=0)
    optimizer: Literal["adam", "momentum"] = Field("momentum", description="momentum: gradient descent, momentum 0.9")
    multiplicity: int = Field(
        1, ge=1, description="views of an image whose gradients are averaged before clipping; the paper: 16"
    )
    physical_batch: PhysicalBatch = Field(
        512,
        description="views in memory at a time, or auto, as many as fit: changes releases by rounding alone",
    )
    views: PrivateViews = PrivateViews()
    public_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="WarmExt: weight of the gradient of public images beside the private one; 0: private alone",
    )
    public_batch: int = Field(128, ge=1, description="public images in each step, with public_share > 0")


class DpClassifierSettings(MethodSettings):
    """All settings of a classifier.

    With a public bundle, the public sections are fixed by it; without one (Cold), they are those of the run.
    """

    public_sections: ClassVar[tuple[str, ...]] = ("image", "network", "warmup")

    method: Literal["dp-classifier"] = "dp-classifier"
    preset: str = "classifier-small"
    image: ImageSettings = ImageSettings()
    network: NetworkSettings = NetworkSettings()
    warmup: WarmUpSettings = WarmUpSettings()
    private: ClassifierPrivateSettings = ClassifierPrivateSettings()

    @model_validator(mode="after")
    def _views_fit(self) -> Self:
        for name, views in (("warmup.views", self.warmup.views), ("private.views", self.private.views)):
            if views.border == "reflect" and views.shift >= self.image.size:
                raise ValueError(f"{name}.shift must be less than image.size ({self.image.size}), not {views.shift}")
        return self
