"""`train-private --minutes`: the number of steps follows from a measurement on random images, before any noise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from methods.tiny import TINY
from tests_process import run

from rapid.bundle import Bundle
from rapid.config.sections import DpSgdSettings, MethodSettings
from rapid.data.private import PrivateImages
from rapid.errors import InputError
from rapid.methods import apply_overrides, find_method
from rapid.methods.base import Paced
from rapid.methods.dp_gan.settings import DpGanSettings
from rapid.methods.rapid.settings import RapidSettings
from rapid.ranks import Ranks
from rapid.stages.automatic import WORK
from rapid.stages.private import train_private_bundle
from rapid.stages.timed import TimedSteps, seconds_per_step

CPU = torch.device("cpu")
DPDM = ("network.patch=4", "network.channels=8", "network.multipliers=[1]", "network.attention=[false]",
        "network.heads=1", "private.expected_batch=20", "private.physical_batch=32")  # fmt: skip


def test_a_run_has_the_steps_that_fit_and_keeps_them(tmp_path: Path, digits: Path) -> None:
    settings = [word for setting in DPDM for word in ("--set", setting)]
    train = ("train-private", "--method", "dpdm", "--private", digits, "--epsilon", 5, "--delta", 1e-3, *settings)
    train = (*train, "--out", tmp_path / "model", "--ledger", tmp_path / "ledger.jsonl", "--minutes", 0.02)
    done = run(*train)
    assert done.returncode == 0, done.stderr
    told = re.search(r"private: ([\d,]+) steps in 0.02 minutes, ([\d.e-]+) s each", done.stdout)
    assert told, done.stdout
    steps, seconds = int(told[1].replace(",", "")), float(told[2])
    # all that fit, whole ones; the seconds are told in three digits
    fitting = WORK * 0.02 * 60 / seconds
    assert 0.99 * fitting - 1 <= steps <= 1.01 * fitting
    statement = json.loads((tmp_path / "model" / "privacy.json").read_text())
    assert statement["steps"] == steps
    assert statement["epsilon"] <= 5
    # one run is in the ledger: the measurement has its own
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert len({line["run"] for line in lines if "run" in line}) <= 1
    again = run(*train, "--resume")
    assert again.returncode == 0, again.stderr
    assert "steps in" not in again.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--minutes", "0"), "--minutes 0.0: must be a positive number"),
        (("--minutes", "3", "--set", "private.steps=5"), "--minutes: decides the number of steps"),
    ],
)
def test_bad_requests_are_refused_in_one_line(
    tmp_path: Path, digits: Path, arguments: tuple[str, ...], told: str
) -> None:
    train = ("train-private", "--method", "dpdm", "--private", digits, "--epsilon", 5, "--out", tmp_path / "out")
    found = run(*train, *arguments)
    assert found.returncode == 2
    assert told in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_the_main_training_is_measured_on_a_base_too(public_bundle: Path, tiny_settings: RapidSettings) -> None:
    """RAPID has an overlap check and a probe before it. A larger batch takes longer."""
    small, large = (
        seconds_per_step(public_bundle, _with_batch(tiny_settings, batch), CPU, least=0.0) for batch in (4, 256)
    )
    assert 0 < small < large < 60


class _Unmeasured(TimedSteps):
    """A request whose run is there already."""

    def measured(self, settings: MethodSettings, device: torch.device, processes: int) -> float:
        raise AssertionError("measured again")


def test_an_earlier_run_is_not_measured_again(tmp_path: Path, digits: Path) -> None:
    settings = apply_overrides({"method": "dpdm", "image": {"size": 32}}, DPDM)

    def train(choice: TimedSteps, *, resume: bool) -> Bundle | None:
        return train_private_bundle(
            None, PrivateImages(digits), tmp_path / "out", settings, epsilon=5.0, delta=1e-3, device=CPU,
            resume=resume, ledger=tmp_path / "ledger.jsonl", automatic=choice,
        )  # fmt: skip

    said: list[str] = []
    first = train(TimedSteps(None, DPDM, 0.02, said.append), resume=False)
    assert first is not None
    assert len(said) == 2
    again = train(_Unmeasured(None, DPDM, 1.0, said.append), resume=True)
    assert again is not None
    assert again.config == first.config
    assert len(said) == 2


class _Observed(TimedSteps):
    """A request that tells whether its measurement is over."""

    measurements: ClassVar[list[float]] = []

    def measured(self, settings: MethodSettings, device: torch.device, processes: int) -> float:
        self.measurements.append(1.0)
        return 1.0


def test_the_measurement_is_over_before_anything_of_the_private_images_is_read(tmp_path: Path) -> None:
    """How long reading takes depends on them, and what follows from the measurement is published."""
    settings = apply_overrides({"method": "dpdm", "image": {"size": 32}}, DPDM)
    # that the file is there may be known before
    (tmp_path / "empty.npz").touch()
    with pytest.raises(InputError, match=r"empty\.npz: is damaged"):
        train_private_bundle(
            None, PrivateImages(tmp_path / "empty.npz"), tmp_path / "out", settings, epsilon=5.0, delta=1e-3,
            device=CPU, resume=False, ledger=tmp_path / "ledger.jsonl", automatic=_Observed(None, DPDM, 1.0, print),
        )  # fmt: skip
    assert _Observed.measurements == [1.0]


def test_ranks_that_do_not_see_the_folder_get_the_settings_of_the_earlier_run() -> None:
    """On several machines the first process alone has `out`."""
    settings = apply_overrides({"method": "dpdm", "image": {"size": 32}}, DPDM)
    earlier = {"private": {"steps": 17}}
    found = TimedSteps(None, (), 1.0, print).private_settings(settings, None, 5.0, 0.0, earlier, Ranks(1, 2))
    assert isinstance(found.private, DpSgdSettings)
    assert found.private.steps == 17


def test_a_gan_is_measured_at_a_fixed_frequency_of_generator_steps() -> None:
    method: object = find_method("dp-gan")
    assert isinstance(method, Paced)
    adaptive = apply_overrides(TINY["dp-gan"]["settings"] | {"method": "dp-gan"}, [])
    fixed = apply_overrides(adaptive.model_dump(mode="json"), ["private.discriminator_steps=3"])
    found = method.typical(adaptive)
    assert isinstance(found, DpGanSettings)
    assert found.private.discriminator_steps == 10
    assert method.typical(fixed) == fixed
    assert seconds_per_step(None, found, CPU, least=0.0) > 0


def test_warm_up_and_distillation_take_part_of_the_minutes(tiny_settings: RapidSettings) -> None:
    """100 gradients a step; 600 of warm-up, and twice 240 calls and 120 examples, by the rules of thumb."""
    overrides = ["private.expected_batch=50", "private.multiplicity=2", "private.moments.share=0.1",
                 "private.moments.warmup={steps: 20, batch_size: 50, warmup_steps: 5}",
                 "private.distillation={candidates: 80, rounds_before: 1, rounds: 1}",
                 "private.distillation.sampling={steps: 3, batch_size: 16, attempts: 1}",
                 "private.distillation.training={steps: 10, batch_size: 20, warmup_steps: 1}"]  # fmt: skip
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), overrides)
    request = TimedSteps(None, (), 1.0, print)
    found = request.private_settings(settings, None, 1.0, 0.5, {}, Ranks(1, 2))
    assert isinstance(found.private, DpSgdSettings)
    other = (0.6 * 1000 + 2 * (0.3 * 240 + 0.6 * 200)) / 100
    assert found.private.steps == int((WORK * 60 - 2 * other * 0.5) / 0.5)
    with pytest.raises(InputError, match=r"beside DP-SGD takes about 0\.1 minutes; give at least 1"):
        TimedSteps(None, (), 0.05, print).private_settings(settings, None, 1.0, 0.5, {}, Ranks())


def test_epsilon_is_not_spent_for_less_than_a_step() -> None:
    settings = apply_overrides({"method": "dpdm"}, [])
    with pytest.raises(InputError, match=r"are too few: a step takes 4 s, as measured; give at least 0\.22, or"):
        TimedSteps(None, (), 0.05, print).private_settings(settings, None, 1.0, 4.0, {}, Ranks())


def test_what_comes_before_the_steps_is_not_measured(tiny_settings: RapidSettings) -> None:
    method: object = find_method("rapid")
    assert isinstance(method, Paced)
    overrides = ["private.moments.share=0.1", "private.distillation={candidates: 80, rounds_before: 1}"]
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), overrides)
    assert isinstance(settings, RapidSettings)
    # one step of warm-up is left
    one = method.other_work(method.typical(settings))
    assert one == pytest.approx(0.6 * settings.private.moments.warmup.batch_size)
    assert method.other_work(settings) > 2 * one
    apply_overrides(method.typical(settings).model_dump(mode="json"), [])


def test_groups_and_people_are_measured_too() -> None:
    """The random set is smaller than a group of 500, and only people may have several draws of a GAN."""
    groups = apply_overrides({"method": "dpdm", "image": {"size": 32}}, [*DPDM, "private.group_size=500"])
    assert 0 < seconds_per_step(None, groups, CPU, least=0.0) < 60
    people = apply_overrides(
        {"method": "dp-gan"} | TINY["dp-gan"]["settings"], ["private.multiplicity=2", "private.expected_batch=4"]
    )
    with pytest.raises(InputError, match="has nothing to average"):
        seconds_per_step(None, people, CPU, least=0.0)
    assert 0 < seconds_per_step(None, people, CPU, least=0.0, people=True) < 60


def test_a_method_without_steps_is_refused() -> None:
    settings, choice = MethodSettings(method="means"), TimedSteps(None, (), 1.0, print)
    with pytest.raises(InputError, match="has no steps"):
        choice.measured(settings, CPU, 1)
    with pytest.raises(InputError, match="has no steps"):
        choice.private_settings(settings, None, 1.0, 0.0, {}, Ranks())


def _with_batch(settings: RapidSettings, batch: int) -> RapidSettings:
    found = apply_overrides(settings.model_dump(mode="json"), [f"private.expected_batch={batch}"])
    assert isinstance(found, RapidSettings)
    return found
