"""Record and replay of a private stage: run it again with the same random bytes, and compare all that it does.

Runs may share noisy results, too: those of the first run take the place of a later one's own. What still differs then
has reached it past the releases of the budget.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests_charges import TRAINED
from tests_support import Clock, save
from tests_tracing import Place, first_difference, places_executed
from torch import Tensor

from rapid.config.sections import MethodSettings
from rapid.data import ImageSet
from rapid.data.private import PrivateImages
from rapid.dp import PrivateAccess, PrivateTensor, access, noise, progress
from rapid.dp.mechanism import PrivateMechanism
from rapid.methods import apply_overrides
from rapid.stages.private import train_private_bundle

CPU = torch.device("cpu")
LAST = 23
"""Position of the image that differs."""


def describe(state: object, tell: Callable[[Tensor], object]) -> object:
    """A checkpoint with what `tell` says of each tensor in its place."""
    if isinstance(state, Tensor):
        return tell(state)
    if isinstance(state, dict):
        return {key: describe(value, tell) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [describe(value, tell) for value in state]
    return state


def form(tensor: Tensor) -> object:
    return ("tensor", tuple(tensor.shape), tensor.dtype)


def numbers(tensor: Tensor) -> object:
    return tensor.numpy().tobytes()


class Repeated:
    """A stream whose bytes depend on nothing but how many streams were made, and how often this one was asked."""

    made: ClassVar[int] = 0

    def __init__(self) -> None:
        self._number, self._calls = Repeated.made, 0
        Repeated.made += 1

    def __call__(self, count: int) -> bytes:
        self._calls += 1
        return np.random.default_rng((self._number, self._calls)).bytes(count)


class OneSilenced(PrivateAccess):
    """The same door, behind which one image contributes nothing to any release: its losses and features are 0, no count
    counts it, and it is in no bin."""

    silent: ClassVar[int | None] = None

    def train(self, name: str, trainer: Any, losses: Any, data: Any, **how: Any) -> None:
        super().train(name, trainer, lambda *rows: losses(*rows[:-1]) * rows[-1], [*data, self._weights()], **how)

    def count(self, name: str, predicate: Any, *tensors: PrivateTensor) -> int:
        return super().count(name, lambda *rows: predicate(*rows[:-1]) & (rows[-1] > 0), *tensors, self._weights())

    def mean(self, name: str, features: Any, *tensors: PrivateTensor) -> Tensor:
        def weighted(*rows: Tensor) -> Tensor:
            found: Tensor = features(*rows[:-1])
            return found * rows[-1].to(found).view(-1, *[1] * (found.ndim - 1))

        return super().mean(name, weighted, *tensors, self._weights())

    def histogram(self, name: str, bins: int, function: Any, *tensors: PrivateTensor) -> Tensor:
        def kept(*rows: Tensor) -> Tensor:
            return torch.where(rows[-1] > 0, function(*rows[:-1]), bins)

        return super().histogram(name, bins, kept, *tensors, self._weights())

    def _weights(self) -> PrivateTensor:
        weights = torch.ones(len(self.images))
        if self.silent is not None:
            weights[self.silent] = 0
        return PrivateTensor(weights)


@dataclass
class Released:
    """Noisy results in their order: those of DP-SGD steps and of queries.

    Attributes:
        held: those of another run, which take the place of this run's own; None: its own go on.
        own: of this run.
    """

    held: list[list[Tensor]] | None = None
    own: list[list[Tensor]] = field(default_factory=list)

    def pass_on(self, result: list[Tensor]) -> list[Tensor]:
        place = len(self.own)
        self.own.append([one.clone() for one in result])
        return result if self.held is None else [one.clone() for one in self.held[place]]


@dataclass
class Run:
    """What one run of the whole stage did.

    Attributes:
        executed: all instructions.
        saved: every checkpoint, without the numbers in its tensors.
        exact: every checkpoint with them.
        files: of the folder and of the ledger, without what may differ.
        shown: on standard output and standard error, and warnings.
        weights: of all networks of the bundle.
        released: the noisy results of this run itself.
        statement: `privacy.json`.
    """

    executed: list[Place]
    saved: list[object] = field(default_factory=list)
    exact: list[object] = field(default_factory=list)
    files: dict[str, object] = field(default_factory=dict)
    shown: object = None
    weights: list[Tensor] = field(default_factory=list)
    released: list[list[Tensor]] = field(default_factory=list)
    statement: dict[str, Any] = field(default_factory=dict)


@dataclass
class Stage:
    """The private stage, to be run several times."""

    settings: MethodSettings
    base: Path | None
    images: ImageSet
    folder: Path
    epsilon: float = 3.0
    delta: float = 1e-3
    done: int = 0
    warmed: Run | None = None

    def run(
        self,
        *overrides: str,
        image: np.ndarray[Any, Any] | None = None,
        silent: int | None = None,
        held: list[list[Tensor]] | None = None,
    ) -> Run:
        """Once, with `image` in the place of `LAST`, or with the contribution of one image taken away; with its own
        noisy results, or with those in `held`."""
        settings = apply_overrides(self.settings.model_dump(mode="json"), list(overrides))
        pixels = self.images.images.copy()
        if image is not None:
            pixels[LAST] = image
        place = self.folder / str(self.done)
        place.mkdir()
        self.done += 1
        private = save(place / "private.npz", replace(self.images, images=pixels))
        Repeated.made, OneSilenced.silent = 0, silent
        torch.manual_seed(0)
        saved: list[object] = []
        exact: list[object] = []
        released = Released(held)
        gradient, query, write = PrivateMechanism.gradient, access.noisy_sum, torch.save
        shown = (io.StringIO(), io.StringIO())

        def record(state: object, file: Path) -> None:
            saved.append(describe(state, form))
            exact.append(describe(state, numbers))
            write(state, file)

        with (
            pytest.MonkeyPatch.context() as patch, redirect_stdout(shown[0]), redirect_stderr(shown[1]),
            warnings.catch_warnings(record=True) as warned,
        ):  # fmt: skip
            warnings.simplefilter("always")
            patch.setattr("rapid.dp.randomness.SystemStream", Repeated)
            patch.setattr("rapid.stages.private.PrivateAccess", OneSilenced)
            patch.setattr(PrivateMechanism, "gradient", lambda own: released.pass_on(gradient(own)))
            patch.setattr(access, "noisy_sum", lambda *asked: released.pass_on([query(*asked)])[0])
            patch.setattr(torch, "save", record)
            # of 30 million numbers one is so near to the middle between two steps of the grid that it is computed with
            # more bits; in which run that happens is chance
            patch.setattr(noise, "ERROR", 0.0)
            # how long steps take decides when epsilon is shown, and nothing else; here after the first and the last
            # step, as in any run, so that what an earlier one computed is at hand in all runs alike
            Clock(patch, progress, ticks=1.0)
            patch.chdir(place)
            with places_executed() as executed:
                bundle = train_private_bundle(
                    self.base, PrivateImages(private), Path("out"), settings, epsilon=self.epsilon, delta=self.delta,
                    device=CPU, resume=False, ledger=Path("ledger.jsonl"),
                )  # fmt: skip
        assert bundle is not None
        assert bundle.privacy is not None
        return Run(
            executed,
            saved,
            exact,
            {str(path.relative_to(place)): told(path) for path in sorted(place.rglob("*")) if path != private},
            (shown[0].getvalue(), without_times(shown[1].getvalue()), [str(one.message) for one in warned]),
            [one for path in sorted(place.rglob("*.safetensors")) for _, one in sorted(load_file(path).items())],
            released.own,
            bundle.privacy,
        )


def told(path: Path) -> object:
    """What a file tells apart from noisy results, times, and the names and keyed hashes of the ledger."""
    if path.is_dir():
        return "folder"
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        length = struct.unpack("<Q", content[:8])[0]
        return content[: 8 + length], len(content)
    if path.name in ("ledger.jsonl", "ledger.jsonl.head", "ledger.jsonl.key", "run.json"):
        # each run has its own key, so these are keyed hashes and random names
        text = re.sub(r"[0-9a-f]{16,}", "...", content.decode(errors="replace")) if path.suffix != ".key" else ""
        return re.sub(r"\d{4}-\d\d-\d\dT[\d:.+Z]+", "TIME", text), len(content)
    if path.suffix in (".json", ".md"):
        # hashes of the trained networks, and when the bundle was made
        text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.+Z]+", "TIME", content.decode())
        return re.sub(rf'"({"|".join(TRAINED)})": "[0-9a-f]{{64}}"', r'"\1": HASH', text)
    return content


def without_times(shown: str) -> object:
    """Progress bars at their end, without time, rate, and the bar, whose width depends on them; and all other lines as
    they are. How often a bar is shown before its end, and whether once or twice at its end, depends on the machine."""
    lines = [line for line in re.split(r"[\r\n]+", shown) if line]
    bar = re.compile(r"(.+?) *: +(\d+%)\|.*\| (\d+/\d+) \[[^,\]]*,[^,\]]*(.*)\]")
    told = [found.groups() if (found := bar.fullmatch(line)) else line for line in lines]
    return [one for one, _ in groupby(told) if isinstance(one, str) or one[1] == "100%"]


def same_but_noisy_results(first: Run, other: Run) -> None:
    """Control flow, checkpoints, files and output are the same, whatever the networks' numbers are."""
    difference = first_difference(first.executed, other.executed)
    assert difference is None, difference
    assert first.saved == other.saved
    assert first.files.keys() == other.files.keys()
    for name, content in first.files.items():
        assert other.files[name] == content, name
    assert first.shown == other.shown
    assert [one.shape for one in first.weights] == [one.shape for one in other.weights]
    # it took part: the comparison is not idle
    assert any(not torch.equal(a, b) for a, b in zip(first.weights, other.weights, strict=True))


def same_with_held_results(first: Run, other: Run) -> None:
    """`other` got the noisy results of `first`: then all is the same, every weight included."""
    difference = first_difference(first.executed, other.executed)
    assert difference is None, difference
    # without the numbers first, for a message that can be read
    assert first.saved == other.saved
    for number, (one, another) in enumerate(zip(first.exact, other.exact, strict=True)):
        assert one == another, f"checkpoint {number}"
    assert first.files.keys() == other.files.keys()
    for name, content in first.files.items():
        assert other.files[name] == content, name
    assert first.shown == other.shown
    assert all(torch.equal(a, b) for a, b in zip(first.weights, other.weights, strict=True))
    # the image took part: without holding them, the results would have differed
    pairs = [
        pair for results in zip(first.released, other.released, strict=True) for pair in zip(*results, strict=True)
    ]
    assert any(not torch.equal(a, b) for a, b in pairs)
