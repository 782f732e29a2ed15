"""What is run on private images: a method, its settings and the public bundle that it begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from rapid.bundle import Bundle
from rapid.config.sections import DpSgdSettings, MethodSettings
from rapid.data.units import ONE_IMAGE
from rapid.dp.access import PublicFacts
from rapid.dp.budget import Budget
from rapid.dp.releases import DpSgdSpec, QuerySpec
from rapid.errors import InputError
from rapid.methods import find_method
from rapid.methods.base import Checking, Method
from rapid.stages.given import checked_specs


@dataclass(frozen=True)
class Setup:
    """A method with settings and a base that fit together.

    Attributes:
        method: that of the settings.
        settings: with all sections.
        base: the opened public bundle; None without one.
    """

    method: Method[Any]
    settings: MethodSettings
    base: Bundle | None

    @classmethod
    def open(cls, base: Path | None, settings: MethodSettings, device: torch.device) -> Self:
        """Find the method, and open the public bundle.

        Args:
            base: public bundle; None for a run without one.
            settings: of the run.
            device: where it trains.

        Raises:
            InputError: base, settings and device do not fit together.
        """
        method = find_method(settings.method)
        _check_device(settings, device)
        if base is None and method.base == "required":
            raise InputError("base", f"{method.name} needs a public bundle; make one with rapid build-kb")
        if base is None and method.base == "optional" and settings.base_wanted:
            problem = f"is missing, but {settings.base_wanted}; make one with rapid build-kb, or change that setting"
            raise InputError("base", problem)
        if base is not None and method.base == "none":
            raise InputError("base", f"{method.name} trains without public images; leave it out", base)
        public = None if base is None else Bundle.open(base, "base", "public")
        if public is not None and public.config.method != method.name:
            raise InputError("base", f"was made for {public.config.method}, not for {method.name}", base)
        if isinstance(method, Checking):
            method.check_base(public, settings)
        return cls(method, settings, public)

    def releases(self, facts: PublicFacts) -> Sequence[DpSgdSpec | QuerySpec]:
        """What a run on such images releases.

        Raises:
            InputError: settings and facts do not fit together.
            RapidError: the method plans releases of other images, or such as one budget cannot hold.
        """
        check_pieces(self.settings, facts.unit)
        return checked_specs(self.method.name, self.method.releases(self.settings, facts, self.base), facts)


def check_releases(earlier: Budget, specs: Sequence[DpSgdSpec | QuerySpec], out: Path) -> None:
    """Refuse to go on with a run whose releases are not those of this version.

    Args:
        earlier: of the run in `out`.
        specs: releases that the same request has now.
        out: folder of the run.

    Raises:
        InputError: they have other names.
    """
    if earlier.names != tuple(spec.name for spec in specs):
        problem = "holds a run of another version, with other releases; finish it with that, or give a new folder"
        raise InputError("out", problem, out)


def check_pieces(settings: MethodSettings, unit: str) -> None:
    """Refuse a physical batch that could depend on how many images people have: it changes low bits of the result.

    Raises:
        InputError: see above.
    """
    own = settings.private
    if isinstance(own, DpSgdSettings) and own.physical_batch == "auto" and unit != ONE_IMAGE:
        problem = "depends on the memory that people's images take, and low bits of results on it; give a number"
        raise InputError("private.physical_batch", problem, "auto")


def _check_device(settings: MethodSettings, device: torch.device) -> None:
    if device.type != "cpu":
        return
    if settings.private.noise_source == "device":
        raise InputError("private.noise_source", "is for --device cuda; use chacha20 on a CPU", "device")
    if isinstance(settings.private, DpSgdSettings) and settings.private.precision != "float32":
        problem = "is not offered on CPUs, where it is no faster; use float32"
        raise InputError("private.precision", problem, settings.private.precision)
