"""Record and replay: with the same randomness, an image more or another image changes noisy results and nothing else.

The whole private stage of RAPID is run again with the same random bytes and another private image: overlap check,
probe, latents, denoiser, ledger and bundle. Every line of `rapid` and `rapid_index` that runs is compared (outside of
the rules of layers, which run most, every instruction), and all that is written and printed.
"""

from __future__ import annotations

import io
import re
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

import numpy as np
import pytest
import rapid_index
import torch
from tests_support import save
from torch import Tensor

import rapid
from rapid.bundle import Bundle
from rapid.data import ImageSet, fit_images, load_images, to_unit_range
from rapid.diffusion import Schedule
from rapid.dp.access import PrivateAccess, PrivateTensor
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.randomness import Randomness
from rapid.dp.releases import DpSgdSpec, Release
from rapid.errors import InputError
from rapid.methods import apply_overrides
from rapid.methods.rapid.knowledge_base import open_knowledge_base
from rapid.methods.rapid.objectives import Draws, PrivateObjective, Retriever
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.probe.network import Probe
from rapid.stages.private import train_private_bundle

CPU = torch.device("cpu")
SIZE, STEPS, CLIP_NORM, LAST = 24, 4, 0.01, 23
SPEC = DpSgdSpec(
    name="denoiser", dataset_size=SIZE, expected_batch=12, steps=STEPS, clip_norm=CLIP_NORM, multiplicity=2
)
SOURCES = tuple(str(Path(str(package.__file__)).parent) for package in (rapid, rapid_index))
PARTS = {
    "stages/private.py", "methods/rapid/private_stage.py", "methods/rapid/objectives.py", "methods/rapid/neighbours.py",
    "data/thumbnails.py", "dp/overlap.py", "dp/access.py", "dp/queries.py", "dp/mechanism.py", "dp/gradients/bookkeeper.py",
    "dp/randomness.py", "dp/spending.py", "dp/ledger.py", "dp/statement.py", "probe/head.py", "probe/network.py",
    "nn/autoencoder.py", "nn/denoiser.py", "training/loop.py", "training/checkpoint.py", "bundle/format.py", "keys.py",
    "knowledge_base.py",
}  # fmt: skip
"""Sources that the private stage of the objective `rapid` must be seen to run through."""
OVERRIDES = ("private.start=300", "private.neighbours=2")
"""More of the objective `rapid`."""
BY_LINES = "dp/gradients/"
Place = tuple[str, int, int]
"""File, line, and offset of the instruction in its function (0 where lines are compared)."""


@contextmanager
def places_executed() -> Iterator[list[Place]]:
    """All that runs of rapid and rapid_index, in order; by instructions, a branch within a line shows, too."""
    found: list[Place] = []
    ours: dict[CodeType, str | None] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code not in ours:
            root = next((root for root in SOURCES if code.co_filename.startswith(root)), None)
            ours[code] = None if root is None else code.co_filename[len(root) + 1 :]
        name = ours[code]
        if name is None:
            return None
        by_lines = name.startswith(BY_LINES)
        frame.f_trace_opcodes = not by_lines
        if event == ("line" if by_lines else "opcode"):
            found.append((name, frame.f_lineno, 0 if by_lines else frame.f_lasti))
        return trace

    sys.settrace(trace)
    try:
        yield found
    finally:
        sys.settrace(None)


def first_difference(one: list[Place], other: list[Place]) -> tuple[Place, ...] | None:
    """Where two runs part, for a message that can be read."""
    for place, pair in enumerate(zip(one, other, strict=False)):
        if pair[0] != pair[1]:
            return *one[max(0, place - 3) : place], *pair
    return None if len(one) == len(other) else (one + other)[min(len(one), len(other)) - 1 :][:1]


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

    def train(self, name: str, network: Any, losses: Any, data: Any, **how: Any) -> None:
        super().train(name, network, lambda *rows: losses(*rows[:-1]) * rows[-1], [*data, self._weights()], **how)

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
        warmed, again = found.run("rapid"), found.run("rapid")
    # nothing random is left but what is replayed, or the comparison would find differences of its own
    assert all(torch.equal(a, b) for a, b in zip(warmed.weights, again.weights, strict=True))
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


def test_a_branch_on_private_data_would_be_seen() -> None:
    """The tracer tells two runs of rapid's own code apart that differ by one branch within a line."""
    runs = []
    for value in (None, 1):
        with places_executed() as executed:
            InputError("field", "problem", value)
        runs.append(executed)
    assert first_difference(*runs) is not None
    assert first_difference(runs[0], runs[0]) is None


