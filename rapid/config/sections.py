"""Sections of settings that methods share: typed, frozen, with units and ranges.

A method's settings (`rapid.methods.NAME.settings`) are a `MethodSettings` made of these and of its own sections.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticKnownError


def _number_or_auto(value: object) -> object:
    # by itself, because a union's errors name its members
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError("use a whole number of at least 1, or auto")


Multipliers = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
"""Widths at each resolution, finest first, in units of `channels`."""
RateSchedule = Literal["constant", "cosine"]
"""Of the learning rate of a private training."""
PhysicalBatch = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto)]
ANY_BATCH = 256
"""Draws at a time where `auto` is chosen and nothing is measured."""
LEAST_SIGNAL = 1e-4
"""Share of an image at the last timestep, sqrt(abar_T): below it estimates of images are rounding errors."""


class Section(BaseModel):
    """Base of all settings: immutable; unknown names are errors, and so are numbers that JSON cannot keep."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where a number is meant: they would count as 1 and 0."""
        values = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(one, bool) for one in values) and info.field_name is not None:
            kinds = _kinds(cls.model_fields[info.field_name].annotation)
            if bool not in kinds and (number := next((kind for kind in (int, float) if kind in kinds), None)):
                raise PydanticKnownError("int_type" if number is int else "float_type")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The type, and all that are named within it, as of a union or a tuple."""
    return {annotation}.union(*map(_kinds, get_args(annotation)))


class Training(Section):
    """How one public network is trained."""

    steps: int = Field(1000, ge=1)
    batch_size: int = Field(128, ge=2)
    learning_rate: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(
        50,
        ge=0,
        description="linear rise of the learning rate, at most half of the steps; then it falls to 0 by a cosine",
    )
    ema_decay: float = Field(0.999, ge=0, lt=1)
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="of matrix products and convolutions; auto: bfloat16 on GPUs that have it, float32 on CPUs. "
        "The trajectory encoder is always trained in float32",
    )

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the default precision, which the records of earlier versions do not name."""
        found: dict[str, Any] = handler(self)
        if self.precision == "auto":
            found.pop("precision", None)
        return found


class ImageSettings(Section):
    """The form into which every image is brought before the autoencoder sees it."""

    size: int = Field(32, ge=4, description="height and width in pixels")
    channels: Literal[1, 3] = 1
    fit: Literal["pad", "contain", "resize"] = Field(
        "pad",
        description="pad: centred on black, larger images are refused; contain: the same, larger images are scaled "
        "down first and keep their aspect ratio; resize: scaled to the size, whatever their aspect ratio",
    )

    @property
    def shape(self) -> tuple[int, ...]:
        """(H, W) or (H, W, 3)."""
        return (self.size, self.size) + ((3,) if self.channels == 3 else ())


class SplitSettings(Section):
    """Disjoint parts of the public images: D_pre trains the networks, D_ref fills the knowledge base."""

    reference: float = Field(0.2, gt=0, lt=1, description="share of the public images in D_ref")
    seed: int = Field(0, ge=0)


class AugmentSettings(Section):
    """A random view of an image; the defaults suit letters and digits."""

    rotate: float = Field(10.0, ge=0, description="degrees, uniform in +-")
    size: float = Field(1.0, gt=0, description="middle of the relative size")
    scale: float = Field(0.15, ge=0, lt=1, description="relative size over its middle, uniform in 1 +-")
    shift: float = Field(0.08, ge=0, lt=1, description="share of the side, uniform in +-")
    flip: bool = Field(False, description="mirror left to right: not for letters")
    brightness: float = Field(0.0, ge=0, lt=1, description="relative gain, uniform in 1 +-")
    border: Literal["black", "reflect"] = Field(
        "black", description="pixels from outside the image: black suits white strokes, reflect photographs"
    )


class AugmentationSettings(Section):
    """Random views of the public images, the public sets in equal parts: more variety where there are few images."""

    training: int = Field(
        0, ge=0, description="views of D_pre for the autoencoder and the denoiser; 0: the images as they are"
    )
    reference: int = Field(0, ge=0, description="views of D_ref in the knowledge base; 0: the images as they are")
    augment: AugmentSettings = AugmentSettings()


class ViewSettings(Section):
    """Random views of an image: rotation and scale, crop after padding, mirroring, Cutout."""

    rotate: float = Field(0.0, ge=0, description="degrees, uniform in +-")
    size: float = Field(1.0, gt=0, description="middle of the relative size")
    scale: float = Field(0.0, ge=0, lt=1, description="relative size over its middle, uniform in 1 +-")
    shift: int = Field(0, ge=0, description="pixels of padding on each side before a random crop to the same size")
    flip: bool = Field(False, description="mirror half of the views left to right: not for letters and digits")
    cutout: int = Field(0, ge=0, description="side of the square that is blanked at a random place, in pixels; 0: none")
    border: Literal["black", "reflect"] = Field(
        "black", description="pixels from outside the image: black suits white strokes, reflect photographs"
    )


