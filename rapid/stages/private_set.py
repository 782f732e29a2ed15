"""The private images of a run: in the form of its model, what is public about them, and how the ledger knows them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from rapid.bundle import Bundle
from rapid.config.sections import MethodSettings
from rapid.data import ImageSet
from rapid.data.classes import UNDECLARED
from rapid.data.private import PrivateImages
from rapid.data.readers import FORMATS
from rapid.data.units import ONE_PERSON
from rapid.dp.access import PublicFacts
from rapid.dp.budget import Budget
from rapid.dp.entry import Limit
from rapid.dp.ledger import Ledger
from rapid.dp.releases import check_budget, default_delta
from rapid.dp.spending import Charge
from rapid.errors import InputError
from rapid.mapped import taken
from rapid.places import check_outside
from rapid.ranks import Ranks
from rapid.rounding import as_typed, rounded_down
from rapid.tones.release import warn_if_hidden
from rapid.training import RunFolder

Json = dict[str, Any]
DELTA = 1e-5
"""One that is in range, where none is given."""


@dataclass(frozen=True)
class PrivateSet:
    """Private images that were read, and are used by nothing yet.

    Attributes:
        images: of all ranks.
        facts: what is public about them.
        account: identifier of the data set in the ledger; empty on all ranks but the first.
        assignment: identifier of whose image each is; empty if images are the units, and on all ranks but the first.
        labelling: identifier of their labels; empty without labels, and on all ranks but the first.
    """

    images: ImageSet
    facts: PublicFacts
    account: str
    assignment: str
    labelling: str

    @classmethod
    def read(cls, private: PrivateImages, settings: MethodSettings, base: Bundle | None, ledger: Ledger | None) -> Self:
        """Read the images in the form of the model.

        Args:
            private: where they are.
            settings: of the run; each image is brought to the size and colours of `settings.image`.
            base: public bundle; None for a run without one.
            ledger: what knows the set by a keyed hash; None on all ranks but the first.

        Raises:
            InputError: bad images, or colour images for a model of grey ones.
        """
        loaded = private.load(settings.image, digests=ledger is not None)
        check_colours(loaded, settings, base)
        account = assignment = labelling = ""
        if ledger is not None and loaded.digests is not None:
            # hashed as stored on disk, so that the identifier is the same at every image size
            digests, units, labels = loaded.digests, loaded.units, loaded.labels
            account = ledger.account(digests)
            assignment = "" if units is None else ledger.assignment(digests, units)
            labelling = "" if labels is None else ledger.labelling(digests, labels, units)
        # what they were before is not for the method
        images = replace(loaded, stored=None, digests=None)
        return cls(images, PublicFacts.of(images), account, assignment, labelling)

    def request(self, base: Bundle | None, epsilon: float, delta: float | None) -> Json:
        """What a run on them asks for, beside its settings; ready for JSON.

        Public numbers only: nothing that depends on the pixels or on how many images a class has.

        Args:
            base: public bundle; None for a run without one.
            epsilon: budget.
            delta: None for 1 / (N ln N).

        Raises:
            InputError: epsilon or delta out of range.
        """
        size = self.facts.dataset_size
        delta = default_delta(size) if delta is None else delta
        check_budget(epsilon, delta, size)
        asked: Json = {
            "epsilon": epsilon,
            "delta": delta,
            "dataset_size": size,
            "base": None if base is None else base.config.components,
            "classes": list(self.images.classes),
        }
        return asked | ({"unit": self.facts.unit} if self.images.units is not None else {})

    def warn(self, budgets: Sequence[Budget]) -> None:
        """Warn of a delta that promises little, of classes that the labels decide, and of tones that noise would hide.

        Args:
            budgets: of the run, or of all candidates; at the same delta.
        """
        warn_of_delta(budgets[0].delta, self.facts)
        if not self.images.declared:
            warnings.warn(UNDECLARED, stacklevel=3)
        for budget in budgets:
            warn_if_hidden(budget, self.facts)

    def charge(self, ledger: Ledger, run_folder: RunFolder, limit: Limit) -> Charge:
        """The charge of the run in a folder to their account."""
        name = run_folder.run_name(self.account, self.assignment, self.labelling)
        return Charge(ledger, self.account, name, limit, run_folder.earlier_names(), self.facts.unit)

    def part(self, ranks: Ranks) -> ImageSet:
        """The images of this rank, with whole people; other images never reach its network."""
        images = self.images
        if ranks.count == 1:
            return images
        part = np.asarray(ranks.part(images.unit_count), dtype=np.int64)
        own, units = part, None
        if images.units is not None:
            own = np.flatnonzero(np.isin(images.units, part))
            units = np.searchsorted(part, images.units[own]).astype(np.int64)
        labels = None if images.labels is None else images.labels[own]
        return replace(images, images=taken(images.images, own), labels=labels, units=units)


def check_request(private: PrivateImages, out: Path, epsilon: float, delta: float | None, *, resume: bool) -> None:
    """Refuse arguments that are wrong whatever the images are. None is opened: what is there may not be timed yet.

    Args:
        private: where they are.
        out: folder of the run.
        epsilon: budget.
        delta: None for 1 / (N ln N).
        resume: continue the run in `out`.

    Raises:
        InputError: no images there, epsilon or delta out of range, or an `out` among the images, or that
            `RunFolder.check` refuses.
    """
    check_privacy(epsilon, delta)
    if not private.path.exists():
        raise InputError("private", f"does not exist; give {FORMATS}", private.path)
    check_outside(out, private.path, "private")
    RunFolder(out).check(resume=resume)


def check_privacy(epsilon: float, delta: float | None) -> None:
    """Refuse an epsilon or a delta that is wrong for any number of images.

    Raises:
        InputError: see above.
    """
    if delta is not None and not 0 < delta < 1:
        raise InputError("delta", "must lie in (0, 1), and well under 1/N for N images, or people", as_typed(delta))
    check_budget(epsilon, DELTA if delta is None else delta, 1)


def warn_of_delta(delta: float, facts: PublicFacts) -> None:
    """Warn of a delta that promises little: a person's, or an image's, part of the set is no less."""
    if delta > 1 / facts.dataset_size:
        whose = "all images of a random person" if facts.unit == ONE_PERSON else "a random image"
        most = rounded_down(1 / facts.dataset_size, 2)
        problem = f"--delta {as_typed(delta)} is more than 1/N = {most}: publishing {whose} would satisfy it"
        warnings.warn(problem, stacklevel=3)


def check_colours(loaded: ImageSet, settings: MethodSettings, base: Bundle | None) -> None:
    """Refuse colour images for a model of grey ones.

    Args:
        loaded: images as they were read, which know how they are stored.
        settings: of the run.
        base: public bundle; None without one.

    Raises:
        InputError: see above.
    """
    assert loaded.stored is not None
    if settings.image.channels == 1 and loaded.stored.channels == 3:
        made = "--base makes" if base is not None else "image.channels=1 is for"
        fix = "build another with image.channels=3, without --networks" if base is not None else "use image.channels=3"
        raise InputError("private", f"has colour images, and {made} grey ones; {fix}, or give grey images")
