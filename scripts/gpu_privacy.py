"""Checks of what the guarantee rests on, on a device: clipped sums, norms, rows that are not finite, and noise."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from checks import Check, Outcome, Setup, Skipped, require
from scipy import stats
from torch import Tensor, nn

from rapid.dp import DpSgdSpec, PrivateMechanism, Release
from rapid.dp.cipher import KEY_BYTES, WORDS, KeyStream, compiled_kernel, key_stream_blocks
from rapid.dp.gradients import BookKeeper
from rapid.dp.gradients.forms import ROUNDING_MARGIN
from rapid.dp.noise import grid_step
from rapid.dp.objective import Objective
from rapid.dp.randomness import DeviceRandomness, Randomness
from rapid.dp.recorded_sum import RecordedSum
from rapid.methods import load_settings
from rapid.nn import Denoiser
from rapid.recording import Recorder

CLIP_NORM = 0.1
TOLERANCE = {"cpu": 1e-3, "cuda": 5e-3}
"""Relative error of a sum: convolutions on GPUs have 10 bits of mantissa by default (TF32)."""
LEAST = 1 - 3 * ROUNDING_MARGIN
"""Share of clip_norm that a clipped gradient has at least: clipping by more than the margins is a fault, too."""
P_VALUE = 1e-7
NETWORKS = {
    "embedding": [],
    "cross-attention": [
        "denoiser.conditioning=cross-attention",
        "denoiser.context_dim=16",
        "denoiser.multipliers=[1,2]",
        "denoiser.attention=[false,true]",
    ],
}
"""Kinds of denoisers, as overrides of the preset demo."""
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(12, 8), (12,)),
    "linear, 300 positions": (lambda: nn.Linear(6, 5), (300, 6)),
    "linear, wide": (lambda: nn.Linear(256, 512), (16, 256)),
    "convolution 3x3": (lambda: nn.Conv2d(64, 64, 3, padding=1), (64, 8, 8)),
    "convolution 3x3, 32 pixels": (lambda: nn.Conv2d(16, 16, 3, padding=1), (16, 32, 32)),
    "convolution 1x1, stride 2": (lambda: nn.Conv2d(8, 16, 1, stride=2), (8, 16, 16)),
    "convolution 3x3, groups": (lambda: nn.Conv2d(8, 16, 3, padding=1, groups=4), (8, 9, 9)),
    "convolution 3x3, dilated": (lambda: nn.Conv2d(8, 8, 3, padding=2, dilation=2), (8, 11, 11)),
    "group norm": (lambda: nn.GroupNorm(4, 32), (32, 8, 8)),
    "layer norm": (lambda: nn.LayerNorm(64), (16, 64)),
    "embedding": (lambda: nn.Embedding(10, 32), (4,)),
}
"""A layer of each kind that has a rule, and the shape of an example's input."""


