"""Times on a device: a private step by its parts, a sampling step by its batch, the search of a knowledge base."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from checks import Check, Figures, Outcome, Setup, require
from rapid_index import KnowledgeBase, KnowledgeBaseWriter
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rapid.dp import DpSgdSpec
from rapid.dp.gradients import BookKeeper
from rapid.dp.objective import Selected
from rapid.dp.randomness import Randomness
from rapid.dp.recorded_sum import RecordedSum
from rapid.methods import load_settings, open_generator
from rapid.methods.rapid.objectives import PrivateObjective
from rapid.methods.rapid.search import open_search
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Denoiser
from rapid.training.average import WeightAverage
from rapid.training.loss import Loss, LossGradient
from rapid.training.optimizers import on_gpu
from rapid.training.timing import seconds_per_step

PIECES = {"letters-mnist": {"cuda": 512, "cpu": 64}, "imagenet32-cifar10": {"cuda": 64, "cpu": 2}}
"""Losses in memory at a time: those of the preset on a GPU, fewer on a CPU."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
RECORDS, KEY_DIM, QUERIES = (70_000, 1_000_000), 64, 512


def step(preset: str) -> Check:
    """One private step of a preset, by its parts."""

    def check(setup: Setup) -> Outcome:
        small = ["denoiser.channels=8", "denoiser.heads=2"]
        settings = load_settings("demo", small) if setup.smallest else load_settings(preset)
        assert isinstance(settings, RapidSettings)
        rows = 4 if setup.smallest else PIECES[preset][setup.name]
        parts = _parts(settings, rows, setup.device)
        own = settings.private
        pieces = own.expected_batch * own.multiplicity / rows
        each = parts["data"] + parts["sum"]
        once = sum(parts[name] for name in ("noise", "optimizer", "average"))
        whole = pieces * each + once
        figures: Figures = {"rows": rows, "pieces": pieces, "seconds": parts, "step_seconds": whole}
        if setup.name == "cuda":
            figures |= _memory_and_kernels(settings, rows, setup.device)
        shown = ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in parts.items())
        return f"ms for {rows} losses: {shown}; a step of {pieces:.3g} pieces: {whole:.3g} s", figures

    return check


