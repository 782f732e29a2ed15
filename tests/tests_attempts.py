"""A run in a folder, with its ledger, for tests of attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rapid.data import ImageSet
from rapid.dp import Budget, DpSgdSpec, Execution, PrivateAccess, PublicFacts, QuerySpec, Release
from rapid.dp.attempts import counted
from rapid.dp.entry import Limit
from rapid.dp.ledger import Ledger
from rapid.dp.spending import Charge
from rapid.errors import PrivacyRefused, Stopped
from rapid.training import RunFolder, Trainer

SIZE, STEPS, DATA = 20, 6, "a" * 32

COUNT = Release(spec=QuerySpec(name="many", kind="count", dataset_size=SIZE), noise_multiplier=5.0)

TRAINING = Release(
    spec=DpSgdSpec(name="network", dataset_size=SIZE, expected_batch=5, steps=STEPS, clip_norm=1.0),
    noise_multiplier=3.0,
)

BUDGET = Budget(epsilon=4.0, delta=1e-3, dataset_size=SIZE, releases=(COUNT, TRAINING))

PIXELS = np.random.default_rng(0).integers(0, 256, (SIZE, 2, 2), dtype=np.uint8)

EVERY_STEP = Execution(checkpoint_seconds=-1.0)

SELDOM = Execution(checkpoint_seconds=1e6)


class Run:
    """A run in a folder, with its ledger; `network` is that of the last attempt."""

    network: nn.Linear

    def __init__(self, folder: Path, budget: Budget = BUDGET) -> None:
        self.ledger, self.out, self.budget = Ledger(folder / "ledger.jsonl"), folder / "out", budget

    def go(self, after_step: Callable[[int], None] | None = None, execution: Execution = EVERY_STEP) -> int:
        """An attempt, as the command makes it; returns the noisy count."""
        with RunFolder.enter(self.out, "train-private", {}, resume=True) as folder:
            images = ImageSet(PIXELS, None, (), "private")
            access = PrivateAccess(images, PublicFacts.of(images), self.budget, folder, device=torch.device("cpu"))
            limit = Limit(self.budget.epsilon, self.budget.delta)
            charge = Charge(self.ledger, DATA, folder.run_name(DATA), limit, folder.earlier_names())
            with access.charged(charge):
                count = access.count("many", lambda rows: rows.flatten(1).float().mean(1) > 127, access.images)
                # without noise all attempts would have the same weights
                self.network = network = nn.Linear(4, 1, bias=False)
                nn.init.ones_(network.weight)
                optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

                def losses(rows: Tensor) -> Tensor:
                    return network(rows.float().flatten(1) / 255).square().sum(1)

                trainer = Trainer(network, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0))
                access.train("network", trainer, losses, [access.images], execution=execution, between_steps=after_step)
            folder.leave()
            return count

    def until(self, step: int, error: BaseException | None = None, **how: Any) -> None:
        """An attempt that ends when so many steps are done: by a stop, or a crash."""

        def end(done: int) -> None:
            if done == step:
                raise error or Stopped("stopped")

        with pytest.raises(type(error or Stopped(""))):
            self.go(end, **how)

    def charged(self) -> dict[str, int]:
        """The number of steps that all attempts are charged for."""
        total: Counter[str] = Counter()
        for line in counted(self.ledger.entries(), DATA):
            for release in line.releases:
                total[release.name] += sum(release.steps.values())
        return dict(total)

    def kinds(self) -> list[str]:
        return [entry.kind for entry in self.ledger.entries()]

    def checkpoint(self, name: str = "network") -> Path:
        return self.out / "checkpoints" / f"{name}.pt"


def banded(folder: Path, steps: int = 8, band: int = 3) -> Run:
    """A run whose noise is correlated; its rounds have `band` steps."""
    spec = TRAINING.spec.model_copy(update={"band": band, "steps": steps})
    return Run(folder, BUDGET.model_copy(update={"releases": (COUNT, TRAINING.model_copy(update={"spec": spec}))}))


def refuse(*_: object) -> None:
    raise PrivacyRefused("overlap")
