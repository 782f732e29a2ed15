"""The protocol of methods: settings, optional public stage, releases, private stage, optional generator, texts.

Adding a method: a folder `rapid/methods/NAME/` whose `__init__` has `METHOD`, an object with the attributes of
`Method`; a preset; a page of the docs. A package outside of rapid registers `METHOD` as an entry point of the group
`rapid.methods`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rapid.config.sections import MethodSettings, SamplingSettings
from rapid.data import ImageSet

if TYPE_CHECKING:
    import torch

    from rapid.bundle import Bundle, Component
    from rapid.bundle.builder import BundleBuilder
    from rapid.dp.access import PrivateAccess, PublicFacts
    from rapid.dp.audit import Subject
    from rapid.dp.budget import Budget
    from rapid.dp.releases import DpSgdSpec, QuerySpec
    from rapid.sampling.classifier import Classifier
    from rapid.sampling.generator import Generator

S = TypeVar("S", bound=MethodSettings)
BaseUse = Literal["required", "optional", "none"]


@dataclass(frozen=True)
class PublicImages:
    """The public images of all sets.

    Attributes:
        images: N images with their labels.
        sources: number of the set of each image, int64 (N,).
        names: of the classes as the sets have them, in the order of `images.classes`, whose names are prefixed where
            several sets share one.
    """

    images: ImageSet
    sources: NDArray[np.int64]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Description:
    """A method's description of a bundle that it has made.

    Attributes:
        about: Markdown for the card.
        facts: ready for JSON, for `rapid info`.
        pre_training: number of public images that trained networks.
        reference: number of the other public images.
        findings: lines for the user: what was measured on public images, and what does not work.
    """

    about: str
    facts: dict[str, Any] = field(default_factory=dict)
    pre_training: int = 0
    reference: int = 0
    findings: tuple[str, ...] = ()


Tree = dict[str, Any]
"""Nested settings as in YAML."""


@dataclass(frozen=True)
class Resources:
    """What a stage may use.

    Attributes:
        device: where it computes.
        minutes: of wall time that it may take.
        processes: that share the work, each on such a device.
        begun: when the stage began, by `time.monotonic`.
    """

    device: torch.device
    minutes: float
    processes: int = 1
    begun: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds of work of all processes together."""
        return 60 * self.minutes * self.processes

    @property
    def seconds_left(self) -> float:
        """Those that are left now, 0 or more: images may have been read, and times measured."""
        return max(0.0, self.seconds - (time.monotonic() - self.begun) * self.processes)


@dataclass(frozen=True)
class Choice:
    """Settings that were chosen automatically.

    Attributes:
        settings: nested as in YAML; what is missing has its default.
        why: lines for the user, before the work begins.
        too_short: what is wrong with the minutes, if epsilon would be spent for nothing; the run does not begin then,
            unless the user gave private.expected_batch.
    """

    settings: Tree
    why: tuple[str, ...]
    too_short: str = ""


@runtime_checkable
class Automatic(Protocol):
    """A method that can choose its settings by public facts; offered as `--preset auto`."""

    def choose_public(self, sets: Sequence[ImageSet], resources: Resources, image: Tree) -> Choice:
        """Settings of the public stage, and defaults of the private one, by the public images as they were given.

        Args:
            sets: the public images.
            resources: what the stage may use.
            image: what the user set of the section of this name.

        Raises:
            InputError: too few images.
        """

    def seconds_per_gradient(self, settings: Any, device: torch.device, least: float) -> float:
        """Time of one per-example gradient of the private stage, in seconds, measured for at least `least` seconds."""

    def choose_private(
        self, settings: Any, facts: PublicFacts, epsilon: float, gradients: float, processes: int
    ) -> Choice:
        """Sections that depend on the private run, for the settings of a public bundle.

        Public facts only: nothing may depend on private pixels, or on how many images a class has.

        Args:
            settings: of the public bundle.
            facts: of the private images.
            epsilon: of the whole run.
            gradients: number of per-example gradients for which there is time, of all processes together.
            processes: that share the steps of DP-SGD; the first one does all else alone.
        """


