"""Record and replay of the whole private stage: another private image changes noisy results and nothing else.

The stage of RAPID is run again with the same random bytes: overlap check, probe, latents, denoiser, ledger and bundle.
All that runs of `rapid` and `rapid_index` is compared, and all that is written and printed.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests_support import save
from tests_tracing import Place, first_difference, places_executed
from torch import Tensor

from rapid.data import ImageSet, load_images
from rapid.dp import PrivateAccess, PrivateTensor
from rapid.methods import apply_overrides
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Denoiser
from rapid.probe.network import Probe
from rapid.stages.private import train_private_bundle

CPU = torch.device("cpu")
LAST = 23
PARTS = {
    "stages/private.py", "methods/rapid/private_stage.py", "methods/rapid/objectives.py", "methods/rapid/neighbours.py",
    "data/thumbnails.py", "dp/overlap.py", "dp/access.py", "dp/queries.py", "dp/mechanism.py",
    "dp/gradients/bookkeeper.py",
    "dp/randomness.py", "dp/spending.py", "dp/ledger.py", "dp/statement.py", "probe/head.py", "probe/network.py",
    "nn/autoencoder.py", "nn/denoiser.py", "training/loop.py", "training/checkpoint.py", "bundle/format.py", "keys.py",
    "knowledge_base.py",
}  # fmt: skip
"""Sources that the private stage of the objective `rapid` must be seen to run through."""
OVERRIDES = ("private.start=300", "private.neighbours=2")
"""More of the objective `rapid`."""


def describe(state: object) -> object:
    """A checkpoint without the numbers in its tensors."""
    if isinstance(state, Tensor):
        return ("tensor", tuple(state.shape), state.dtype)
    if isinstance(state, dict):
        return {key: describe(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [describe(value) for value in state]
    return state


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
    """The same door, behind which one image contributes nothing to any release: its losses are 0, and no count
    counts it."""

    silent: ClassVar[int | None] = None

    def train(self, name: str, trainer: Any, losses: Any, data: Any, **how: Any) -> None:
        super().train(name, trainer, lambda *rows: losses(*rows[:-1]) * rows[-1], [*data, self._weights()], **how)

    def count(self, name: str, predicate: Any, *tensors: PrivateTensor) -> int:
        return super().count(name, lambda *rows: predicate(*rows[:-1]) & (rows[-1] > 0), *tensors, self._weights())

    def _weights(self) -> PrivateTensor:
        weights = torch.ones(len(self.images))
        if self.silent is not None:
            weights[self.silent] = 0
        return PrivateTensor(weights)


@dataclass
class Run:
    """What one run of the whole stage did.

    Attributes:
        executed: all instructions.
        saved: every checkpoint, without the numbers in its tensors.
        files: of the folder and of the ledger, without what may differ.
        shown: on standard output and standard error.
        weights: noisy results.
    """

    executed: list[Place]
    saved: list[object] = field(default_factory=list)
    files: dict[str, object] = field(default_factory=dict)
    shown: object = None
    weights: list[Tensor] = field(default_factory=list)


@dataclass
class Stage:
    """The private stage, to be run several times."""

    settings: RapidSettings
    base: Path
    images: ImageSet
    folder: Path
    done: int = 0
    warmed: Run | None = None

    def run(self, objective: str, image: np.ndarray[Any, Any] | None = None, *, silent: int | None = None) -> Run:
        """Once, with `image` in the place of the last one, or with the contribution of one image taken away."""
        overrides = [f"private.objective={objective}", *(OVERRIDES if objective == "rapid" else ())]
        settings = apply_overrides(self.settings.model_dump(mode="json"), overrides)
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
        write, shown = torch.save, (io.StringIO(), io.StringIO())

        def record(state: object, file: Path) -> None:
            saved.append(describe(state))
            write(state, file)

        with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown[0]), redirect_stderr(shown[1]):
            patch.setattr("rapid.dp.randomness.SystemStream", Repeated)
            patch.setattr("rapid.stages.private.PrivateAccess", OneSilenced)
            patch.setattr(torch, "save", record)
            patch.chdir(place)
            with places_executed() as executed:
                bundle = train_private_bundle(
                    self.base, private, Path("out"), settings, epsilon=3.0, delta=1e-3, device=CPU, resume=False,
                    ledger=Path("ledger.jsonl"),
                )  # fmt: skip
        assert bundle is not None
        networks = [Probe.load(place / "out" / "probe"), Denoiser.load(place / "out" / "denoiser")]
        return Run(
            executed,
            saved,
            {str(path.relative_to(place)): told(path) for path in sorted(place.rglob("*")) if path != private},
            (shown[0].getvalue(), without_times(shown[1].getvalue())),
            [one for network in networks for one in network.state_dict().values()],
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
        return re.sub(r'"(probe|denoiser)": "[0-9a-f]{64}"', r'"\1": HASH', text)
    return content


def without_times(shown: str) -> object:
    """Progress bars without time, rate, and the bar, whose width depends on them; and all other lines as they are."""
    lines = [line for line in re.split(r"[\r\n]+", shown) if line]
    bar = re.compile(r"(.+?) *: +(\d+%)\|.*\| (\d+/\d+) \[[^,\]]*,[^,\]]*(.*)\]")
    return [found.groups() if (found := bar.fullmatch(line)) else line for line in lines]


@pytest.fixture(scope="module")
def stage(
    public_bundle: Path, digits: Path, tiny_settings: RapidSettings, tmp_path_factory: pytest.TempPathFactory
) -> Stage:
    overrides = ["private.expected_batch=50", "private.multiplicity=2", "private.physical_batch=32"]
    overrides += ["private.checkpoint_seconds=0", "private.label_dropout=0.2"]
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), overrides)
    assert isinstance(settings, RapidSettings)
    images = load_images(digits, "private")
    found = Stage(settings, public_bundle, images, tmp_path_factory.mktemp("stage"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # what is imported once or cached is so from here on
        found.warmed = found.run("rapid")
    return found


@pytest.mark.filterwarnings("ignore:at this epsilon")
@pytest.mark.parametrize(
    ("objective", "others"),
    [("rapid", ["black", "white", "noise", "nothing"]), ("late", ["white", "nothing"]), ("ldm", ["noise", "nothing"])],
)
def test_the_whole_stage_on_another_image_differs_in_noisy_results_alone(
    stage: Stage, objective: str, others: list[str]
) -> None:
    """Control flow, what is written and what is shown are those of the set with another image in the place of one.

    "nothing": the same set in which the image contributes nothing, the neighbour that the guarantee speaks of.
    """
    first, shape = stage.run(objective), stage.images.images.shape[1:]
    assert len(first.executed) > 50_000
    if objective == "rapid":
        assert {name for name, _, _ in first.executed} >= PARTS
        # nothing random is left but what is replayed, or the comparison would find differences of its own
        assert stage.warmed is not None
        assert all(torch.equal(a, b) for a, b in zip(stage.warmed.weights, first.weights, strict=True))
    # three releases, the last two saved after every step and at their end
    assert len(first.saved) == 1 + 2 * (3 + 1)
    for other in others:
        if other == "nothing":
            second = stage.run(objective, silent=LAST)
        elif other == "noise":
            second = stage.run(objective, np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8))
        else:
            second = stage.run(objective, np.full(shape, {"black": 0, "white": 255}[other], np.uint8))
        same_but_noisy_results(first, second)


def same_but_noisy_results(first: Run, other: Run) -> None:
    assert first_difference(first.executed, other.executed) is None
    assert first.saved == other.saved
    assert first.files.keys() == other.files.keys()
    for name, content in first.files.items():
        assert other.files[name] == content, name
    assert first.shown == other.shown
    assert [one.shape for one in first.weights] == [one.shape for one in other.weights]
    # it took part: the comparison is not idle
    assert any(not torch.equal(a, b) for a, b in zip(first.weights, other.weights, strict=True))
