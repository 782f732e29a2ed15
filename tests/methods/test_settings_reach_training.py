"""Settings of the private stages reach the training: what `PrivateAccess.train` is given, by method."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from methods.tiny import TINY

from rapid.data.private import PrivateImages
from rapid.dp.access import PrivateAccess
from rapid.methods import apply_overrides
from rapid.methods.dp_diffusion.networks import build_schedule
from rapid.methods.dp_diffusion.settings import DpDiffusionSettings
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Denoiser
from rapid.stages.private import train_private_bundle
from rapid.training import Trainer

CPU = torch.device("cpu")
RATE = 0.004


class Given(Exception):
    """Ends a run where its training would begin."""

    def __init__(self, trainer: Trainer, losses: Any) -> None:
        self.trainer, self.losses = trainer, losses


class Waiting(PrivateAccess):
    """Raises what `train` is given."""

    def train(self, name: str, trainer: Trainer, losses: Any, *arguments: Any, **options: Any) -> None:
        raise Given(trainer, losses)


def given(method: str, digits: Path, folder: Path, *overrides: str) -> Given:
    """What the training of a method gets with these settings, without a base."""
    tree = TINY[method]["settings"] | (TINY[method]["public"] or {}) | {"method": method}
    more = ["denoiser.pretrained=false"] if method == "dp-diffusion" else []
    settings = apply_overrides(tree, ["private.steps=200", f"private.learning_rate={RATE}", *more, *overrides])
    with pytest.raises(Given) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train_private_bundle(
            None, PrivateImages(digits), folder / "out", settings, epsilon=8.0, delta=1e-3, device=CPU, resume=False,
            ledger=folder / "ledger.jsonl", access=Waiting,
        )  # fmt: skip
    return caught.value


def rates(found: Given) -> list[float]:
    """The learning rate before the first step, and before the last one."""
    state = found.trainer.state_dict()["scheduler"]
    assert state["_step_count"] == 1
    group = found.trainer.optimizer.param_groups[0]
    first = group["lr"]
    for _ in range(199):
        found.trainer.optimizer.step()
        found.trainer._scheduler.step()
    return [first, group["lr"]]


@pytest.mark.parametrize("method", ["dpdm", "dp-diffusion"])
def test_learning_rate_schedules(method: str, digits: Path, tmp_path: Path) -> None:
    """Constant; or from a tenth in a warm-up of ten steps, and down to a tenth again."""
    constant = given(method, digits, tmp_path, "private.learning_rate_schedule=constant")
    assert rates(constant) == pytest.approx([RATE, RATE])
    cosine = given(method, digits, tmp_path / "cosine", "private.learning_rate_schedule=cosine")
    assert rates(cosine) == pytest.approx([RATE / 10, RATE / 10], rel=0.05)


@pytest.mark.parametrize("method", ["dpdm", "dp-diffusion", "dp-classifier"])
def test_optimisers(method: str, digits: Path, tmp_path: Path) -> None:
    kinds = {
        name: type(given(method, digits, tmp_path / name, f"private.optimizer={name}").trainer.optimizer)
        for name in ("adam", "momentum")
    }
    assert kinds == {"adam": torch.optim.Adam, "momentum": torch.optim.SGD}


def test_both_optimisers_of_a_gan(digits: Path, tmp_path: Path) -> None:
    found = given(
        "dp-gan", digits, tmp_path, "private.beta1=0.3", "private.beta2=0.8", "private.generator_learning_rate=0.02"
    )
    (own,) = found.trainer.optimizer.param_groups
    (generator,) = found.trainer.state_dict()["extra.generator_optimizer"]["param_groups"]
    assert [(group["lr"], group["betas"]) for group in (own, generator)] == [(RATE, (0.3, 0.8)), (0.02, (0.3, 0.8))]


def test_noise_levels_of_dpdm(digits: Path, tmp_path: Path) -> None:
    """The median level of EDM is exp(-1.2)."""
    found = given(
        "dpdm", digits, tmp_path, "private.level_scale=3", "private.sigma_data=0.7", "private.label_dropout=1",
        "private.configuration=edm",
    )  # fmt: skip
    middle = found.losses.levels(torch.tensor([0.5], dtype=torch.float64)).item()
    assert middle == pytest.approx(3 * math.exp(-1.2), rel=1e-5)
    # c_skip of EDM at a level as large as the deviation of the data is a half
    assert found.losses.denoiser.preconditioning.skip(torch.tensor(0.7)).item() == pytest.approx(0.5)
    assert found.losses.draw((20, 1, 32, 32)).dropped.all()


def test_dropout_and_schedule_of_dp_diffusion(digits: Path, tmp_path: Path) -> None:
    found = given(
        "dp-diffusion", digits, tmp_path, "private.label_dropout=1", "schedule.beta_start=0.002",
        "schedule.beta_end=0.03",
    )  # fmt: skip
    assert found.losses.draw(20).dropped.all()
    betas = found.losses.schedule.betas
    assert [betas[0].item(), betas[-1].item(), len(betas)] == pytest.approx([0.002, 0.03, 1000])


def test_the_schedule_of_public_training() -> None:
    settings = apply_overrides({"method": "dp-diffusion"}, ["schedule.beta_start=0.002", "schedule.beta_end=0.03"])
    assert isinstance(settings, DpDiffusionSettings)
    betas = build_schedule(settings.schedule).betas
    assert [betas[0].item(), betas[-1].item()] == pytest.approx([0.002, 0.03])


def test_cross_attention_has_its_depth_and_width() -> None:
    chosen = ["denoiser.conditioning=cross-attention", "denoiser.transformer_depth=3", "denoiser.context_dim=6"]
    settings = apply_overrides({"method": "rapid"}, chosen)
    assert isinstance(settings, RapidSettings)
    with torch.device("meta"):
        denoiser = Denoiser.build(settings, 4)
    assert denoiser.class_table.weight.shape == (5, 6)
    depths = {len(module.transformer_blocks) for module in denoiser.modules() if hasattr(module, "transformer_blocks")}
    assert depths == {3}
