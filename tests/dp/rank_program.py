"""What the tests of ranks run under torchrun: writes what each rank computed to OUT/RANK.pt."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from rapid.data import ImageSet
from rapid.dp import (
    Budget,
    DpSgdSpec,
    PrivateAccess,
    PrivateMechanism,
    PublicFacts,
    QuerySpec,
    Ranks,
    Release,
)
from rapid.dp.queries import noisy_sum
from rapid.errors import InputError
from rapid.training import RunFolder, Trainer

SIZE, BATCH = 41, [0, 1, 2, 5, 8, 13, 21, 34, 40]


def release(**changes: float) -> Release:
    """DP-SGD of the small regression."""
    base = {
        "name": "any", "dataset_size": SIZE, "expected_batch": 10, "steps": 400, "clip_norm": 0.5, "multiplicity": 2,
    }  # fmt: skip
    return Release(spec=DpSgdSpec.model_validate(base | changes), noise_multiplier=2.0)


def mechanism(chosen: Release, ranks: Ranks, scale: float = 1.0) -> PrivateMechanism:
    """The same network and data on every rank; each keeps its part of the data."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 50))
    size = chosen.spec.dataset_size
    x = torch.randn(size, 3)[list(ranks.part(size))]

    def losses(indices: Tensor) -> Tensor:
        return network(x[indices]).square().sum(1) * scale

    return PrivateMechanism(chosen, network, losses, physical_batch=3, ranks=ranks)


def sum_of_batch(ranks: Ranks) -> Tensor:
    """The clipped sum of BATCH over all ranks."""
    own = [index // ranks.count for index in BATCH if index % ranks.count == ranks.rank]
    total = mechanism(release(), ranks)._clipped_sum(torch.tensor(own, dtype=torch.int64))
    ranks.all_reduce(total)
    return total


def failure(ranks: Ranks, failing: int) -> tuple[str, str, bool]:
    """What every rank sees when one fails."""

    def action() -> None:
        if ranks.rank == failing:
            raise InputError("private", f"rank {failing} has no file", failing)

    try:
        ranks.all_or_none(action)
    except InputError as error:
        return str(error), error.field, error.reported
    return "", "", False


def disagreement(ranks: Ranks) -> str:
    """What every rank sees when their files differ."""
    ranks.agree("--same", b"same")
    try:
        ranks.agree("--private", bytes([ranks.rank]))
    except InputError as error:
        return str(error)
    return ""


def banded(ranks: Ranks) -> Tensor:
    """Estimates of steps with correlated noise and nothing else, float (6, d)."""
    silent = mechanism(release(steps=6, band=3), ranks, 0.0)
    return torch.stack([torch.cat([part.flatten() for part in silent.gradient()]) for _ in range(6)])


def counts(ranks: Ranks) -> list[float]:
    """Noisy sums of 1000 examples of the first rank and one more of each other."""
    count = Release(spec=QuerySpec(name="many", kind="count", dataset_size=5000), noise_multiplier=100.0)
    own = torch.tensor([1000.0 + ranks.rank], dtype=torch.float64)
    return [noisy_sum(own, count, ranks).item() for _ in range(400)]


def queries(ranks: Ranks, folder: Path) -> dict[str, object]:
    """Each release of an access once, and again from its record."""
    images = torch.arange(SIZE * 16, dtype=torch.float64).remainder(256).byte().view(SIZE, 4, 4)[list(ranks.part(SIZE))]
    labels = torch.arange(SIZE).remainder(3)[list(ranks.part(SIZE))]
    specs = [
        QuerySpec(name="count", kind="count", dataset_size=SIZE),
        QuerySpec(name="mean", kind="mean", sensitivity=0.5, dataset_size=SIZE),
        QuerySpec(name="histogram", kind="histogram", dataset_size=SIZE),
        release(steps=3).spec,
    ]
    # next to no noise, so that the sums over all ranks show
    releases = tuple(Release(spec=spec, noise_multiplier=1e-3) for spec in specs)
    budget = Budget(epsilon=1, delta=0.1, dataset_size=SIZE, releases=releases)
    facts = PublicFacts(SIZE, ("a", "b", "c"), (4, 4))
    asked = []
    for _ in range(2):
        own = ImageSet(images.numpy(), labels.numpy(), facts.classes, "own")
        access = PrivateAccess(own, facts, budget, RunFolder(folder), device=torch.device("cpu"), ranks=ranks)
        torch.manual_seed(ranks.rank)
        network = nn.Linear(16, 1)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        access.train(
            "any",
            Trainer(network, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
            lambda rows, network=network: network(rows.float().flatten(1)).square().sum(1) / 1e4,
            [access.images],
        )
        asked.append(
            {
                "count": access.count("count", lambda labels: labels == 1, access.labels),
                "mean": access.mean("mean", lambda rows: rows.flatten(1) / 1e4, access.images),
                "histogram": access.histogram("histogram", 3, lambda labels: labels, access.labels),
                "weights": network.weight.detach().clone(),
            }
        )
    return {"asked": asked, "steps": access.steps_taken()}


def main(out: Path) -> None:
    """Compute and save."""
    with Ranks.join(torch.device("cpu")) as ranks:
        drawing = mechanism(release(), ranks)
        # losses without a gradient: what comes out is the noise
        silent = mechanism(release(expected_batch=1), ranks, 0.0)
        # one example: the other rank's batches are all empty
        lonely = mechanism(release(dataset_size=1, expected_batch=1, steps=3), ranks)
        result = {
            "count": ranks.count,
            "sum": sum_of_batch(ranks),
            "drawn": [len(drawing._draw_batch()) for _ in range(400)],
            "noise": [torch.cat([g.flatten() for g in silent.gradient()]) for _ in range(20)],
            "lonely": [torch.cat([g.flatten() for g in lonely.gradient()]) for _ in range(3)],
            "lonely steps": lonely.steps_taken,
            "banded": banded(ranks),
            "counts": counts(ranks),
            "queries": queries(ranks, out / "run"),
            "failure": [failure(ranks, rank) for rank in range(ranks.count)],
            "disagreement": disagreement(ranks),
            "shared": ranks.broadcast({"from": ranks.rank}),
        }
        torch.save(result, out / f"{ranks.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
