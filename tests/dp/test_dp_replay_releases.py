"""Record and replay of RAPID's private stage with every release that it can have.

Moments in a ball of their own, votes and tones, and all that is computed from them: warm-up, distillation before and
after DP-SGD, levels of guidance, the confidence. With the noisy results held, another image changes nothing.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tests_replay import LAST, Stage, same_with_held_results

from rapid.data import load_images
from rapid.methods import apply_overrides
from rapid.methods.rapid import levels
from rapid.methods.rapid.settings import RapidSettings
from rapid.tones import fit

RELEASES = {"overlap", "probe", "centre", "radius", "moments", "denoiser", "votes", "tones"}
PARTS = {
    *(f"methods/rapid/{name}.py" for name in ("ball", "moments", "warmup", "distillation", "votes", "levels")),
    "tones/release.py", "tones/fit.py",
}  # fmt: skip
"""Sources that the stage must be seen to run through."""
EVERYTHING = (
    "private.objective=late", "private.start=700", "private.expected_batch=60", "private.physical_batch=64",
    "private.checkpoint_seconds=0", "private.label_dropout=0.2", "private.tones.share=0.2",
    "private.moments.share=0.3", "private.moments.covariance=class", "private.moments.warmup.steps=2",
    "private.moments.warmup.batch_size=8",
    "private.distillation={candidates: 40, rounds: 1, rounds_before: 1, keep: 1, votes_share: 0.2, guidance: 1.5, "
    "training: {steps: 2, batch_size: 8}}",
    "generation.retrieval=moments", "generation.start=500", "generation.steps=10", "generation.attempts=2",
    "generation.probe_guidance=0.5", "generation.enough_accepted=0.33", "generation.least_accepted=0.5",
    "generation.confidence=0.5", "generation.public_below=62",
)  # fmt: skip


@pytest.fixture
def stage(
    public_bundle: Path,
    digits: Path,
    tiny_settings: RapidSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Stage:
    torch.set_num_threads(1)
    monkeypatch.setattr(fit, "DRAWN", 24)
    monkeypatch.setattr(levels, "DRAWN", 20)
    monkeypatch.setattr(levels, "LEAST_DRAWN", 2)
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), list(EVERYTHING))
    # with a small epsilon 100 images tell too little about their tones, and no curve is fitted
    return Stage(settings, public_bundle, load_images(digits, "private"), tmp_path, epsilon=200.0, delta=1e-4)


def test_with_held_results_another_image_changes_nothing(stage: Stage) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # what is imported once or cached is so from here on
        stage.run()
        first = stage.run()
        assert {name for name, _, _ in first.executed} >= PARTS
        listed = {release["name"] for release in first.statement["releases"]}
        assert listed == RELEASES
        white = np.full(stage.images.images.shape[1:], 255, np.uint8)
        same_with_held_results(first, stage.run(image=white, held=first.released))
        nothing = stage.run(silent=LAST, held=first.released)
        same_with_held_results(first, nothing)
    # it was taken away from the means and histograms, too
    different = [
        any(not torch.equal(one, other) for one, other in zip(*results, strict=True))
        for results in zip(first.released, nothing.released, strict=True)
    ]
    assert sum(different) >= len(RELEASES)
