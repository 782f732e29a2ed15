"""The training loop: steps, resuming, the weight average, learning rates, checkpoints."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests_support import Clock, whole
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

from rapid.config.sections import Training
from rapid.errors import RapidError, Stopped
from rapid.precision import float32_error
from rapid.stopping import request_stop, stop_on_signal, stop_requested
from rapid.training import Checkpoint, Trainer, checkpoint
from rapid.training.average import WeightAverage
from rapid.training.checkpoint import pause_seconds
from rapid.training.loop import warmup_cosine
from rapid.training.public import train

CHOSEN = Training(steps=12, batch_size=8, warmup_steps=3)


class Linear:
    """A network and its public loss, which fails or asks for a stop in a step if told to."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.network = nn.Linear(3, 2)
        self.calls = 0
        self.fail_at: int | None = None
        self.stop_at: int | None = None

    def loss(self, generator: torch.Generator) -> Tensor:
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        if self.calls == self.stop_at:
            request_stop()
        return self.network(torch.randn(8, 3, generator=generator)).square().mean()

    def train(self, path: Path, interval: float = 60.0) -> dict[str, Tensor]:
        train("test", self.network, whole(self.loss), CHOSEN, Checkpoint(path, interval))
        return self.network.state_dict()


def trainer_of(network: nn.Module, **options: Any) -> Trainer:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return Trainer(network, optimizer, LambdaLR(optimizer, lambda _: 1.0), **options)


def fill(network: nn.Module) -> Any:
    def backward(step: int) -> str | None:
        for parameter in network.parameters():
            parameter.grad = torch.full_like(parameter, step + 1.0)
        return None

    return backward


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("stop_at", [1, 5, 11])
def test_a_stopped_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, stop_at: int) -> None:
    whole = Linear().train(tmp_path / "whole.pt")
    first, second = Linear(), Linear(seed=99)
    first.stop_at = stop_at
    with stop_on_signal(), pytest.raises(Stopped):
        first.train(tmp_path / "parts.pt")
    # the step in which the stop was asked for was finished, and no other begun
    assert first.calls == stop_at == torch.load(tmp_path / "parts.pt")["step"]
    assert equal(whole, second.train(tmp_path / "parts.pt"))
    assert second.calls == CHOSEN.steps - stop_at


def test_a_stop_in_the_last_step_ends_the_training(tmp_path: Path) -> None:
    task = Linear()
    task.stop_at = CHOSEN.steps
    with stop_on_signal():
        weights = task.train(tmp_path / "state.pt")
        assert stop_requested()
    assert equal(weights, Linear().train(tmp_path / "whole.pt"))


@pytest.mark.parametrize("fail_at", [1, 5, 12])
def test_a_failed_step_is_taken_again_and_saves_nothing(tmp_path: Path, fail_at: int) -> None:
    whole = Linear().train(tmp_path / "whole.pt")
    first, second = Linear(), Linear(seed=99)
    first.fail_at = fail_at
    with pytest.raises(KeyboardInterrupt):
        first.train(tmp_path / "parts.pt", interval=0)
    checkpoint = Checkpoint(tmp_path / "parts.pt").load()
    assert (0 if checkpoint is None else checkpoint["step"]) == fail_at - 1
    if checkpoint is None:
        second = Linear()
    assert equal(whole, second.train(tmp_path / "parts.pt"))


def test_a_finished_training_is_not_taken_again(tmp_path: Path) -> None:
    weights = Linear().train(tmp_path / "state.pt")
    again = Linear(seed=99)
    assert equal(weights, again.train(tmp_path / "state.pt"))
    assert again.calls == 0


def test_the_averaged_weights_are_left_in_evaluation_mode(tmp_path: Path) -> None:
    network = nn.Linear(2, 1, bias=False)
    trainer = trainer_of(network, ema_decay=0.5)
    # min(decay, (1 + n) / (10 + n)) at update n, the first of which takes the weights as they are
    expected, seen = None, []
    trainer.run(4, fill(network), title="test", between_steps=lambda _: seen.append(network.weight.detach().clone()))
    for count, weight in enumerate(seen):
        decay = min(0.5, (1 + count + 1) / (10 + count + 1))
        expected = weight if expected is None or count == 0 else decay * expected + (1 - decay) * weight
    torch.testing.assert_close(network.weight.detach(), expected)
    task = Linear()
    task.train(tmp_path / "state.pt")
    assert not task.network.training


def test_no_average_leaves_the_last_weights() -> None:
    network = nn.Linear(2, 1)
    before = [p.detach().clone() for p in network.parameters()]
    trainer_of(network).run(3, fill(network), title="test")
    for parameter, start in zip(network.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), start - 0.1 * (1 + 2 + 3))