class _Case:
    """A denoiser with random weights, and latents to draw from."""

    def __init__(self, settings: RapidSettings, rows: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.network = Denoiser.build(settings, 10).to(device)
        self.parameters = [p for p in self.network.parameters() if p.requires_grad]
        self.rows, self.device = rows, device
        self._latents = torch.randn(2048, *settings.latent_shape, device=device)
        self._labels = torch.randint(10, (2048,), device=device)
        self.keeper = BookKeeper(self.network)
        self.objective = Selected(PrivateObjective(settings, self.network, None, Randomness()), self._taken)
        self.clip_norm = settings.private.clip_norm
        self.spec = DpSgdSpec(
            name="any", dataset_size=2048, expected_batch=rows, steps=1, clip_norm=settings.private.clip_norm
        )

    def _taken(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        places = positions.to(self.device)
        return self._latents[places], self._labels[places]

    def positions(self) -> Tensor:
        """Examples of a piece."""
        return torch.randint(2048, (self.rows,))

    def plain(self, prepared: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """An ordinary gradient."""
        losses = self.objective.compute(*prepared)
        return torch.autograd.grad(losses.sum(), self.parameters, allow_unused=True)

    def clipped(self, prepared: Sequence[Tensor]) -> list[Tensor]:
        """A sum of clipped gradients, each kernel started by the host."""
        return self.keeper.clipped_sum(lambda: self.objective.compute(*prepared), self.rows, self.clip_norm)[0]

    def recorded(self, half: bool = False) -> RecordedSum:
        """What replays the sums of pieces, as private stages do on a GPU."""
        return RecordedSum(
            self.keeper,
            self.objective,
            self.spec,
            piece=self.rows,
            examples=2048,
            randomness=Randomness(),
            autocast=half,
        )

    def public_step(self) -> Callable[[], object]:
        """What computes the loss of a public step and its gradients, on a batch of as many examples."""
        loss = Loss(lambda _: [], lambda *batch: self.objective.compute(*batch).mean())
        gradient = LossGradient(loss, self.parameters, "auto")

        def step() -> object:
            return gradient(self.objective.prepare(self.positions()))

        step()
        return step


def _parts(settings: RapidSettings, rows: int, device: torch.device) -> dict[str, float]:
    """Seconds of each part: of a piece the first two, of a step the next three; the others tell what is gained."""
    case = _Case(settings, rows, device)
    prepared = case.objective.prepare(case.positions())
    everyone = torch.ones(rows, dtype=torch.bool)

    def timed(work: Callable[[], object]) -> float:
        return seconds_per_step(work, device)

    def pieces(half: bool) -> float:
        recorded = case.recorded(half)
        for _ in range(2):
            recorded.clipped_sum(case.positions(), everyone)
        # the time of the preparation, which is part of it, is measured by itself
        return timed(lambda: recorded.clipped_sum(case.positions(), everyone)) - data

    data = timed(lambda: case.objective.prepare(case.positions()))
    found = {"data": data, "sum": pieces(False)}
    total = torch.cat([part.flatten() for part in case.clipped(prepared)])
    for parameter in case.parameters:
        parameter.grad = torch.zeros_like(parameter)
    adam = torch.optim.Adam(case.parameters, lr=1e-6, fused=on_gpu(case.parameters))
    average = WeightAverage(case.network, 0.99)
    source = Randomness()
    found |= {
        "noise": timed(lambda: source.add_noise(total, 0.1)),
        "optimizer": timed(adam.step),
        "average": timed(lambda: average.update_parameters(case.network)),
        "sum, not replayed": timed(lambda: case.clipped(prepared)),
        "plain gradient, not replayed": timed(lambda: case.plain(prepared)),
    }
    found["public step"] = timed(case.public_step())
    return found | ({"sum in bfloat16": pieces(True)} if device.type == "cuda" else {})


def _memory_and_kernels(settings: RapidSettings, rows: int, device: torch.device) -> Figures:
    case = _Case(settings, rows, device)
    prepared = case.objective.prepare(case.positions())
    case.clipped(prepared)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    case.clipped(prepared)
    peak = torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        case.clipped(prepared)
        torch.cuda.synchronize(device)
    kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())
    return {"peak_bytes": peak, "kernels": kernels}


def engine(setup: Setup) -> Outcome:
    """A sampling step with 1 to 1,024 rows, as the server takes it: the time of all steps of so many images."""
    model = setup.made("speed" if (setup.folder / "speed").exists() else "public")
    few = ["generation.steps=10"] if setup.smallest else []
    generator = open_generator(model, setup.name, ["generation.attempts=1", *few])
    found: dict[str, dict[str, float]] = {}
    for rows in BATCHES[:3] if setup.smallest else BATCHES:
        trajectories = generator.trajectories()
        labels = np.arange(rows) % len(generator.classes) if generator.classes else None
        for _ in range(2):  # the first time allocates
            begin = time.perf_counter()
            left = trajectories.begin(0, np.arange(rows), labels)
            steps, latents = [], []
            while len(left):
                start = time.perf_counter()
                finished = trajectories.advance(left)
                # reading a result waits for the device
                finished.latents.sum().item()
                steps.append(time.perf_counter() - start)
                latents.append(finished.latents)
                left = np.setdiff1d(left, finished.rows)
            middle = time.perf_counter()
            generator.decode(torch.cat(latents))
            end = time.perf_counter()
        found[str(rows)] = {
            "step_seconds": statistics.median(steps),
            "decode_seconds": end - middle,
            "images_per_second": rows / (end - begin),
        }
    shown = ", ".join(f"{rows}: {1e3 * one['step_seconds']:.2f}" for rows, one in found.items())
    best = max(one["images_per_second"] for one in found.values())
    calls = generator.calls()
    return f"ms a step by rows: {shown}; at most {best:.0f} images/s of {calls} calls", {"calls": calls, "rows": found}


def search(setup: Setup) -> Outcome:
    """The search of flat knowledge bases on the device: exact, the same in any batch, and how long it takes."""
    figures: Figures = {}
    for records in (3000,) if setup.smallest else RECORDS:
        generator = np.random.default_rng(5)
        path = setup.folder / f"keys-{records}"
        _write(path, records, generator)
        opened = KnowledgeBase.open(path, verify=False)
        queries = torch.from_numpy(generator.standard_normal((QUERIES, KEY_DIM), np.float32)).to(setup.device)
        used = open_search(opened, setup.device)
        whole = used.nearest(queries, 5)
        alone = np.concatenate([used.nearest(query[None], 5) for query in queries[:32]])
        require(bool((alone == whole[:32]).all()), f"{records:,} records: a query's answer depends on its batch")
        keys = torch.from_numpy(_keys(records)).to(setup.device)
        wrong = int((_nearest(keys, queries[:64]).cpu().numpy() != whole[:64, 0]).sum())
        require(wrong == 0, f"{records:,} records: {wrong} of 64 nearest neighbours are not those of float64")
        seconds = {}
        for count in (1, 16, QUERIES):
            seconds[str(count)] = seconds_per_step(partial(used.nearest, queries[:count], 1), setup.device)
        held = queries.cpu().numpy()
        seconds[f"{QUERIES} by faiss"] = seconds_per_step(partial(opened.search, held), torch.device("cpu"))
        figures[str(records)] = seconds
    shown = "; ".join(
        f"{int(records):,} records: " + ", ".join(f"{name} {1e3 * value:.3g}" for name, value in seconds.items())
        for records, seconds in figures.items()
    )
    return f"ms by queries, {shown}", figures


def _keys(records: int) -> np.ndarray:
    return np.random.default_rng(6).standard_normal((records, KEY_DIM), np.float32)


def _write(path: Path, records: int, generator: np.random.Generator) -> None:
    writer = KnowledgeBaseWriter(path, key_dim=KEY_DIM, value_shape=(1,), k=2, v=1, timesteps=2, networks={})
    with writer:
        values, labels = generator.random((records, 1), np.float32), np.zeros(records, np.int64)
        writer.append(_keys(records), values, labels)


def _nearest(keys: Tensor, queries: Tensor) -> Tensor:
    """Index of the nearest key of each query, by float64 differences."""
    found = []
    for query in queries:
        gaps = [(part.double() - query.double()).square().sum(1) for part in keys.split(100_000)]
        found.append(torch.cat(gaps).argmin())
    return torch.stack(found)
