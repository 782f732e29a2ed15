"""DPDM after `rapid tune`: a trial has a smaller epsilon than all of them, and by that one everything is chosen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rapid.data.private import PrivateImages
from rapid.dp.trials import Trials
from rapid.methods.dpdm.generator import DpdmGenerator
from rapid.methods.dpdm.private_stage import chosen_configuration
from rapid.methods.dpdm.settings import DpdmSettings
from rapid.methods.dpdm.tuned import tuned_for
from rapid.stages.tuned import Scoring, tune_private_bundle

CPU = torch.device("cpu")
SETTINGS = DpdmSettings.model_validate(
    {
        "image": {"size": 16},
        "network": {"channels": 8, "heads": 2},
        "private": {"expected_batch": 40, "steps": 2},
        "generation": {"steps": 2, "aim": "fidelity"},
    }
)


def test_images_are_drawn_as_the_model_was_trained(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4000, 16, 16), np.uint8)
    np.savez(tmp_path / "p.npz", images=images, labels=np.arange(4000) % 2, classes=np.array(["a", "b"]))
    scoring = Scoring(lambda folder, device: lambda images: torch.zeros(len(images), 2), 0.1, {})
    bundle = tune_private_bundle(
        None, PrivateImages(tmp_path / "p.npz"), tmp_path / "out", {"a": SETTINGS}, scoring, epsilon=1.0, delta=1e-4,
        trials=Trials(mean=3), device=CPU, resume=False, ledger=tmp_path / "ledger.jsonl",
    )  # fmt: skip
    assert bundle.privacy is not None
    assert bundle.privacy["epsilon"] == pytest.approx(1, rel=0.02)
    one = bundle.privacy["selection"]["epsilon_of_one_trial"]
    # they would be chosen otherwise by the epsilon of all trials
    assert chosen_configuration(SETTINGS, one) != chosen_configuration(SETTINGS, bundle.privacy["epsilon"])
    assert tuned_for("fidelity", "mnist", one) != tuned_for("fidelity", "mnist", bundle.privacy["epsilon"])
    assert bundle.config.facts["configuration"] == chosen_configuration(SETTINGS, one)
    generator = DpdmGenerator(bundle, CPU, bundle.settings_as(DpdmSettings).generation)
    assert generator.tuned == tuned_for("fidelity", "mnist", one)