def test_an_average_that_saw_no_step_is_not_used() -> None:
    network = nn.Linear(2, 1)
    trainer = trainer_of(network, ema_decay=0.9)
    with torch.no_grad():
        network.weight.fill_(7)
    trainer.use_average()
    assert (network.weight == 7).all()


def test_buffers_are_copied_not_averaged() -> None:
    network = nn.BatchNorm1d(2)
    average = WeightAverage(network, 0.9)
    for value in (1.0, 5.0):
        network.running_mean.fill_(value)
        average.update_parameters(network)
    assert (average.module.running_mean == 5).all()


class Calls(TorchDispatchMode):
    """Notes the operations that change tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name.endswith("_"):
            self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


def test_the_average_is_that_of_the_definition_in_one_call_a_step() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    average, expected = WeightAverage(network, 0.4), [torch.zeros(())] * 40
    for n in range(1, 6):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.copy_(torch.randn_like(parameter))
        decay = 0.0 if n == 1 else min(0.4, (1 + n) / (10 + n))
        expected = [decay * e + (1 - decay) * p.detach() for e, p in zip(expected, network.parameters(), strict=True)]
        with Calls() as calls:
            average.update_parameters(network)
        # the second counts the updates
        assert calls.names == ["_foreach_copy_" if n == 1 else "_foreach_lerp_", "add_"]
    for found, own in zip(average.module.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), own)


def test_between_steps_sees_whole_steps() -> None:
    network, seen = nn.Linear(2, 1), []
    trainer = trainer_of(network)
    trainer.run(3, fill(network), title="test", between_steps=lambda done: seen.append((done, trainer.steps_done)))
    assert seen == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize(
    ("precision", "exact", "expected"),
    [
        ("auto", False, torch.float32),
        ("float32", False, torch.float32),
        ("bfloat16", False, torch.bfloat16),
        ("bfloat16", True, torch.float32),
    ],
)
def test_precision_is_that_of_the_forward_pass(
    tmp_path: Path, request: pytest.FixtureRequest, precision: str, exact: bool, expected: torch.dtype
) -> None:
    """On the CPU `auto` is float32. The weights stay float32, and so does what the optimiser keeps."""
    network, seen, short = nn.Linear(4, 3), [], list[bool]()
    before = torch.backends.mkldnn.matmul.fp32_precision
    request.addfinalizer(lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", before))
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    x, target = torch.randn(8, 4), torch.randn(8, 3)

    def loss(generator: torch.Generator) -> Tensor:
        found = network(x)
        seen.append(found.dtype)
        # a caller's choice of shorter products is kept for losses that are not exact
        short.append(float32_error(torch.device("cpu")) > 1e-6)
        return (found - target).square().mean()

    chosen = Training(steps=3, precision=precision)  # type: ignore[arg-type]
    train("test", network, whole(loss), chosen, Checkpoint(tmp_path / "state.pt"), exact=exact)
    assert seen == [expected] * 3
    assert short == [not exact] * 3
    state = torch.load(tmp_path / "state.pt")
    tensors = [*state["network"].values(), *state["average"].values(), state["optimizer"]["state"][0]["exp_avg"]]
    assert {tensor.dtype for tensor in tensors} <= {torch.float32, torch.int64}


def test_the_default_precision_leaves_records_as_they_were() -> None:
    """Components of earlier versions are reused by the hash of their settings."""
    assert "precision" not in Training().model_dump()
    chosen = Training(precision="bfloat16")
    assert Training.model_validate(chosen.model_dump()) == chosen
    assert Training.model_validate(Training().model_dump()).precision == "auto"


def test_other_state_is_saved_and_restored(tmp_path: Path) -> None:
    """Such as a GAN's generator and its optimiser."""
    file = Checkpoint(tmp_path / "state.pt")
    for start, steps in ((0.0, 2), (9.0, 3)):
        network, other = nn.Linear(2, 1), nn.Linear(1, 1)
        nn.init.constant_(other.weight, start)
        trainer = trainer_of(network, extra={"generator": other})
        if (saved := file.load()) is not None:
            trainer.load_state_dict(saved)

        def rise(_: int, other: nn.Linear = other) -> None:
            with torch.no_grad():
                other.weight.add_(1)

        trainer.run(steps, fill(network), title="test", checkpoint=file, between_steps=rise)
    assert other.weight.item() == 3
    assert set(torch.load(file.path)) == {"step", "network", "optimizer", "scheduler", "extra.generator"}