class Method(Protocol[S]):
    """A method.

    Attributes:
        name: as in `--method` and in `settings.method`.
        settings: the class of its settings.
        has_public_stage: whether `build-kb` makes a public bundle of it.
        base: whether `train-private` requires such a bundle, takes one, or refuses it. An optional one is required
            where `MethodSettings.base_wanted` says why.
    """

    name: str
    settings: type[S]
    has_public_stage: bool
    base: BaseUse

    def train_public(self, builder: BundleBuilder, public: PublicImages, settings: S) -> Description:
        """Make the components of a public bundle from public images alone.

        Raises:
            InputError: images or settings that do not fit.
        """

    def releases(self, settings: S, facts: PublicFacts, base: Bundle | None) -> Sequence[DpSgdSpec | QuerySpec]:
        """The releases of the private stage: their N is `facts.dataset_size`, and exactly one has no share of epsilon.

        Called before anything is written or spent, so it also checks that settings, base and facts fit together.

        Raises:
            InputError: they do not.
        """

    def train_private(self, access: PrivateAccess, base: Bundle | None, settings: S) -> Mapping[str, Component]:
        """Make the components of a private bundle; private images are used only through `access`.

        When it returns, all releases are made, with all their steps; the result has at least one component. A resumed
        run calls it again; `access` then returns the recorded results of earlier releases.

        Raises:
            PrivacyRefused: continuing would break the guarantee.
        """

    def describe_private(self, settings: S, base: Bundle | None, budget: Budget) -> Description:
        """Describe a private bundle; called before the first release, too."""

    def privacy_notes(self, base: Bundle | None, budget: Budget) -> Sequence[str]:
        """Sentences for the privacy statement, such as what is checked; called before the first release, too."""

    def trained_parameters(self, settings: S, classes: int) -> int:
        """Number of parameters that the private stage trains."""

    def generator(self, bundle: Bundle, device: torch.device, generation: SamplingSettings) -> Generator | None:
        """A generator of images, with generation settings of the method's own class; None for a classifier."""


@runtime_checkable
class Checking(Protocol):
    """A method that checks its public bundle before any private image is read or any time is measured."""

    def check_base(self, base: Bundle | None, settings: Any) -> None:
        """Check that the public bundle, or that there is none, fits the settings.

        Raises:
            InputError: it does not.
        """


@runtime_checkable
class Extending(Protocol):
    """A method whose public stage can build on given networks, trained on other images (`BundleBuilder.given`)."""

    def fixed_by_networks(self, settings: Any) -> tuple[str, ...]:
        """Sections, or single settings such as "retrieval.k", that networks with these settings fix."""


@runtime_checkable
class Paced(Protocol):
    """A method whose private stage is more than steps that all take the same time; `--minutes` asks it."""

    def typical(self, settings: Any) -> Any:
        """Settings whose steps all take about as long as an average step of a run with the given ones.

        `--minutes` measures these.
        """

    def other_work(self, settings: Any) -> float:
        """What the stage computes beside the steps at no privacy cost, in per-example gradients that take as long."""


@runtime_checkable
class Classifying(Protocol):
    """A method whose models classify images."""

    def classifier(self, bundle: Bundle, device: torch.device) -> Classifier:
        """The classifier of a bundle."""


@runtime_checkable
class Probed(Protocol):
    """A method whose models make images, and can have a classifier that selects them."""

    def probe(self, bundle: Bundle, device: torch.device) -> Classifier | None:
        """The classifier of a bundle; None if it has none."""


@runtime_checkable
class Teaching(Protocol):
    """A method that can make images only to train classifiers on, by the soft labels of a model's probe."""

    def for_training(self, bundle: Bundle) -> Sequence[str] | None:
        """Generation settings for such images, as `generation.attempts=1`; None if the bundle has no probe."""


@runtime_checkable
class Inspectable(Protocol):
    """What a method can add for `rapid release`; without it, only what all methods share is audited and attacked."""

    def audited(self, bundle: Bundle) -> Sequence[Subject]:
        """What an audit trains: the networks of a private bundle with the losses of its private stage."""

    def membership_scores(
        self, bundle: Bundle, images: ImageSet, device: torch.device
    ) -> Mapping[str, NDArray[np.float64]]:
        """Scores of images, float64 (n,) by name; high ones suggest that an image was in the private set.

        Args:
            bundle: the private bundle.
            images: n images in the form of the bundle; labels are numbers of its classes, or None.
            device: where to compute.
        """
