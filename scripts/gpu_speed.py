"""Times on a device: a private step by its parts, a sampling step by its batch, the search of a knowledge base."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from checks import Check, Figures, Outcome, Setup, require
from rapid_index import KnowledgeBase, KnowledgeBaseWriter
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rapid.dp.gradients import BookKeeper
from rapid.dp.randomness import Randomness
from rapid.methods import load_settings, open_generator
from rapid.methods.rapid.objectives import Draws, PrivateObjective
from rapid.methods.rapid.search import open_search
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Denoiser
from rapid.training.average import WeightAverage
from rapid.training.timing import seconds_per_step

PIECES = {"letters-mnist": {"cuda": 512, "cpu": 64}, "imagenet32-cifar10": {"cuda": 64, "cpu": 2}}
"""Losses in memory at a time: those of the preset on a GPU, fewer on a CPU."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
Batch = tuple[Tensor, Tensor, Draws]
"""Latents, labels and draws."""
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
        each = sum(parts[name] for name in ("data", "forward", "backward", "clip"))
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

    def __init__(self, settings: RapidSettings, device: torch.device) -> None:
        torch.manual_seed(0)
        self.network = Denoiser.build(settings, 10).to(device)
        self.parameters = [p for p in self.network.parameters() if p.requires_grad]
        self.objective = PrivateObjective(settings, self.network, None, Randomness())
        self.latents = torch.randn(2048, *settings.latent_shape, device=device)
        self.labels = torch.randint(10, (2048,), device=device)
        self.keeper = BookKeeper(self.network)
        self.clip_norm = settings.private.clip_norm

    def data(self, rows: int) -> Batch:
        """What a piece reads and draws."""
        chosen = torch.randint(len(self.latents), (rows,)).to(self.latents.device)
        return self.latents[chosen], self.labels[chosen], self.objective.draw(rows)

    def losses(self, batch: Batch) -> Tensor:
        """One a row."""
        return self.objective.losses(*batch)

    def plain(self, batch: Batch) -> tuple[Tensor | None, ...]:
        """An ordinary gradient."""
        return torch.autograd.grad(self.losses(batch).sum(), self.parameters, allow_unused=True)

    def clipped(self, batch: Batch) -> list[Tensor]:
        """A sum of clipped gradients."""
        return self.keeper.clipped_sum(lambda: self.losses(batch), len(batch[0]), self.clip_norm)[0]


def _parts(settings: RapidSettings, rows: int, device: torch.device) -> dict[str, float]:
    """Seconds of each part; the first four are for a piece, the others for a step."""
    case = _Case(settings, device)
    batch = case.data(rows)

    def timed(work: Callable[[], object]) -> float:
        return seconds_per_step(work, device)

    forward = timed(lambda: case.losses(batch))
    plain = timed(lambda: case.plain(batch))
    clipped = timed(lambda: case.clipped(batch))
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        half = timed(lambda: case.clipped(batch)) if device.type == "cuda" else 0.0
    total = torch.cat([part.flatten() for part in case.clipped(batch)])
    for parameter in case.parameters:
        parameter.grad = torch.zeros_like(parameter)
    adam, average = torch.optim.Adam(case.parameters, lr=1e-6), WeightAverage(case.network, 0.99)
    source = Randomness()
    found = {
        "data": timed(lambda: case.data(rows)),
        "forward": forward,
        "backward": plain - forward,
        "clip": clipped - plain,
        "noise": timed(lambda: source.add_noise(total, 0.1)),
        "optimizer": timed(adam.step),
        "average": timed(lambda: average.update_parameters(case.network)),
    }
    return found | ({"all of a piece in bfloat16": half} if half else {})


def _memory_and_kernels(settings: RapidSettings, rows: int, device: torch.device) -> Figures:
    case = _Case(settings, device)
    batch = case.data(rows)
    case.clipped(batch)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    case.clipped(batch)
    peak = torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        case.clipped(batch)
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