def test_notes_are_shown(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Linear().train(tmp_path / "state.pt")
    assert "12/12" in (shown := capfd.readouterr().err)
    assert "loss " in shown
    network = nn.Linear(1, 1)
    trainer_of(network).run(2, fill(network), title="test", shown=False)
    assert capfd.readouterr().err == ""


def rates(training: Training) -> list[float]:
    """As `train` sets them, of a highest rate of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, found = warmup_cosine(optimizer, training.steps, warmup_steps=training.warmup_steps), []
    for _ in range(training.steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def test_learning_rate_rises_and_falls() -> None:
    found = rates(Training(steps=100, warmup_steps=10))
    assert found[0] == pytest.approx(0.1)
    assert max(found) == found[9] == 1
    assert found[10:] == sorted(found[10:], reverse=True)
    assert found[-1] < 0.01
    assert rates(Training(steps=1, warmup_steps=0))[0] > 0


def test_a_warm_up_never_takes_more_than_half_of_the_steps(tmp_path: Path) -> None:
    """With fewer steps than `warmup_steps`, the highest rate is still reached."""
    network, seen = nn.Linear(1, 1), []

    def loss(generator: torch.Generator) -> Tensor:
        seen.append(network.weight.item())
        return network.weight.sum() + network.bias.sum()

    train(
        "test",
        network,
        whole(loss),
        Training(steps=4, warmup_steps=50, learning_rate=1e-2),
        Checkpoint(tmp_path / "s.pt"),
    )
    # Adam moves by its rate where the gradient is the same: half of it, all of it
    moves = [before - after for before, after in pairwise(seen)]
    assert moves == pytest.approx([5e-3, 1e-2, 1e-2], rel=1e-3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, checkpoint)


def test_a_checkpoint_is_saved_at_intervals(tmp_path: Path, clock: Clock) -> None:
    checkpoint = Checkpoint(tmp_path / "state.pt", interval=60)
    assert checkpoint.load() is None
    clock.now += 59
    checkpoint.save_if_due(lambda: pytest.fail("asked for the state before it was due"))
    clock.now += 2
    checkpoint.save_if_due(lambda: {"step": 3})
    clock.now += 59
    assert checkpoint.load() == {"step": 3}
    checkpoint.save_if_due(lambda: pytest.fail("saved twice in an interval"))
    checkpoint.remove()
    checkpoint.remove()
    assert checkpoint.load() is None


@pytest.mark.parametrize(
    ("interval", "cost", "expected"),
    [
        (60.0, 0.0, 60.0),
        (60.0, 1.2, 60.0),
        (60.0, 3.0, 150.0),
        (60.0, 36.0, 1800.0),
        (60.0, 1e4, 1800.0),
        (3600.0, 1e4, 3600.0),
        (0.0, 5.0, 0.0),
        (-1.0, 5.0, -1.0),
    ],
)
def test_saves_take_at_most_a_fiftieth_of_the_time(interval: float, cost: float, expected: float) -> None:
    """Up to half an hour between two; and after every step if that is asked for."""
    assert pause_seconds(interval, cost) == pytest.approx(expected)


def test_the_time_of_a_save_is_measured(tmp_path: Path, clock: Clock) -> None:
    checkpoint = Checkpoint(tmp_path / "state.pt", interval=10)

    def slow() -> dict[str, int]:
        clock.now += 3
        return {"step": 1}

    clock.now += 11
    checkpoint.save_if_due(slow)
    assert checkpoint.pause == 3 / 0.02
    clock.now += 149
    checkpoint.save_if_due(lambda: pytest.fail("saves take more than their share"))


@pytest.mark.parametrize("content", [b"", b"nothing", b"PK\x03\x04 torn", b"\x80\x02}q", bytes(range(256))])
def test_a_damaged_checkpoint_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(content)
    with pytest.raises(RapidError, match=r"state\.pt: the checkpoint is damaged; remove it to start again$"):
        Checkpoint(path).load()


def test_a_checkpoint_runs_no_code_when_it_is_read(tmp_path: Path) -> None:
    class Planted:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"step": Planted()}, tmp_path / "state.pt")
    with pytest.raises(RapidError, match="damaged"):
        Checkpoint(tmp_path / "state.pt").load()
    assert not (tmp_path / "ran").exists()


def test_a_save_that_fails_leaves_the_last_state(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "state.pt")
    checkpoint.save({"step": 1})
    with pytest.raises(Exception, match=r"pickle|local object"):
        checkpoint.save({"step": lambda: 2})
    assert checkpoint.load() == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]