class Fixed:
    """A byte stream that is the same every time: for comparisons, never for private images."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, count: int) -> bytes:
        """Take `count` bytes."""
        self._calls += 1
        return hashlib.shake_256(self._calls.to_bytes(8, "little")).digest(count)


def sums(kind: str) -> Check:
    """The clipped sum of a denoiser against a loop over single examples in float64, on the CPU."""

    def check(setup: Setup) -> Outcome:
        width = 8 if setup.smallest else 64
        overrides = [f"denoiser.channels={width}", "denoiser.heads=2", *NETWORKS[kind]]
        settings, count = load_settings("demo", overrides), 3 if setup.smallest else 8
        torch.manual_seed(0)
        network = Denoiser.build(settings, 10).eval()
        x, eps = torch.randn(2, count, *settings.latent_shape)
        t, labels = torch.randint(1, 1001, (count,)), torch.randint(10, (count,))

        def losses(model: nn.Module, rows: slice, place: torch.device, dtype: torch.dtype) -> Tensor:
            own, noise = (tensor[rows].to(place, dtype) for tensor in (x, eps))
            return (model(own, t[rows].to(place), labels[rows].to(place)) - noise).square().flatten(1).mean(1)

        exact = copy.deepcopy(network).double()
        wanted, norms = _loop(exact, lambda row: losses(exact, row, torch.device("cpu"), torch.float64), count)
        keeper = BookKeeper(network.to(setup.device))
        found, seen = keeper.clipped_sum(
            lambda: losses(network, slice(None), setup.device, torch.float32), count, CLIP_NORM
        )
        total = torch.cat([part.flatten().cpu() for part in found])
        error = float((total - wanted).norm() / wanted.norm())
        norm_error = float(((seen.cpu() - norms) / norms).abs().max())
        most = TOLERANCE[setup.name]
        line = f"{count} examples, {len(total):,} parameters: sum off by {error:.1e}, norms by {norm_error:.1e}"
        require(max(error, norm_error) <= most, f"{line}; at most {most:g} is allowed")
        return line, {"sum_error": error, "norm_error": norm_error, "clipped": int((norms > CLIP_NORM).sum())}

    return check


def _loop(network: nn.Module, loss_of: Callable[[slice], Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Sum of clipped gradients, (d,), and norms, (count,), one example after the other."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    total, norms = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64), []
    for row in range(count):
        found = torch.autograd.grad(loss_of(slice(row, row + 1)).sum(), parameters, allow_unused=True)
        pairs = zip(parameters, found, strict=True)
        gradient = torch.cat([torch.zeros(p.numel()).double() if g is None else g.flatten() for p, g in pairs])
        norms.append(gradient.norm())
        total += gradient * min(1.0, CLIP_NORM / (1 + ROUNDING_MARGIN) / float(norms[-1]))
    return total, torch.stack(norms)


class _Denoising(Objective):
    """Losses of a denoiser on examples that it holds."""

    def __init__(self, network: Denoiser, parts: tuple[Tensor, ...]) -> None:
        self.network, self._parts = network, parts

    def prepare(self, *rows: Tensor) -> list[Tensor]:
        """The examples at these positions."""
        return [part[rows[0].to(part.device)] for part in self._parts]

    def compute(self, *prepared: Tensor) -> Tensor:
        """Squared errors."""
        x, eps, t, labels = prepared
        return (self.network(x, t, labels) - eps).square().flatten(1).mean(1)


def replayed(kind: str) -> Check:
    """Sums by recorded kernels against the same without recording: new examples, fewer of them, some that do not count,
    one that is not finite.
    """

    def check(setup: Setup) -> Outcome:
        width, count, draws = 8 if setup.smallest else 64, 24, 2
        overrides = [f"denoiser.channels={width}", "denoiser.heads=2", *NETWORKS[kind]]
        settings = load_settings("demo", overrides)
        torch.manual_seed(0)
        network = Denoiser.build(settings, 10).eval().to(setup.device)
        x, eps = torch.randn(2, count, *settings.latent_shape)
        x[5] = math.nan
        t, labels = torch.randint(1, 1001, (count,)), torch.randint(10, (count,))
        x, eps, t, labels = (part.to(setup.device) for part in (x, eps, t, labels))
        objective, keeper = _Denoising(network, (x, eps, t, labels)), BookKeeper(network)
        spec = DpSgdSpec(
            name="any", dataset_size=count, expected_batch=8, steps=1, clip_norm=CLIP_NORM, multiplicity=draws
        )
        recorded = RecordedSum(
            keeper,
            objective,
            spec,
            piece=8,
            examples=count,
            randomness=Randomness(),
            # without a GPU what would be recorded is run again
            capture=None if setup.name == "cuda" else lambda work: work,
        )
        largest = 0.0
        for step, size in enumerate((8, 8, 8, 5, 5, 8, 5, 1, 1)):
            rows = torch.randperm(count)[:size]
            counted = torch.rand(size) < 0.8
            counted[0] = rows[0] != 5
            found = recorded.clipped_sum(rows, counted)
            repeated = objective.prepare(rows.repeat_interleave(draws))
            wanted, _ = keeper.clipped_sum(
                lambda parts=repeated: objective.compute(*parts), size, CLIP_NORM, multiplicity=draws, counted=counted
            )
            exact = torch.cat([part.flatten() for part in wanted])
            gap = float((found - exact).norm() / exact.norm().clamp_min(1e-12))
            require(gap <= TOLERANCE[setup.name], f"step {step}, {size} examples: sums differ by {gap:.1e}")
            largest = max(largest, gap)
        line = f"9 batches of 1 to 8 examples, {recorded.recordings} recordings: off by at most {largest:.1e}"
        require(recorded.recordings == 3, f"{line}; 3 sizes came again, and each should be recorded")
        return line, {"largest": largest}

    return check


def failed_recording(setup: Setup) -> Outcome:
    """After work that cannot be recorded, and after recordings were dropped, the device draws and records as before."""
    if setup.name != "cuda":
        raise Skipped("only a GPU records")
    device = setup.device

    def waits(x: Tensor) -> list[Tensor]:
        return [x * float(x.sum().item())]

    x = torch.ones(3, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorder = Recorder(waits, device)
        for _ in range(3):
            require(recorder(x)[0].tolist() == [3, 3, 3], "work that waits for the host gives other numbers")
    require(recorder.recordings == 0, "work that waits for the host was recorded")
    torch.randn(2, device=device)
    other = Recorder(lambda x: [x @ x.T + 1], device)
    for again in range(2):
        for rows in (2, 2, 4, 4, 4):
            x = torch.randn(rows, 8, device=device)
            gap = float((other(x)[0] - x @ x.T - 1).abs().max())
            require(gap < TOLERANCE[setup.name], f"other work gives other numbers afterwards: {gap:.1e}")
        require(other.recordings == 2, f"{other.recordings} of 2 sizes were recorded, round {again + 1}")
        other.forget()
    return "what waits for the host is not recorded; other work is, also after recordings were dropped", {}


def neighbours(*, half: bool) -> Check:
    """How far one example moves the sum beyond its own gradient: what its absence changes in those of all others.

    In float32 the batch has one example fewer. In bfloat16 it has as many, as in training: those behind the example
    move up, and one that does not count fills the last place.
    """

    def check(setup: Setup) -> Outcome:
        width, count, tried = 8 if setup.smallest else 64, 33 if setup.smallest else 257, 3 if setup.smallest else 16
        settings = load_settings("demo", [f"denoiser.channels={width}", "denoiser.heads=2"])
        torch.manual_seed(5)
        network = Denoiser.build(settings, 10).eval().to(setup.device)
        x, eps = torch.randn(2, count, *settings.latent_shape)
        t, labels = torch.randint(1, 1001, (count,)), torch.randint(10, (count,))
        objective = _Denoising(network, tuple(part.to(setup.device) for part in (x, eps, t, labels)))
        keeper, piece = BookKeeper(network), count - 1

        def clipped(rows: Tensor) -> Tensor:
            fill = piece - len(rows) if half else 0
            counted = torch.arange(len(rows) + fill, device=setup.device) < len(rows)
            prepared = objective.prepare(torch.cat([rows, rows.new_full((fill,), piece)]))
            total, _ = keeper.clipped_sum(
                lambda: objective.computed(prepared, setup.device, autocast=half), len(counted), least, counted=counted
            )
            return torch.cat([part.flatten() for part in total])

        # all gradients are clipped, so each has as much weight as it may have
        least = 1e-4
        rows, largest = torch.arange(piece), 0.0
        whole = clipped(rows)
        for left_out in range(0, piece, max(1, piece // tried)):
            rest = clipped(rows[rows != left_out])
            moved = float((whole - rest - clipped(rows[left_out : left_out + 1])).norm()) / least
            largest = max(largest, moved)
        line = f"{piece} examples: all others move by at most {largest:.1e} of clip_norm"
        require(largest <= ROUNDING_MARGIN, f"{line}; the margin is {ROUNDING_MARGIN:.1e}")
        return line, {"largest": largest}

    return check


def norms(setup: Setup) -> Outcome:
    """One example alone adds at most clip_norm, for every kind of layer: the norm and the sum are computed apart."""
    largest, least, seen = 0.0, math.inf, {}
    for name, (build, shape) in LAYERS.items():
        torch.manual_seed(1)
        layer = build().to(setup.device)
        for draws in (1, 2):
            for half in (False, True):
                x = _inputs(layer, draws, shape).to(setup.device)
                keeper = BookKeeper(_Squared(layer))
                cast = torch.autocast(setup.name, torch.bfloat16, cache_enabled=False) if half else nullcontext()
                losses = partial(_run, keeper.network, x, cast)
                found, before = keeper.clipped_sum(losses, 1, CLIP_NORM, multiplicity=draws)
                norm = float(torch.cat([part.flatten() for part in found]).norm()) / CLIP_NORM
                require(float(before) > CLIP_NORM, f"{name}: the gradient is too small to be clipped; mend the check")
                require(norm <= 1, f"{name}, {draws} draws, bfloat16 {half}: norm {norm} times clip_norm")
                require(norm >= LEAST, f"{name}, {draws} draws, bfloat16 {half}: norm only {norm} times clip_norm")
                largest, least = max(largest, norm), min(least, norm)
                seen[f"{name}, {draws} draws{', bfloat16' * half}"] = norm
    return f"{len(seen)} layers and modes: norm {least:.6f} to {largest:.6f} of clip_norm", seen


def _run(network: nn.Module, x: Tensor, cast: AbstractContextManager[object]) -> Tensor:
    with cast:
        return network(x)


class _Squared(nn.Module):
    """A loss of a layer's output with a gradient everywhere, one a row."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x).float()
        weights = torch.linspace(-1, 1, out[0].numel(), device=out.device).view(out.shape[1:])
        return (out * weights + 0.5 * out**2).flatten(1).sum(1)


