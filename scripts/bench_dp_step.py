"""Time of a private step against the same non-private step (see scripts/bench-dp-step)."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from rapid.config import load_settings
from rapid.models import Denoiser
from rapid.private.gradients import BookKeeper

BATCH, RUNS, CLASSES = 256, 7, 10


def measure(preset: str) -> None:
    """Print one row of the table."""
    settings = load_settings(preset)
    denoiser = Denoiser.build(settings, CLASSES)
    keeper = BookKeeper(denoiser)
    x = torch.randn(BATCH, *settings.latent_shape)
    t = torch.randint(1, settings.schedule.timesteps + 1, (BATCH,))
    labels = torch.randint(CLASSES, (BATCH,))
    eps = torch.randn_like(x)

    def losses() -> torch.Tensor:
        return (denoiser(x, t, labels) - eps).square().flatten(1).mean(1)

    def plain() -> None:
        torch.autograd.grad(losses().mean(), keeper.parameters, allow_unused=True)

    def private() -> None:
        keeper.clipped_sum(losses, BATCH, 1.0)

    def seconds(step: Callable[[], None]) -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    seconds(plain), seconds(private)
    # in turn, so that a drift of the machine's speed meets both
    pairs = [(seconds(plain), seconds(private)) for _ in range(RUNS)]
    ratio = statistics.median(b / a for a, b in pairs)
    a, b = (statistics.median(times) for times in zip(*pairs, strict=True))
    size = sum(p.numel() for p in keeper.parameters) / 1e6
    print(f"{preset:<20}{size:>8.2f}M{BATCH:>7}{a:>11.3f} s{b:>11.3f} s{ratio:>9.2f}")


if __name__ == "__main__":
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'network':<20}{'size':>9}{'batch':>7}{'plain':>13}{'private':>13}{'ratio':>9}")
    for name in sys.argv[1:] or ["demo", "letters-mnist"]:
        measure(name)
