"""How the public images of a batch are drawn for the probe, and what is computed of all of them."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from scipy.stats import chisquare

from rapid.config.sections import ImageSettings, ProbeSettings, Training
from rapid.data import to_unit_range
from rapid.probe.features import ProbeRecipe, draw_rows, train_features
from rapid.training import Checkpoint


def test_rows_are_drawn_as_often_as_their_weights_say() -> None:
    """A row of weight 0 never is."""
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.5, 0.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    counts = np.bincount(draw_rows(weights.cumsum(0), 90_000, generator), minlength=6)
    assert counts[weights == 0].sum() == 0
    assert chisquare(counts[[1, 3, 4]], 90_000 * np.array([1, 3, 0.5]) / 4.5).pvalue > 0.001


def test_there_may_be_more_rows_than_torch_multinomial_takes() -> None:
    count = (1 << 24) + 5
    rows = draw_rows(torch.ones(count, dtype=torch.float64).cumsum(0), 1000, torch.Generator().manual_seed(0))
    assert rows.dtype == torch.int64
    assert 0 <= int(rows.min()) < count / 50
    assert count - count / 50 < int(rows.max()) < count


def test_what_follows_the_training_is_that_of_all_images(tmp_path: Path) -> None:
    """Prototypes and projection against numpy, with classes of 500 images, of 20 and of none, in two parts."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat([0, 2], [500, 20]))
    images = rng.integers(0, 256, (len(labels), 8, 8), np.uint8)
    settings = ProbeSettings(channels=4, features=6, training=Training(steps=2, batch_size=8))
    recipe = ProbeRecipe(images="", made_from={}, image=ImageSettings(size=8), probe=settings)
    probe = train_features(recipe, images, labels, 3, torch.device("cpu"), Checkpoint(tmp_path / "state.pt"))
    with torch.no_grad():
        views = to_unit_range(images, torch.device("cpu"))
        features = probe.features(views).numpy()
        (outputs,) = probe.outputs(views)
    means = [features[labels == label].mean(0) if (labels == label).any() else 0 * features[0] for label in range(3)]
    np.testing.assert_allclose(probe.prototypes.numpy(), means, rtol=1e-4, atol=1e-5)
    centred = outputs.double().numpy()
    moments = torch.from_numpy(centred.mean(0)), torch.from_numpy(np.cov(centred.T, bias=True))
    again = copy.deepcopy(probe)
    again.fit_projection([moments])
    with torch.no_grad():
        found = again.features(views).numpy()
    # the sign of a principal component is free
    np.testing.assert_allclose(np.abs(found), np.abs(features), rtol=1e-3, atol=1e-4)
