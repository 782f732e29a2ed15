"""Record and replay of the whole private stage: another private image changes noisy results and nothing else.

The stage of RAPID is run again with the same random bytes: overlap check, probe, latents, denoiser, ledger and bundle.
All that runs of `rapid` and `rapid_index` is compared, and all that is written and printed. For all methods, with the
noisy results held, `tests/methods/test_all_methods.py` does so.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tests_replay import LAST, Stage, same_but_noisy_results

from rapid.data import load_images
from rapid.methods import apply_overrides
from rapid.methods.rapid.settings import RapidSettings

PARTS = {
    "stages/private.py", "methods/rapid/private_stage.py", "methods/rapid/objectives.py", "methods/rapid/neighbours.py",
    "methods/rapid/search.py",
    "data/thumbnails.py", "dp/overlap.py", "dp/access.py", "dp/queries.py", "dp/mechanism.py",
    "dp/gradients/bookkeeper.py",
    "dp/randomness.py", "dp/spending.py", "dp/ledger.py", "dp/statement.py", "probe/head.py", "probe/network.py",
    "nn/autoencoder.py", "nn/denoiser.py", "training/loop.py", "training/checkpoint.py", "bundle/format.py", "keys.py",
    "knowledge_base.py",
}  # fmt: skip
"""Sources that the private stage of the objective `rapid` must be seen to run through."""
OVERRIDES = ("private.start=300", "private.neighbours=2")
"""More of the objective `rapid`."""


def asked(objective: str) -> list[str]:
    return [f"private.objective={objective}", *(OVERRIDES if objective == "rapid" else ())]


@pytest.fixture(scope="module")
def stage(
    public_bundle: Path, digits: Path, tiny_settings: RapidSettings, tmp_path_factory: pytest.TempPathFactory
) -> Stage:
    overrides = ["private.expected_batch=50", "private.multiplicity=2", "private.physical_batch=32"]
    overrides += ["private.checkpoint_seconds=0", "private.label_dropout=0.2"]
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), overrides)
    assert isinstance(settings, RapidSettings)
    images = load_images(digits, "private")
    found = Stage(settings, public_bundle, images, tmp_path_factory.mktemp("stage"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # what is imported once or cached is so from here on
        found.warmed = found.run(*asked("rapid"))
    return found


@pytest.mark.filterwarnings("ignore:at this epsilon")
@pytest.mark.parametrize(
    ("objective", "others"),
    [("rapid", ["black", "white", "noise", "nothing"]), ("late", ["white", "nothing"]), ("ldm", ["noise", "nothing"])],
)
def test_the_whole_stage_on_another_image_differs_in_noisy_results_alone(
    stage: Stage, objective: str, others: list[str]
) -> None:
    """Control flow, what is written and what is shown are those of the set with another image in the place of one.

    "nothing": the same set in which the image contributes nothing, the neighbour that the guarantee speaks of.
    """
    first, shape = stage.run(*asked(objective)), stage.images.images.shape[1:]
    assert len(first.executed) > 50_000
    if objective == "rapid":
        assert {name for name, _, _ in first.executed} >= PARTS
        # nothing random is left but what is replayed, or the comparison would find differences of its own
        assert stage.warmed is not None
        assert all(torch.equal(a, b) for a, b in zip(stage.warmed.weights, first.weights, strict=True))
    # three releases, the last two saved after every step and at their end
    assert len(first.saved) == 1 + 2 * (3 + 1)
    for other in others:
        if other == "nothing":
            second = stage.run(*asked(objective), silent=LAST)
        elif other == "noise":
            second = stage.run(
                *asked(objective), image=np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)
            )
        else:
            image = np.full(shape, {"black": 0, "white": 255}[other], np.uint8)
            second = stage.run(*asked(objective), image=image)
        same_but_noisy_results(first, second)
