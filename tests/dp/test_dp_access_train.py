"""Private training through the door: what is trained, resuming, stops, lost ranks, the average, precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rapid.config.sections import DpSgdSettings
from rapid.data import ImageSet
from rapid.dp import Budget, DpSgdSpec, Execution, PrivateAccess, PublicFacts, Release
from rapid.dp.rehearsal import COUNTS
from rapid.errors import InputError, LostRank, Stopped
from rapid.stopping import request_stop, stop_on_signal
from rapid.training import RunFolder, Trainer
from rapid.training.optimizers import FINAL_SHARE, MOMENTUM, build_optimizer, noisy_schedule, select_trainable

CPU = torch.device("cpu")
SIZE, STEPS = 20, 12
NUMBERS = {
    "name": "network", "dataset_size": SIZE, "expected_batch": SIZE, "steps": STEPS, "clip_norm": 1.0,
}  # fmt: skip
EVERY_STEP = Execution(physical_batch=1000, checkpoint_seconds=-1.0)
"""All losses of a step in one call, and a checkpoint after every step."""


def access_to(folder: Path, noise_multiplier: float = 1.0, **changes: Any) -> PrivateAccess:
    release = Release(spec=DpSgdSpec.model_validate(NUMBERS | changes), noise_multiplier=noise_multiplier)
    budget = Budget(epsilon=1, delta=1e-3, dataset_size=SIZE, releases=(release,))
    pixels = np.random.default_rng(0).integers(0, 256, (SIZE, 2, 2), dtype=np.uint8)
    images = ImageSet(pixels, np.arange(SIZE) % 3, ("a", "b", "c"), "private")
    return PrivateAccess(images, PublicFacts.of(images), budget, RunFolder(folder), device=CPU)


def network_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def train(
    access: PrivateAccess,
    network: nn.Module,
    before: Callable[[], None] | None = None,
    execution: Execution = EVERY_STEP,
    **options: Any,
) -> int:
    """Train, and return in how many steps losses were computed; `before` is called in each of them."""
    steps = access.budget.release("network").spec.steps
    # a rehearsal computes losses, too
    calls = -len(COUNTS) if access.steps_taken()["network"] < steps else 0

    def losses(rows: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if before is not None and calls > 0:
            before()
        return nn.functional.cross_entropy(network(rows.float() / 255), labels, reduction="none")

    state = {name: options.pop(name) for name in ("ema_decay", "extra") if name in options}
    optimizer = options.pop("optimizer", None) or build_optimizer(network, DpSgdSettings(optimizer="momentum"))
    access.train(
        "network",
        Trainer(network, optimizer, noisy_schedule(optimizer, STEPS), **state),
        losses,
        [access.images, access.labels],
        execution=execution,
        **options,
    )
    return calls


def weights(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def saved(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "checkpoints" / "network.pt", weights_only=True)
    return state


class Raising:
    """Raises the error when it is called for the n-th time."""

    def __init__(self, number: int, error: BaseException) -> None:
        self.left = number
        self.error = error

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


def test_only_matching_parameters_are_trained(tmp_path: Path) -> None:
    network = network_of()
    before = {name: p.clone() for name, p in network.named_parameters()}
    select_trainable(network, ("3.*", "1.bias"))
    assert train(access_to(tmp_path), network) == STEPS
    changed = {name for name, p in network.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"3.weight", "3.bias", "1.bias"}


def test_a_pattern_without_a_match_is_an_error() -> None:
    with pytest.raises(InputError, match=r"no parameter matches 'nothing\*'; names are like 'weight'") as refused:
        select_trainable(nn.Linear(2, 2), ("nothing*",))
    assert refused.value.field == "private.trainable"


def test_optimisers_are_those_of_the_settings() -> None:
    network = network_of()
    select_trainable(network, ("3.*",))
    adam = build_optimizer(network, DpSgdSettings(learning_rate=0.25))
    momentum = build_optimizer(network, DpSgdSettings(learning_rate=0.25, optimizer="momentum"))
    assert isinstance(adam, torch.optim.Adam)
    assert isinstance(momentum, torch.optim.SGD)
    assert momentum.param_groups[0]["momentum"] == MOMENTUM
    for optimizer in (adam, momentum):
        assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in network[3].parameters()}
        assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_the_learning_rate_of_noisy_gradients_rises_and_falls_to_a_tenth() -> None:
    optimizer = torch.optim.SGD(network_of().parameters(), lr=1.0)
    schedule = noisy_schedule(optimizer, 200)
    rates = []
    for _ in range(200):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(rates) == 1.0
    assert sorted(rates[10:], reverse=True) == rates[10:]
    assert rates[-1] == pytest.approx(FINAL_SHARE, abs=1e-3)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_an_interrupted_run_takes_the_planned_steps_in_all(tmp_path: Path, error: BaseException) -> None:
    """What was not saved was never released."""
    with pytest.raises(type(error)):
        train(access_to(tmp_path), network_of(), Raising(6, error))
    assert saved(tmp_path)["step"] == 5
    assert access_to(tmp_path).steps_taken() == {"network": 5}
    # the network's own initialisation makes no difference any more
    assert train(access_to(tmp_path), network_of(1)) == STEPS - 5
    assert saved(tmp_path)["step"] == STEPS
    assert train(access_to(tmp_path), network_of(1)) == 0


def test_a_checkpoint_of_another_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(access_to(tmp_path), network_of(), Raising(6, KeyboardInterrupt()))
    before = saved(tmp_path)["network"]["1.weight"]
    for other in ({"noise_multiplier": 2.0}, {"steps": STEPS + 1}, {"clip_norm": 2.0}, {"expected_batch": 5}):
        with pytest.raises(InputError, match="was made with another plan") as refused:
            train(access_to(tmp_path, **other), network_of(), Raising(1, AssertionError("rows were read")))
        assert refused.value.field == "resume"
    assert torch.equal(saved(tmp_path)["network"]["1.weight"], before)


def test_a_stop_saves_the_last_whole_step(tmp_path: Path) -> None:
    network = network_of()
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            request_stop()

    execution = Execution(physical_batch=1000, checkpoint_seconds=1e6)
    with stop_on_signal(), pytest.raises(Stopped):
        train(access_to(tmp_path), network, stop, execution)
    # the step in which the stop was requested was finished
    assert saved(tmp_path)["step"] == 4
    assert torch.equal(saved(tmp_path)["network"]["1.weight"], network[1].weight)
    assert train(access_to(tmp_path), network_of(), execution=execution) == STEPS - 4


def test_a_step_in_which_a_rank_was_lost_counts_with_the_weights_before_it(tmp_path: Path) -> None:
    network, seen = network_of(), []

    def lose() -> None:
        seen.append(weights(network))
        if len(seen) == 5:
            raise LostRank("the other one is gone")

    execution = Execution(physical_batch=1000, checkpoint_seconds=1e6)
    with pytest.raises(LostRank):
        train(access_to(tmp_path), network, lose, execution)
    state = saved(tmp_path)
    assert state["step"] == 5
    assert torch.equal(torch.cat([value.flatten() for value in state["network"].values()]), seen[4])
    assert access_to(tmp_path).steps_taken() == {"network": 5}
    assert train(access_to(tmp_path), network_of(), execution=execution) == STEPS - 5


def test_a_resumed_run_has_the_optimiser_and_the_learning_rate_that_it_had(tmp_path: Path) -> None:
    """Without noise and with all images in a batch, a run in two parts is the run in one."""
    whole, parts = network_of(), network_of()
    train(access_to(tmp_path / "whole", 0.0), whole, ema_decay=0.5)
    with pytest.raises(KeyboardInterrupt):
        train(access_to(tmp_path / "parts", 0.0), parts, Raising(7, KeyboardInterrupt()), ema_decay=0.5)
    again = network_of(1)
    assert train(access_to(tmp_path / "parts", 0.0), again, ema_decay=0.5) == STEPS - 6
    torch.testing.assert_close(weights(again), weights(whole))


def test_the_average_is_left_in_the_network_and_the_weights_in_the_checkpoint(tmp_path: Path) -> None:
    network, seen = network_of(), []
    train(access_to(tmp_path), network, ema_decay=0.5, between_steps=lambda step: seen.append(weights(network)))
    last = torch.cat([value.flatten() for value in saved(tmp_path)["network"].values()])
    assert torch.equal(last, seen[-1])
    assert not torch.equal(last, weights(network))
    again = network_of(1)
    assert train(access_to(tmp_path), again, ema_decay=0.5) == 0
    assert torch.equal(weights(again), weights(network))


def test_gradients_are_noise_on_the_scale_of_the_release(tmp_path: Path) -> None:
    """One step of size 1: noise_multiplier * clip_norm / expected_batch in every weight."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 5000))
    before = weights(network)
    access = access_to(tmp_path, 50.0, steps=1, clip_norm=0.2, expected_batch=10)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    access.train(
        "network",
        Trainer(network, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
        lambda rows: network(rows.float()).sum(1) * 0,
        [access.images],
    )
    noise = weights(network) - before
    assert float(noise.std()) == pytest.approx(50 * 0.2 / 10, rel=0.02)
    assert abs(float(noise.mean())) < 5 / 25_000**0.5


def test_between_steps_and_extra_state(tmp_path: Path) -> None:
    generator, steps = nn.Linear(1, 1), []

    def between(step: int) -> None:
        steps.append(step)
        with torch.no_grad():
            generator.weight.fill_(step)

    with pytest.raises(KeyboardInterrupt):
        train(
            access_to(tmp_path), network_of(), Raising(6, KeyboardInterrupt()), between_steps=between,
            extra={"generator": generator},
        )  # fmt: skip
    assert steps == [1, 2, 3, 4, 5]
    fresh = nn.Linear(1, 1)
    train(
        access_to(tmp_path), network_of(), lambda: steps.append(int(fresh.weight.item())), between_steps=None,
        extra={"generator": fresh},
    )  # fmt: skip
    assert steps[5:] == [5] * (STEPS - 5)


def test_a_measured_physical_batch_gives_the_same_weights(tmp_path: Path) -> None:
    """Without noise: the sums are the same whatever the pieces."""
    found = []
    for batch in (None, 3):
        network = network_of()
        access = access_to(tmp_path / str(batch), noise_multiplier=0.0)
        train(access, network, execution=Execution(physical_batch=batch))
        found.append(weights(network))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_for_the_network_alone(tmp_path: Path) -> None:
    network = network_of()
    outputs = []
    network.register_forward_hook(lambda module, inputs, output: outputs.append(output.dtype))
    before = weights(network)
    train(access_to(tmp_path), network, execution=Execution(autocast=True))
    # a rehearsal comes first, without autocast
    assert set(outputs[len(COUNTS) :]) == {torch.bfloat16}
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in network.parameters())
    assert not torch.equal(weights(network), before)
    # without noise it is the same training, to the precision of bfloat16
    narrow, wide = network_of(), network_of()
    train(access_to(tmp_path / "narrow", 0.0), narrow, execution=Execution(autocast=True))
    train(access_to(tmp_path / "wide", 0.0), wide)
    assert not torch.equal(weights(narrow), weights(wide))
    torch.testing.assert_close(weights(narrow) - before, weights(wide) - before, rtol=0.1, atol=1e-3)


def test_the_noise_of_the_device_can_be_chosen(tmp_path: Path) -> None:
    network = network_of()
    before = weights(network)
    assert train(access_to(tmp_path), network, execution=Execution(noise_source="device")) == STEPS
    assert torch.isfinite(weights(network)).all()
    assert not torch.equal(weights(network), before)


def test_public_gradients_can_be_added_before_the_optimiser_reads_them(tmp_path: Path) -> None:
    """Here they take the noisy ones away again: nothing moves, in any of the steps."""
    network, seen = network_of(), []
    before = weights(network)

    def cancel() -> None:
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        seen.append(float(torch.cat([g.flatten() for g in gradients]).norm()))
        for gradient in gradients:
            gradient.sub_(gradient.clone())

    assert train(access_to(tmp_path), network, before_update=cancel) == STEPS
    assert len(seen) == STEPS
    assert min(seen) > 0
    assert torch.equal(weights(network), before)
