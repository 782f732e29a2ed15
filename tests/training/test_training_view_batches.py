"""Batches of views: each row belongs to its image, and ranks share a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rapid.config.sections import ViewSettings
from rapid.ranks import Ranks
from rapid.training.view_batches import ViewBatch, ViewBatches

COUNT, CLASSES = 4000, 5
PLAIN = ViewSettings()


def drawn(ranks: Ranks, seed: int = 0) -> ViewBatch:
    # image n is even of level 10 n and has class n
    images = np.repeat(np.arange(CLASSES, dtype=np.uint8) * 10, 16).reshape(CLASSES, 4, 4)
    batches = ViewBatches(
        images,
        np.arange(CLASSES),
        CLASSES,
        PLAIN,
        (2, 3),
        label_dropout=0.25,
        device=torch.device("cpu"),
        ranks=ranks,
    )
    return batches.draw(COUNT, torch.Generator().manual_seed(seed))


def test_rows_have_the_labels_of_their_images() -> None:
    views, labels, uniform, noise = drawn(Ranks())
    assert views.shape == (COUNT, 1, 4, 4)
    kept = labels < CLASSES
    levels = (views[:, 0, 0, 0] + 1) * 127.5
    torch.testing.assert_close(levels[kept], labels[kept] * 10.0, atol=1e-3, rtol=0)
    # five standard deviations of a mean over the batch
    assert kept.double().mean() == pytest.approx(0.75, abs=5 * (0.25 * 0.75 / COUNT) ** 0.5)
    assert labels.bincount(minlength=CLASSES + 1)[:CLASSES].min() > 0
    assert uniform.dtype == torch.float64
    assert float(uniform.mean()) == pytest.approx(0.5, abs=5 * (1 / 12 / COUNT) ** 0.5)
    assert noise.shape == (COUNT, 2, 3)
    assert float(noise.square().mean()) == pytest.approx(1, abs=5 * (2 / noise.numel()) ** 0.5)


def test_ranks_share_the_batch_of_one_process() -> None:
    whole, parts = drawn(Ranks()), [drawn(Ranks(rank, 3)) for rank in range(3)]
    for own, shared in zip(whole, zip(*parts, strict=True), strict=True):
        for rank, part in enumerate(shared):
            assert torch.equal(part, own[rank::3])