class Replay:
    """An objective whose draws depend on the call and the example alone, so that a second run repeats them."""

    def __init__(self, objective: PrivateObjective, latents: Tensor, labels: Tensor) -> None:
        self.objective = objective
        self.latents = latents
        self.labels = labels
        self.sizes: list[int] = []
        self.step = 0

    def __call__(self, indices: Tensor) -> Tensor:
        self.sizes.append(len(indices))
        seen: dict[int, int] = {}
        parts = []
        for index in indices.tolist():
            seen[index] = seen.get(index, -1) + 1
            self.objective.randomness = Randomness(stream(self.step * 10_000 + index * 10 + seen[index]))
            parts.append(self.objective.draw(1))
        draws = Draws(*(torch.cat(values) for values in zip(*parts, strict=True)))
        return self.objective.losses(self.latents[indices], self.labels[indices], draws)


def stream(seed: int = 0) -> Callable[[int], bytes]:
    """Bytes that are the same in every run."""
    call = 0

    def take(count: int) -> bytes:
        nonlocal call
        call += 1
        return np.random.default_rng((seed, call)).bytes(count)

    return take


@pytest.fixture(params=["rapid", "late", "ldm"])
def replay(request: pytest.FixtureRequest, public_bundle: Path, digits: Path, tiny_settings: RapidSettings) -> Replay:
    chosen = apply_overrides(tiny_settings.model_dump(mode="json"), [f"private.objective={request.param}"])
    assert isinstance(chosen, RapidSettings)
    bundle = Bundle.open(public_bundle, "base")
    public = bundle.component("denoiser", Denoiser).requires_grad_(False)
    torch.manual_seed(0)
    denoiser = public.with_classes(10).requires_grad_(True)
    images = fit_images(load_images(digits, "private"), chosen.image, "private")
    assert images.labels is not None
    latents = bundle.component("autoencoder", Autoencoder).encode(to_unit_range(images.images[:SIZE]))
    encoder = bundle.component("encoder", TrajectoryEncoder)
    schedule = Schedule.build(chosen.schedule)
    retriever = Retriever(schedule, public, encoder, open_knowledge_base(bundle), chosen.retrieval.k)
    objective = PrivateObjective(chosen, denoiser, retriever if request.param == "rapid" else None, Randomness())
    return Replay(objective, latents, torch.from_numpy(images.labels[:SIZE]))


def mechanism(replay: Replay) -> PrivateMechanism:
    release = Release(spec=SPEC, noise_multiplier=1.0)
    randomness = Randomness(stream())
    return PrivateMechanism(release, replay.objective.denoiser, replay, physical_batch=10, randomness=randomness)


def test_one_image_more_moves_each_sum_by_at_most_clip_norm(replay: Replay) -> None:
    target = mechanism(replay)
    met = 0
    for step in range(STEPS):
        replay.step = step
        batch = target._draw_batch()
        replay.sizes.clear()
        more = target._clipped_sum(batch).double()
        sizes = replay.sizes.copy()
        replay.sizes.clear()
        less = target._clipped_sum(batch[batch != LAST]).double()
        if LAST in batch:
            met += 1
            assert sum(sizes) == sum(replay.sizes) + SPEC.multiplicity
            # the sums are of floats of this size, which is where the tolerance comes from
            assert 0 < (more - less).norm() <= CLIP_NORM * (1 + 1e-4)
        else:
            assert sizes == replay.sizes
            assert torch.equal(more, less)
    assert 0 < met < STEPS


@pytest.mark.parametrize("other", ["black", "white", "noise"])
def test_latents_of_any_size_change_no_line_of_the_mechanism(replay: Replay, other: str) -> None:
    """Control flow, shapes and number of steps stay, even for latents that no image has."""
    latent = replay.latents[LAST]
    replacement = {
        "black": torch.full_like(latent, -3.0),
        "white": torch.full_like(latent, 1e6),
        "noise": torch.randn(latent.shape, generator=torch.Generator().manual_seed(0)),
    }[other]
    runs = []
    mechanism(replay).gradient()  # what is computed once is cached
    for value in (latent.clone(), replacement):
        replay.latents[LAST] = value
        replay.sizes.clear()
        target = mechanism(replay)
        sums = []
        with places_executed() as executed:
            for step in range(STEPS):
                replay.step = step
                sums.append(target._clipped_sum(target._draw_batch()).double())
                released = target.gradient()
        runs.append((executed, replay.sizes.copy(), target.steps_taken, [g.shape for g in released], sums))
    (executed, sizes, steps, shapes, sums), (executed2, sizes2, steps2, shapes2, sums2) = runs
    assert len(executed) > 1000
    assert first_difference(executed, executed2) is None
    assert (sizes, steps, shapes) == (sizes2, steps2, shapes2)
    distances = [float((a - b).norm()) for a, b in zip(sums, sums2, strict=True)]
    # one image out, another in
    assert 0 < max(distances) <= 2 * CLIP_NORM * (1 + 1e-4)
