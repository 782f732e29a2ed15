"""Releases and balances for tests of the ledger."""

from __future__ import annotations

from pathlib import Path

from rapid.dp.calibration import single_noise_multiplier
from rapid.dp.entry import Limit
from rapid.dp.ledger import Ledger
from rapid.dp.releases import QuerySpec, Release
from rapid.dp.spending import Balance, balance

DELTA = 1e-5

SIZE = 100


def counted(noise_multiplier: float, name: str = "count") -> Release:
    return Release(spec=QuerySpec(name=name, kind="count", dataset_size=SIZE), noise_multiplier=noise_multiplier)


ASKED = Limit(1.0, DELTA)


def spent(path: Path, dataset: str = "a" * 32) -> Balance:
    return balance(Ledger(path).entries(), dataset)


def gaussian(epsilon: float) -> list[Release]:
    return [counted(single_noise_multiplier(epsilon, DELTA))]
