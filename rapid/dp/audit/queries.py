"""Tests of noisy counts, histograms and means as `PrivateAccess` releases them, the overlap count among them."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rapid.data import ImageSet
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.audit.findings import Finding, certain
from rapid.dp.audit.noise import noise_findings, scale_finding
from rapid.dp.budget import Budget
from rapid.dp.queries import noisy_sum
from rapid.dp.releases import QuerySpec, Release
from rapid.ranks import Ranks
from rapid.training import RunFolder

COUNTS, SUMS = 100, 4000
"""Single counts through the access, and noisy sums of one number each: enough to find a tenth too little noise."""
VECTORS, BINS = 8, 4096
LARGE = 1e5
"""Noise multiplier where the results are whole numbers, which are then fine enough."""
QUIET = 1e-4
IMAGES = 6

OpenAccess = Callable[..., PrivateAccess]
"""(images, facts, budget, run_folder, device=...) -> the access that is audited."""


def query_findings(access: OpenAccess = PrivateAccess) -> list[Finding]:
    """Test the noise of all kinds of queries, and how much one image can change their sums.

    The overlap check is a count. Noise: `noise_findings` on means and histograms of many elements, and the chi-square
    test of the scale of single counts. Sensitivity, with almost no noise: counts with and without an image differ by at
    most 1, histograms by at most 1 in l2, sums of features by at most their bound.

    Args:
        access: opens the images; anything but the default is for tests of the audit itself.
    """
    # hundreds of progress bars
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        return [*_noise(access, Path(folder) / "noise"), *_sensitivity(access, Path(folder))]


def _noise(access: OpenAccess, folder: Path) -> list[Finding]:
    means, histograms, counts = (
        [f"{kind}{number}" for number in range(count)]
        for kind, count in (("mean", VECTORS), ("histogram", VECTORS), ("count", COUNTS))
    )
    specs = [
        *(_spec(name, "mean", 0.5) for name in means),
        *(_spec(name, "histogram") for name in histograms),
        *(_spec(name, "count") for name in counts),
    ]
    opened = _open(access, specs, LARGE, folder, present=[False] * IMAGES)
    rows = torch.stack(
        [opened.mean(name, lambda rows: torch.zeros(len(rows), BINS), opened.images) for name in means]
    ) * (IMAGES / (0.5 * LARGE))
    found = noise_findings("means", rows, [("features", BINS)])
    bins = torch.stack([opened.histogram(name, BINS, _nowhere, opened.labels) for name in histograms]) / LARGE
    found += noise_findings("histograms", bins, [("bins", BINS)])
    release = Release(spec=_spec("sum", "count"), noise_multiplier=LARGE)
    sums = [noisy_sum(torch.zeros(1, dtype=torch.float64), release, Ranks()).item() / LARGE for _ in range(SUMS)]
    found.append(scale_finding("sums", "noise: scale", np.array(sums)))
    released = [opened.count(name, lambda labels: labels == 1, opened.labels) for name in counts]
    return [*found, scale_finding("counts", "noise: scale", np.array(released, np.float64) / LARGE)]


def _sensitivity(access: OpenAccess, folder: Path) -> list[Finding]:
    specs = [_spec("count", "count"), _spec("histogram", "histogram"), _spec("mean", "mean", 0.5)]
    results = []
    for present in (True, False):
        who = [True] * (IMAGES - 1) + [present]
        opened = _open(access, specs, QUIET, folder / f"{present}", present=who)

        def features(labels: Tensor) -> Tensor:
            # far beyond the bound, and nothing for an image that is out
            return labels[:, None] * torch.tensor([3e6, -4e6])

        results.append(
            (
                torch.tensor([float(opened.count("count", lambda labels: labels * 7, opened.labels))]),
                opened.histogram("histogram", 3, lambda labels: torch.where(labels == 1, 2, -1), opened.labels),
                opened.mean("mean", features, opened.labels) * (IMAGES / 0.5),
            )
        )
    found = []
    for kind, one, other in zip(("count", "histogram", "mean"), *results, strict=True):
        change = float((one - other).norm())
        # noise of 1e-4 in at most three places
        found.append(certain("queries", f"sensitivity: {kind}", change <= 1 + 20 * QUIET, change))
    return found


def _open(
    access: OpenAccess, specs: Sequence[QuerySpec], noise: float, folder: Path, present: Sequence[bool]
) -> PrivateAccess:
    """Images whose label says whether they take part."""
    labels = np.array(present, np.int64)
    images = ImageSet(np.zeros((IMAGES, 4, 4), np.uint8), labels, ("out", "in"), "canaries")
    releases = tuple(Release(spec=spec, noise_multiplier=noise) for spec in specs)
    budget = Budget(epsilon=1, delta=0.1, dataset_size=IMAGES, releases=releases)
    return access(images, PublicFacts.of(images), budget, RunFolder(folder), device=torch.device("cpu"))


def _spec(name: str, kind: Literal["count", "mean", "histogram"], sensitivity: float = 1.0) -> QuerySpec:
    return QuerySpec(name=name, kind=kind, sensitivity=sensitivity, dataset_size=IMAGES)


def _nowhere(labels: Tensor) -> Tensor:
    return torch.full_like(labels, -1)
