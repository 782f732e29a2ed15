"""`rapid demo` on the smallest networks: all three parts, the pictures, and a second run that continues."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests_support import TINY

from rapid.bundle import Bundle
from rapid.cli import demo

OVERRIDES = [
    *(one for one in TINY if one.startswith(("private.", "generation."))),
    "augmentations.reference=0",
    "private.moments.warmup={steps: 2, batch_size: 8, warmup_steps: 1}",
    "private.distillation.candidates=20",
    "private.distillation.training={steps: 2, batch_size: 8, warmup_steps: 1}",
]


@pytest.fixture
def few_samples(letters: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own subsets of the samples that ship."""
    monkeypatch.setattr(demo, "sample_path", lambda name: {"letters": letters, "digits": digits}[name])


@pytest.mark.usefixtures("few_samples")
@pytest.mark.filterwarnings("ignore:private.tones.share")  # noise hides the tones of so few images
@pytest.mark.filterwarnings("ignore:the probe takes .*% of the images")  # so small a probe may take none
def test_demo(networks: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path /= "my demo"
    demo.run_demo(tmp_path, torch.device("cpu"), networks, OVERRIDES)
    said = capsys.readouterr().out
    assert "differentially private" in said
    # as a shell takes it
    assert f"rapid serve --model '{tmp_path}/private'\n" in said
    pictures = [np.asarray(Image.open(tmp_path / name)) for name in ("samples.png", "neighbours.png")]
    assert all(picture.ndim == 3 and picture.std() > 1 for picture in pictures)
    private = Bundle.open(tmp_path / "private", "model", "private")
    assert private.privacy is not None
    assert private.privacy["epsilon"] <= 10
    # nothing is trained again
    demo.run_demo(tmp_path, torch.device("cpu"), networks, OVERRIDES)
    assert Bundle.open(tmp_path / "private", "model", "private").digest == private.digest