def _inputs(layer: nn.Module, count: int, shape: tuple[int, ...]) -> Tensor:
    if isinstance(layer, nn.Embedding):
        return torch.randint(layer.num_embeddings, (count, *shape))
    return torch.randn(count, *shape)


def not_finite(setup: Setup) -> Outcome:
    """An example whose gradient is not finite counts as zero."""
    for value in (math.nan, math.inf):
        torch.manual_seed(2)
        network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4)).to(setup.device)
        x = torch.randn(6, 3, 8, 8, device=setup.device)
        spoilt = x.clone()
        spoilt[2, 1, 4, 4] = value
        kept = torch.tensor([0, 1, 3, 4, 5], device=setup.device)
        keeper = BookKeeper(network)

        def clipped(rows: Tensor, keeper: BookKeeper = keeper) -> Tensor:
            parts, _ = keeper.clipped_sum(lambda: keeper.network(rows).square().sum(1), len(rows), CLIP_NORM)
            return torch.cat([part.flatten() for part in parts])

        found, wanted = clipped(spoilt), clipped(x[kept])
        error = float((found - wanted).norm() / wanted.norm())
        require(error <= TOLERANCE[setup.name], f"an example with {value} changes the sum of the others by {error:.1e}")
    return "examples with NaN and infinity count as zero", {}