class ScheduleSettings(Section):
    """The variance schedule, "scaled linear": beta_t = (linear from sqrt(start) to sqrt(end)) squared."""

    timesteps: int = Field(1000, ge=2, description="T")
    beta_start: float = Field(0.0015, gt=0, lt=1)
    beta_end: float = Field(0.0155, gt=0, lt=1)

    @model_validator(mode="after")
    def _signal_is_left(self) -> Self:
        signal = math.exp(sum(math.log1p(-self.beta(t / (self.timesteps - 1))) for t in range(self.timesteps)) / 2)
        if signal < LEAST_SIGNAL:
            problem = f"at step {self.timesteps} the noise leaves {signal:.1g} of an image, less than {LEAST_SIGNAL:g}"
            raise ValueError(f"{problem}: choose a smaller beta_start, beta_end or timesteps")
        return self

    def beta(self, way: float) -> float:
        """Of the timestep that is this share of the way from the first to the last."""
        return ((1 - way) * math.sqrt(self.beta_start) + way * math.sqrt(self.beta_end)) ** 2


class AutoencoderSettings(Section):
    """KL autoencoder (diffusers AutoencoderKL), principal components of patches, or `none` to diffuse pixels."""

    kind: Literal["kl", "linear", "none"] = Field(
        "kl",
        description="kl: AutoencoderKL; linear: the first latent_channels principal components of patches of pixels, "
        "from a closed form; none: pixels",
    )
    patch: int = Field(1, ge=1, description="pixels of patch x patch become channels first: faster, for small machines")
    latent_channels: int = Field(3, ge=1)
    decoder_noise: float = Field(
        0.0,
        ge=0,
        description="linear: a patch is decoded from the latents around it, too, by least squares for latents with "
        "noise of this standard deviation; 0: from its own alone",
    )
    channels: int = Field(32, ge=1)
    multipliers: Multipliers = (1, 2, 2)
    blocks: int = Field(1, ge=1, description="residual blocks at each resolution")
    attention: tuple[int, ...] = Field((), description="resolutions with self-attention; if any, the middle block too")
    kl_weight: float = Field(1e-6, ge=0)
    training: Training = Training()

    @property
    def reduction(self) -> int:
        """Side of an image over side of its latent."""
        if self.kind == "kl":
            return self.patch << (len(self.multipliers) - 1)
        return self.patch if self.kind == "linear" else 1


class DenoiserSettings(Section):
    """The U-Net eps_theta(x_t, t, label), conditioned by an added embedding or by cross-attention."""

    channels: int = Field(32, ge=1)
    multipliers: Multipliers = (1, 2)
    blocks: int = Field(1, ge=1)
    attention: tuple[bool, ...] = Field((True, True), description="attention at each resolution, finest first")
    heads: int = Field(4, ge=1, description="attention heads; with embedding, those of the finest resolution")
    transformer_depth: int = Field(1, ge=1, description="transformer layers an attention block, for cross-attention")
    conditioning: Literal["embedding", "cross-attention"] = "embedding"
    context_dim: int = Field(5, ge=1, description="width of the class embedding for cross-attention")
    label_dropout: float = Field(0.1, ge=0, le=1, description="share of examples trained with the null class")
    training: Training = Training()

    @model_validator(mode="after")
    def _same_depth(self) -> Self:
        if len(self.attention) != len(self.multipliers):
            raise ValueError("attention needs one entry for each of multipliers")
        if self.channels % self.heads:
            raise ValueError(f"channels ({self.channels}) must be divisible by heads ({self.heads})")
        return self


class ProbeSettings(Section):
    """The probe: features from the classes of public images, on which a linear layer is trained privately."""

    enabled: bool = Field(True, description="train one if the public images have labels")
    channels: int = Field(32, ge=1)
    features: int = Field(256, ge=2, description="principal components of the maps of each stage")
    stages: int = Field(1, ge=1, description="of the trunk, from the last one back, whose maps are used")
    augment: AugmentSettings = AugmentSettings(rotate=15.0, scale=0.2)
    training: Training = Training(steps=2500, ema_decay=0.998)


