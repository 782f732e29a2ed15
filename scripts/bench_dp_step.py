"""Time and memory of a private step against the plain one and Opacus' engines (see scripts/bench-dp-step)."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from commands import at_least, told
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from rapid.dp import DpSgdSpec, PrivateMechanism, Release
from rapid.heap import prepare_heap
from rapid.methods import load_settings
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Denoiser
from rapid.runtime import choose_device

CLASSES, CLIP_NORM = 10, 0.1
BFLOAT16 = "rapid, bfloat16"
NETWORKS: dict[str, tuple[str, list[str], list[int]]] = {
    "demo": ("demo", [], [256]),
    "letters-mnist": ("letters-mnist", [], [64, 256]),
    "imagenet32-cifar10": ("imagenet32-cifar10", [], [4, 16]),
    "pixels-32": (
        "letters-mnist",
        [
            "autoencoder.kind=none",
            "denoiser.multipliers=[1,2,2]",
            "denoiser.attention=[false,false,true]",
        ],
        [16, 64],
    ),
}
"""Preset, overrides and batch sizes."""


@dataclass
class Case:
    """A network with one batch: everything that the engines share."""

    denoiser: Denoiser
    x: Tensor
    t: Tensor
    labels: Tensor
    eps: Tensor

    @classmethod
    def make(cls, settings: RapidSettings, batch: int, device: torch.device) -> Case:
        """Random weights and inputs, the same for every engine."""
        torch.manual_seed(0)
        denoiser = Denoiser.build(settings, CLASSES).to(device)
        x, eps = torch.randn(2, batch, *settings.latent_shape, device=device)
        t = torch.randint(1, settings.schedule.timesteps + 1, (batch,), device=device)
        return cls(denoiser, x, t, torch.randint(CLASSES, (batch,), device=device), eps)

    def losses(self, network: nn.Module, indices: Tensor | slice = slice(None)) -> Tensor:
        """One loss an example."""
        predicted = network(self.x[indices], self.t[indices], self.labels[indices])
        return (predicted - self.eps[indices]).square().flatten(1).mean(1)


@dataclass
class Engine:
    """One way to take a step; `gradient` returns what goes to Adam, before noise if there is any."""

    step: Callable[[], None]
    gradient: Callable[[], list[Tensor]]


def plain(case: Case) -> Engine:
    """Ordinary training."""
    parameters = list(case.denoiser.parameters())
    adam = torch.optim.Adam(parameters, lr=1e-6)

    def gradient() -> list[Tensor]:
        return [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(
                parameters,
                torch.autograd.grad(case.losses(case.denoiser).mean(), parameters, allow_unused=True),
                strict=True,
            )
        ]

    return Engine(lambda: _apply(adam, parameters, gradient()), gradient)


def rapid(case: Case, *, noise: bool, autocast: bool = False) -> Engine:
    """Ours."""
    batch = len(case.x)
    spec = DpSgdSpec(name="bench", dataset_size=batch, expected_batch=batch, steps=10**6, clip_norm=CLIP_NORM)
    release = Release(spec=spec, noise_multiplier=1.0)
    network, indices = case.denoiser, torch.arange(batch)
    mechanism = PrivateMechanism(
        release, network, lambda i: case.losses(network, i), physical_batch=batch, autocast=autocast
    )
    adam = torch.optim.Adam(mechanism.parameters, lr=1e-6)
    sizes = [p.numel() for p in mechanism.parameters]

    def flat() -> Tensor:
        total = mechanism._clipped_sum(indices)
        if noise:
            mechanism._add_noise(total)
        return total.div_(batch).float()

    def split(total: Tensor) -> list[Tensor]:
        return [g.view_as(p) for g, p in zip(total.split(sizes), mechanism.parameters, strict=True)]

    return Engine(
        lambda: _apply(adam, mechanism.parameters, split(flat())),
        lambda: split(mechanism._clipped_sum(indices).div_(batch).float()),
    )


def opacus(case: Case, *, functorch: bool) -> Engine:
    """Opacus' per-sample gradients, by hooks or by functorch."""
    _contiguous_inputs(case.denoiser)
    module = GradSampleModule(case.denoiser, force_functorch=functorch)
    adam = torch.optim.Adam(module.parameters(), lr=1e-6)
    optimizer = DPOptimizer(adam, noise_multiplier=1.0, max_grad_norm=CLIP_NORM, expected_batch_size=len(case.x))

    def backward() -> None:
        optimizer.zero_grad()
        case.losses(module).mean().backward()

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    def gradient() -> list[Tensor]:
        backward()
        optimizer.clip_and_accumulate()
        found = [p.summed_grad / len(case.x) for p in module.parameters()]
        optimizer.zero_grad()
        return found

    return Engine(step, gradient)


