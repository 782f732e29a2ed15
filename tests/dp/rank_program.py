"""What the tests of ranks run under torchrun: writes what each rank computed to OUT/RANK.pt."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from rapid.dp import Plan, PrivateMechanism, Ranks
from rapid.dp.accounting import Release
from rapid.dp.overlap import noisy_count
from rapid.errors import InputError

SIZE, BATCH = 41, [0, 1, 2, 5, 8, 13, 21, 34, 40]


def plan(**changes: float) -> Plan:
    """A plan for the small regression."""
    base = {
        "dataset_size": SIZE, "expected_batch": 10, "steps": 400, "clip_norm": 0.5, "noise_multiplier": 2.0,
        "delta": 1e-3, "multiplicity": 2,
    }  # fmt: skip
    return Plan.model_validate(base | changes)


def mechanism(chosen: Plan, ranks: Ranks, scale: float = 1.0) -> PrivateMechanism:
    """The same network and data on every rank; each keeps its part of the data."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 50))
    x = torch.randn(chosen.dataset_size, 3)[list(ranks.part(chosen.dataset_size))]

    def losses(indices: Tensor) -> Tensor:
        return network(x[indices]).square().sum(1) * scale

    return PrivateMechanism(chosen, network, losses, physical_batch=3, ranks=ranks)


def sum_of_batch(ranks: Ranks) -> Tensor:
    """The clipped sum of BATCH over all ranks."""
    own = [index // ranks.count for index in BATCH if index % ranks.count == ranks.rank]
    total = mechanism(plan(), ranks).clipped_sum(torch.tensor(own, dtype=torch.int64))
    ranks.all_reduce(total)
    return total


def failure(ranks: Ranks, failing: int) -> tuple[str, bool]:
    """What every rank sees when one fails."""

    def action() -> None:
        if ranks.rank == failing:
            raise InputError(f"rank {failing} has no file")

    try:
        ranks.all_or_none(action)
    except InputError as error:
        return str(error), error.reported
    return "", False


def disagreement(ranks: Ranks) -> str:
    """What every rank sees when their files differ."""
    ranks.agree("--same", b"same")
    try:
        ranks.agree("--private", bytes([ranks.rank]))
    except InputError as error:
        return str(error)
    return ""


def main(out: Path) -> None:
    """Compute and save."""
    with Ranks.join(torch.device("cpu")) as ranks:
        drawing = mechanism(plan(), ranks)
        # losses without a gradient: what comes out is the noise
        silent = mechanism(plan(expected_batch=1), ranks, 0.0)
        # one example: the other rank's batches are all empty
        lonely = mechanism(plan(dataset_size=1, expected_batch=1, steps=3), ranks)
        result = {
            "count": ranks.count,
            "sum": sum_of_batch(ranks),
            "drawn": [len(drawing.draw_batch()) for _ in range(400)],
            "noise": [torch.cat([g.flatten() for g in silent.gradient()]) for _ in range(20)],
            "lonely": [torch.cat([g.flatten() for g in lonely.gradient()]) for _ in range(3)],
            "lonely steps": lonely.steps_taken,
            "counts": [noisy_count(1000 + ranks.rank, Release(100.0, 1.0, 1), ranks) for _ in range(400)],
            "failure": [failure(ranks, rank) for rank in range(ranks.count)],
            "disagreement": disagreement(ranks),
            "shared": ranks.broadcast({"from": ranks.rank}),
        }
        torch.save(result, out / f"{ranks.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