class PrivateProbeSettings(Section):
    """Private training of the probe's linear layer: all images in every step, gradient descent with momentum."""

    share: float = Field(0.4, ge=0, lt=1, description="of epsilon that it would spend by itself; 0: no probe")
    steps: int = Field(500, ge=1)
    clip_norm: float = Field(0.1, ge=1e-8)
    weight_noise: float = Field(
        2.0, gt=0, description="standard deviation that the noise of all steps gives a weight: sets the learning rate"
    )


class OverlapSettings(Section):
    """The check that no private images are among the public ones, before anything is trained."""

    share: float = Field(0.05, ge=0, lt=1, description="of epsilon that it would spend by itself; 0: no check")


class PrivateSettings(Section):
    """Any private stage. Only public numbers: nothing here may be derived from private images."""

    group_size: int = Field(
        1, ge=1, description="images of one person, for whom epsilon is told too, if images are the units"
    )
    noise_source: Literal["chacha20", "device"] = Field(
        "chacha20", description="chacha20: a stream cipher; device: the GPU's own generator, faster, not cryptographic"
    )
    checkpoint_seconds: float = Field(
        60.0,
        ge=0,
        le=1e7,
        description="how often the training state is saved; less often where saving takes over 2 % of the time; "
        "0: after each step",
    )


class TonesSettings(Section):
    """The mean histogram of the pixels of private images, released once; generated images get the same tones."""

    share: float = Field(
        0.0, ge=0, lt=1, description="of epsilon that it would spend by itself; 0: images keep the tones of the model"
    )


class DpSgdSettings(PrivateSettings):
    """DP-SGD of a method's main network."""

    expected_batch: int = Field(1024, ge=1)
    steps: int = Field(500, ge=1)
    clip_norm: float = Field(1.0, ge=1e-8, le=1e8)
    learning_rate: float = Field(1e-3, gt=0)
    ema_decay: float = Field(0.99, ge=0, lt=1)
    trainable: tuple[str, ...] = Field(
        ("*",), min_length=1, description="patterns of the parameter names that are trained"
    )
    optimizer: Literal["adam", "momentum"] = Field("adam", description="momentum: gradient descent, momentum 0.9")
    multiplicity: int = Field(
        1,
        ge=1,
        description="draws of noise and timestep averaged for each image, before clipping; for people: of their images",
    )
    noise_band: int = Field(
        1, ge=1, description="steps over which the noise is correlated, while images take turns; 1: independent noise"
    )
    physical_batch: PhysicalBatch = Field(
        256,
        description="draws in memory at a time, or auto, as many as fit: changes releases by rounding alone",
    )
    pad_batches: bool = Field(
        False,
        description="compute as many gradients in each step, so that its time does not tell the size of the batch",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="of the network's forward and backward pass; clipped sums and noise are float64. "
        "bfloat16: on GPUs only, with batches that are padded to whole pieces of physical_batch",
    )

    @property
    def draws_at_a_time(self) -> int:
        """`physical_batch`, or a moderate number for `auto`: for what is not measured."""
        return self.physical_batch if isinstance(self.physical_batch, int) else ANY_BATCH

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the default noise band, which the records of earlier versions do not name."""
        found: dict[str, Any] = handler(self)
        if self.noise_band == 1:
            found.pop("noise_band", None)
        return found


class SamplingSettings(Section):
    """How many candidates are drawn for an image, and how many at a time."""

    attempts: int = Field(8, ge=1, description="candidates for an image, at most on average; 1: no probe")
    batch_size: int = Field(256, ge=1)


LATER = ("method", "preset", "private", "generation")
"""Settings that no public bundle fixes; it has its method and names its preset anyway."""


class MethodSettings(Section):
    """Base of the settings of a method, which are told apart by `method`.

    Class attributes:
        public_sections: what the public stage uses: fixed by a public bundle, so that `train-private` refuses to change
            it. None: everything but `private` and `generation`. `image` is fixed always. See `fixed_sections`.
    """

    public_sections: ClassVar[tuple[str, ...] | None] = None

    method: str
    preset: str = ""
    image: ImageSettings = ImageSettings()
    private: PrivateSettings = PrivateSettings()
    generation: SamplingSettings = SamplingSettings()

    @classmethod
    def fixed_sections(cls) -> tuple[str, ...]:
        """Names of the sections, and of settings outside of sections, that a public bundle fixes."""
        if cls.public_sections is not None:
            return tuple(dict.fromkeys(("image", *cls.public_sections)))
        return tuple(name for name in cls.model_fields if name not in LATER)

    def for_private_run(self, overrides: Sequence[str]) -> Self:
        """The settings of a private run with what follows from others, unless an override says otherwise."""
        return self

    @property
    def base_wanted(self) -> str:
        """Why a private run with these settings cannot do without a public bundle; empty if nothing in them says so."""
        return ""