def noise(setup: Setup) -> Outcome:
    """The noise is Gaussian, of the right width, and on its grid."""
    count, stddev, figures = 100_000 if setup.smallest else 4_000_000, 3.0, {}
    for randomness in [Randomness(), *([DeviceRandomness()] if setup.name == "cuda" else [])]:
        total = torch.zeros(count, dtype=torch.float64, device=setup.device)
        randomness.add_noise(total, stddev)
        steps = total / grid_step(stddev)
        require(bool((steps == steps.round()).all()), f"{randomness.source}: numbers that are not on the grid")
        z = (total / stddev).cpu()
        mean, variance = float(z.mean()) * math.sqrt(count), (float(z.var()) - 1) * math.sqrt(count / 2)
        lag = float((z[1:] * z[:-1]).mean()) * math.sqrt(count)
        p_value = float(stats.kstest(z[:200_000].numpy(), "norm").pvalue)
        line = f"{randomness.source}: mean {mean:.1f}, variance {variance:.1f}, neighbours {lag:.1f} standard errors"
        require(max(abs(mean), abs(variance), abs(lag)) < 6 and p_value > P_VALUE, f"{line}; p {p_value:.1e}")
        figures[randomness.source] = {"mean": mean, "variance": variance, "neighbours": lag, "p_value": p_value}
    return f"{count:,} numbers: {line}", figures


