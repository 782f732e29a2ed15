"""Settings of the private GAN: networks, private training with its adaptive controller, sampling."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rapid.config.sections import DpSgdSettings, ImageSettings, MethodSettings, SamplingSettings, Section, TonesSettings


class DiscriminatorSettings(Section):
    """The network that is trained privately."""

    channels: int = Field(32, ge=2, description="d, channels of the first convolution; 128 in the paper")
    labels: Literal["planes", "projection"] = Field(
        "projection",
        description="how the label enters: planes beside the image, with the paper's number of parameters; projection: "
        "the last layer adds a logit of the class, which learns classes in fewer steps",
    )


class GeneratorSettings(Section):
    """The network that makes images."""

    channels: int = Field(32, ge=2, description="d, channels before the last convolution; 128 in the paper")
    latent: int = Field(128, ge=1, description="length of a latent")
    normalisation: Literal["group", "none"] = Field("group", description="group: keeps the images of a batch apart")


class ControllerSettings(Section):
    """The adaptive frequency of generator steps (Section 6.2 of the paper)."""

    floor: float = Field(0.6, ge=0, le=1, description="accuracy on fakes at which the discriminator gets more steps")
    decay: float = Field(
        0.99, ge=0, lt=1, description="of the average of accuracies; grace period: 2 / (1 - decay) generator steps"
    )


class DpGanPrivateSettings(DpSgdSettings):
    """The private stage (Algorithm 1); what the sections have in common is about the discriminator."""

    expected_batch: int = Field(128, ge=1, description="B, real images of a step on average; as many fakes")
    steps: int = Field(4000, ge=1, description="T, discriminator steps: the budget pays for these")
    learning_rate: float = Field(5e-4, gt=0, description="of the discriminator; 2e-4 in the paper")
    generator_learning_rate: float = Field(5e-4, gt=0, description="2e-4 in the paper")
    optimizer: Literal["adam"] = "adam"
    beta1: float = Field(0.5, ge=0, lt=1, description="of both Adam optimisers")
    beta2: float = Field(0.999, ge=0, lt=1, description="of both Adam optimisers")
    ema_decay: float = Field(
        0.98, ge=0, lt=1, description="of an average of the generator's weights, by generator step; 0: none, the paper"
    )
    discriminator_steps: int | None = Field(
        2, ge=1, description="n_D, discriminator steps a generator step; null: adaptive"
    )
    controller: ControllerSettings = ControllerSettings(decay=0.95)
    tones: TonesSettings = TonesSettings()
    mode_seeking: float = Field(
        0.1, ge=0, description="weight of the loss that keeps fakes of a class apart (MSGAN); 0: none, the paper"
    )


class DpGanSettings(MethodSettings):
    """All settings of a private GAN."""

    method: Literal["dp-gan"] = "dp-gan"
    image: ImageSettings = ImageSettings(size=28)
    discriminator: DiscriminatorSettings = DiscriminatorSettings()
    generator: GeneratorSettings = GeneratorSettings()
    private: DpGanPrivateSettings = DpGanPrivateSettings()
    generation: SamplingSettings = SamplingSettings(attempts=1)

    @model_validator(mode="after")
    def _size(self) -> Self:
        halvings = (self.image.size - 1).bit_length() - 2
        if halvings < 1 or self.image.size <= 3 << halvings:
            raise ValueError(
                "image.size is halved, rounded up, until 4 pixels are left: use 7 to 8, 13 to 16, 25 to 32 or 49 to "
                f"64, not {self.image.size}"
            )
        return self