def opacus_ghost(case: Case) -> Engine:
    """Opacus' ghost clipping: two backward passes."""
    _contiguous_inputs(case.denoiser)
    module = GradSampleModuleFastGradientClipping(case.denoiser, max_grad_norm=CLIP_NORM, use_ghost_clipping=True)
    adam = torch.optim.Adam(module.parameters(), lr=1e-6)
    optimizer = DPOptimizerFastGradientClipping(
        adam, noise_multiplier=1.0, max_grad_norm=CLIP_NORM, expected_batch_size=len(case.x)
    )

    def backward() -> None:
        optimizer.zero_grad()
        DPTensorFastGradientClipping(module, optimizer, case.losses(module)).backward()

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    def gradient() -> list[Tensor]:
        backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad / len(case.x) for p in module.parameters()]
        optimizer.zero_grad()
        return found

    return Engine(step, gradient)


ENGINES: dict[str, Callable[[Case], Engine]] = {
    "plain": plain,
    "rapid": lambda case: rapid(case, noise=True),
    "rapid, noise apart": lambda case: rapid(case, noise=False),
    BFLOAT16: lambda case: rapid(case, noise=False, autocast=True),
    "opacus hooks": lambda case: opacus(case, functorch=False),
    "opacus ghost": opacus_ghost,
    "opacus functorch": lambda case: opacus(case, functorch=True),
}


def _apply(adam: torch.optim.Adam, parameters: list[nn.Parameter], gradient: list[Tensor]) -> None:
    for parameter, own in zip(parameters, gradient, strict=True):
        parameter.grad = own
    adam.step()
    adam.zero_grad()


def _contiguous_inputs(network: nn.Module) -> None:
    """Work round Opacus' fault: its convolutions misread inputs that are not contiguous."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_pre_hook(lambda _, args: tuple(a.contiguous() for a in args))


def seconds(engine: Engine, device: torch.device) -> float:
    """Time of one step."""
    start = time.perf_counter()
    engine.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(engine: Engine, device: torch.device) -> int:
    """Largest sum of tensors allocated during a step, beyond weights and optimiser state."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.step()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def measure(name: str, batch: int, engines: list[str], runs: int, device: torch.device) -> None:
    """Print one row for each engine."""
    preset, overrides, _ = NETWORKS[name]
    settings = load_settings(preset, overrides)
    built: dict[str, Engine] = {}
    truth: list[Tensor] = []
    errors: dict[str, float] = {}
    for engine in engines:
        case = Case.make(settings, batch, device)
        try:
            built[engine] = ENGINES[engine](case)
            found = [g.detach().clone() for g in built[engine].gradient()]
            built[engine].step()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            built.pop(engine, None)
            print(f"{name:<20}{batch:>6}  {engine:<20} does not run: {str(error).splitlines()[0][:80]}")
            continue
        if engine == "rapid":
            truth = found
        if truth and engine != "plain":
            norm = sum(float(g.double().square().sum()) for g in truth) ** 0.5
            gap = sum(float((g - h).double().square().sum()) for g, h in zip(truth, found, strict=True)) ** 0.5
            errors[engine] = gap / norm
    # in turn, so that a drift of the machine's speed meets all
    rounds = [{engine: seconds(step, device) for engine, step in built.items()} for _ in range(runs)]
    peaks = {engine: peak_bytes(step, device) for engine, step in built.items()}
    for engine in built:
        times = [r[engine] for r in rounds]
        ratio = statistics.median(r[engine] / r["plain"] for r in rounds)
        agrees = f"{errors[engine]:.0e}" if engine in errors else ""
        print(
            f"{name:<20}{batch:>6}  {engine:<20}{statistics.median(times):>9.3f} s{ratio:>7.2f}x"
            f"{peaks[engine] / 2**20:>9.0f} MiB{peaks[engine] / peaks['plain']:>6.2f}x{agrees:>9}",
            flush=True,
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Opacus warns about things that do not matter here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=["letters-mnist", "imagenet32-cifar10", "pixels-32"])
    parser.add_argument(
        "--batch", type=at_least(1), action="append", help="instead of those of the network; may be repeated"
    )
    parser.add_argument(
        "--engine",
        action="append",
        choices=list(ENGINES),
        metavar="NAME",
        help=f"besides plain; of: {', '.join(ENGINES)}",
    )
    parser.add_argument("--runs", type=at_least(1), default=5)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    prepare_heap()
    with told("bench-dp-step"):
        device = choose_device(options.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}, median of {options.runs} steps in turn; ratios to the plain step")
    print(
        f"{'network':<20}{'batch':>6}  {'engine':<20}{'step':>11}{'time':>8}{'peak memory':>13}{'':>7}{'differs':>9}",
        flush=True,
    )
    # most CPUs have no bfloat16 arithmetic and imitate it slowly: there on request only
    usual = [name for name in ENGINES if name != "plain" and (device.type == "cuda" or name != BFLOAT16)]
    engines = ["plain", *(options.engine or usual)]
    with quiet():
        for name in options.networks:
            if name not in NETWORKS:
                sys.exit(f"unknown network {name}; choose of {', '.join(NETWORKS)}")
            for batch in options.batch or NETWORKS[name][2]:
                measure(name, batch, engines, options.runs, device)


if __name__ == "__main__":
    main()
