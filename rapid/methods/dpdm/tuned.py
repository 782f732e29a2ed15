"""What DPDM found best for each epsilon: the configuration (section 5.2), and the samplers of Tables 14 and 15."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rapid.diffusion.preconditioning import Configuration
from rapid.diffusion.samplers import Churn

Aim = Literal["fidelity", "downstream"]
Data = Literal["mnist", "fashion-mnist", "celeba"]


@dataclass(frozen=True)
class Tuned:
    """Churn sampler of 1,000 steps, and the weight w of guidance, (1 + w) D(label) - w D(null)."""

    guidance: float
    churn: Churn


TUNED: dict[tuple[Aim, Data], dict[float, Tuned]] = {
    ("fidelity", "mnist"): {
        0.2: Tuned(1.0, Churn(200, 0.01, 50)),
        1.0: Tuned(0.0, Churn(100, 0.05, 50)),
        10.0: Tuned(0.25, Churn(50, 0.05, 50)),
    },
    ("fidelity", "fashion-mnist"): {
        0.2: Tuned(2.0, Churn(150, 0.02, 10)),
        1.0: Tuned(1.0, Churn(50, 0.025, 50)),
        10.0: Tuned(0.25, Churn(25, 0.2, 50)),
    },
    ("fidelity", "celeba"): {1.0: Tuned(0.0, Churn(200, 0.005, 50)), 10.0: Tuned(0.0, Churn(50, 0.005, 50))},
    ("downstream", "mnist"): {
        0.2: Tuned(0.125, Churn(10, 0.2, 10, 1.005)),
        1.0: Tuned(0.0, Churn(10, 0.1, 50)),
        10.0: Tuned(0.0, Churn(10, 0.025, 50)),
    },
    ("downstream", "fashion-mnist"): {
        0.2: Tuned(0.125, Churn(5, 0.02, 80, 1.005)),
        1.0: Tuned(0.0, Churn(10, 0.025, 50)),
        10.0: Tuned(0.0, Churn(10, 0.1, 50)),
    },
}
"""By aim, data and epsilon: the best by FID (Table 14), and by accuracy of a classifier (Table 15)."""
CONFIGURED: dict[float, Configuration] = {0.2: "v", 1.0: "edm", 10.0: "edm"}


def configuration_for(epsilon: float) -> Configuration:
    """The configuration of the paper's epsilon that is nearest on a logarithmic scale: v up to 0.447, then EDM."""
    return CONFIGURED[_nearest(CONFIGURED, epsilon)]


def tuned_for(aim: Aim, data: Data, epsilon: float) -> Tuned:
    """Sampler settings of the nearest epsilon."""
    columns = TUNED[aim, data]
    return columns[_nearest(columns, epsilon)]


def _nearest(epsilons: Iterable[float], epsilon: float) -> float:
    return min(epsilons, key=lambda known: abs(math.log(known / epsilon)))
