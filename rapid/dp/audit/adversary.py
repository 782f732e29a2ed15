"""The adversary of a whole private stage: from what it sees to a score for each canary.

The model is linear. A result is the sum of the contributions of those canaries that are in the batch, and noise:

    y = sum over i of a_i d_i + s z,    P[a_i = 1] = q / 2,    v = (q / 2) (1 - q / 2), the variance of a_i

The best linear estimate of a is (D D^T + (s^2 / v) 1)^-1 D (y - q / 2 sum of d_i). It is close to <y, d_i>, the
score of Nasr et al. (USENIX Security 2023) and Steinke et al. (NeurIPS 2023), where noise dominates, and separates
canaries whose contributions resemble each other where it does not. The adversary measures what the noise really is
where no canary contributes, so as to find too little of it. Weighted by q over its variance, the estimate is about a
log-likelihood ratio of the coin, so that scores of different results may be added. The variance is v times the share of
a that is recovered, or more if the estimates scatter more. If the model is wrong, scores are worse, but a bound from
them holds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

JITTER = 1e-6
"""Least eigenvalue of D D^T, relative to the largest, that is told from rounding errors."""
MEASURED = 100
"""Least number of dimensions outside of the span of D in which the noise is measured; else the claimed one is used."""


class Adversary:
    """Scores of m canaries: the larger, the likelier that the canary took part.

    Attributes:
        white_box: from all that is seen, float64 (m,).
        black_box: from results of queries and trained networks alone, float64 (m,).
    """

    def __init__(self, count: int) -> None:
        self.white_box = torch.zeros(count, dtype=torch.float64)
        self.black_box = torch.zeros(count, dtype=torch.float64)

    def add_result(self, contributions: Tensor, total: Tensor, stddev: float) -> None:
        """The result of a query over all images.

        Args:
            contributions: (m, d).
            total: noisy sum, float64 (d,).
            stddev: of the noise, as claimed.
        """
        found = _scores(contributions, total, stddev, 1.0)
        self.white_box += found
        self.black_box += found

    def add_step(self, contributions: Tensor, total: Tensor, stddev: float, rate: float) -> None:
        """The noisy sum of a step of a training; arguments as `add_result`, and the sample rate."""
        self.white_box += _scores(contributions, total, stddev, rate)

    def add_losses(self, decrease: Tensor) -> None:
        """How far a training lowered the loss of each canary, float64 (m,); trainings count alike."""
        spread = float(decrease.std())
        if spread > 0:
            self.black_box += (decrease - decrease.mean()) / spread


def _scores(rows: Tensor, total: Tensor, stddev: float, rate: float) -> Tensor:
    """The scores of one result; see the module."""
    variance = rate / 2 * (1 - rate / 2)
    values, vectors = torch.linalg.eigh((rows @ rows.T).double())
    spanned = values > JITTER * values[-1]
    values, vectors = values[spanned], vectors[:, spanned]
    rest = total - rate / 2 * rows.sum(0, dtype=torch.float64)
    along = vectors.T @ (rows @ rest.to(rows)).double()
    noise, others = stddev**2, rows.shape[1] - len(values)
    if others >= MEASURED:
        noise = float((rest.square().sum() - (along.square() / values).sum()).clamp_min(0)) / others
    if not len(values) or not math.isfinite(noise):
        return torch.zeros(len(rows), dtype=torch.float64)
    shares = values / (values + noise / variance)
    found: Tensor = vectors @ (along / (values + noise / variance))
    found -= found.mean()
    # of an estimate: how far a coin moves it if the batch is known, and its variance if the model is right
    gain = float(shares.sum()) / len(rows)
    return found * (rate * gain / max(variance * gain, float(found.var())))