def noise_of_steps(setup: Setup) -> Outcome:
    """What a step of the mechanism adds has standard deviation noise_multiplier * clip_norm / expected batch."""
    torch.manual_seed(3)
    network = nn.Linear(50, 40).to(setup.device)
    x = torch.randn(60, 50, device=setup.device)
    spec = DpSgdSpec(name="any", dataset_size=60, expected_batch=20, steps=25, clip_norm=0.5)
    mechanism = PrivateMechanism(
        Release(spec=spec, noise_multiplier=2.0),
        network,
        lambda rows: network(x[rows.to(setup.device)]).square().sum(1) * 0,
        physical_batch=8,
    )
    rows = [torch.cat([part.flatten() for part in mechanism.gradient()]).cpu() for _ in range(25)]
    z = torch.stack(rows).double() * 20 / (2.0 * 0.5)
    p_value = float(stats.kstest(z.flatten().numpy(), "norm").pvalue)
    require(p_value > P_VALUE, f"the noise of 25 steps is not that of the statement: p {p_value:.1e}")
    same = float(torch.corrcoef(z).fill_diagonal_(0).abs().max())
    require(same < 0.2, f"the noise of two steps has correlation {same:.2f}")
    return f"25 steps of {z.shape[1]:,} numbers: p {p_value:.2g}", {"p_value": p_value}


def same_noise(setup: Setup) -> Outcome:
    """The noise of one key is the same by the bit as that of the CPU."""
    count = 50_001 if setup.smallest else 3_000_001
    start = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for stddev in (0.3, 1e-3, 700.0):
        ours, theirs = start.clone(), start.to(setup.device)
        Randomness(Fixed()).add_noise(ours, stddev)
        Randomness(Fixed()).add_noise(theirs, stddev)
        gaps = int((ours != theirs.cpu()).sum())
        require(gaps == 0, f"{gaps:,} of {count:,} numbers with noise {stddev:g} differ from the CPU's")
    return f"3 x {count:,} numbers with noise equal the CPU's by the bit", {}


def same_words(setup: Setup) -> Outcome:
    """The cipher's words on the device are those of the library, for random keys: by its kernel and without it."""
    count = 10_001 if setup.smallest else 2_000_003
    for first in (0, 1, 12_345, (1 << 32) - -(-count // WORDS)):
        key = os.urandom(KEY_BYTES)
        library = KeyStream(key).words(first * WORDS, count)
        blocks = key_stream_blocks(key, first, -(-count // WORDS), setup.device)
        own = KeyStream(key).words(first * WORDS, count, setup.device)
        for found in (blocks.view(torch.int64).flatten()[:count], own):
            gaps = int((found.cpu() != library).sum())
            require(gaps == 0, f"{gaps:,} of {count:,} words from block {first:,} on differ from the library's")
    compiled = compiled_kernel(setup.device) is not None
    if setup.name == "cuda":
        require(compiled, "the kernel of the cipher was not compiled here; slower operations take its place")
    return f"4 x {count:,} words of ChaCha20 equal the library's by the bit", {"compiled": compiled}
