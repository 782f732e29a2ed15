"""The rehearsal: what it refuses before its first step, and that it lets through what is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.data import ImageSet
from rapid.dp import Budget, DpSgdSpec, PrivateAccess, PublicFacts, Release
from rapid.dp.gradients import Direct, UnsupportedLayer, register
from rapid.dp.gradients.forms import Gradient
from rapid.dp.gradients.registry import RULES
from rapid.dp.objective import Objective
from rapid.training import RunFolder, Trainer

SIZE, STEPS = 20, 3
Prepare = Callable[[Tensor], Tensor]


class Losses(Objective):
    """Cross-entropy of a network, by the labels; `prepares` changes the pixels first."""

    def __init__(self, network: nn.Module, prepares: Prepare) -> None:
        self._network, self._prepares = network, prepares

    def prepare(self, *rows: Tensor) -> Sequence[Tensor]:
        return self._prepares(rows[0].float() / 255), rows[1]

    def compute(self, *prepared: Tensor) -> Tensor:
        return F.cross_entropy(self._network(prepared[0]), prepared[1], reduction="none")


def train(folder: Path, network: nn.Module, *, prepares: Prepare = lambda x: x, plain: bool = False, k: int = 1) -> int:
    """Train, and return the number of steps; a refusal must come before the first one."""
    spec = DpSgdSpec(name="network", dataset_size=SIZE, expected_batch=SIZE, steps=STEPS, clip_norm=1.0, multiplicity=k)
    budget = Budget(epsilon=1, delta=1e-3, dataset_size=SIZE, releases=(Release(spec=spec, noise_multiplier=1.0),))
    pixels = np.random.default_rng(0).integers(0, 256, (SIZE, 2, 2), dtype=np.uint8)
    images = ImageSet(pixels, np.arange(SIZE) % 3, ("a", "b", "c"), "private")
    access = PrivateAccess(images, PublicFacts.of(images), budget, RunFolder(folder), device=torch.device("cpu"))
    objective = Losses(network, prepares)
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.1)
    trainer = Trainer(network, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0))
    try:
        access.train("network", trainer, objective.__call__ if plain else objective, [access.images, access.labels])
    except (UnsupportedLayer, ValueError):
        assert trainer.steps_done == 0
        assert not any(folder.rglob("*.pt"))
        raise
    return trainer.steps_done


def network_of(*inner: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), *inner, nn.Tanh(), nn.Linear(8, 3))


class Applied(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("layer", [None, nn.Dropout(0.5), nn.GroupNorm(2, 8), nn.Softmax(1)])
def test_what_is_right_is_trained(tmp_path: Path, layer: nn.Module | None, plain: bool, k: int) -> None:
    """Without training there is no dropout."""
    assert train(tmp_path, network_of(*[layer] if layer else []), plain=plain, k=k) == STEPS


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e2, 1e4])
def test_rounding_is_no_mistake(tmp_path: Path, scale: float) -> None:
    """Of probabilities that are 0 or 1 up to rounding, the gradients are rounding errors."""
    for seed in range(5):
        network = nn.Sequential(nn.Unflatten(1, (1, 2)), nn.Conv2d(1, 8, 3, padding=1), nn.Flatten(), nn.Linear(32, 3))
        torch.nn.init.normal_(network[3].weight, std=scale, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            network[3].bias[seed % 3] += scale
        assert train(tmp_path / str(seed), network) == STEPS


@pytest.mark.parametrize(
    "mixes",
    [
        lambda x: x - x.mean(0),
        lambda x: x.roll(1, 0),
        lambda x: x.softmax(0),
        lambda x: x - x[:1],
        lambda x: x.cumsum(0),
        lambda x: x - x.detach().mean(0),
    ],
)
def test_losses_that_mix_examples_are_refused(tmp_path: Path, mixes: Prepare) -> None:
    """Also where the layer that mixes them has no parameters."""
    with pytest.raises(ValueError, match="the objective mixes examples: a row alone"):
        train(tmp_path, network_of(Applied(mixes)))


@pytest.mark.parametrize("mixes", [lambda x: x - 0.9 * x.mean(0), lambda x: x - x[:1], lambda x: x.flip(0)])
def test_an_objective_that_mixes_examples_as_it_prepares_is_refused(tmp_path: Path, mixes: Prepare) -> None:
    with pytest.raises(ValueError, match="the objective's prepare mixes examples"):
        train(tmp_path, network_of(), prepares=mixes)


def test_what_an_objective_draws_is_left_alone(tmp_path: Path) -> None:
    assert train(tmp_path, network_of(), prepares=lambda x: x + torch.randn_like(x)) == STEPS


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.98])
def test_draws_that_are_the_same_by_chance_are_left_alone(tmp_path: Path, share: float) -> None:
    """Such as dropped labels, or images turned over."""
    torch.manual_seed(1)

    def turned(x: Tensor) -> Tensor:
        return torch.where((torch.rand(len(x)) < share)[:, None, None], x.flip(2), x)

    for number in range(20):
        assert train(tmp_path / str(number), network_of(), prepares=turned) == STEPS


class Shared(nn.Module):
    """Adds what a layer makes of a table that belongs to no example."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(rows, 2))
        self.layer = nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.table).mean(0)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("rows", [2, 3, SIZE])
def test_a_table_with_as_many_rows_as_a_batch_is_refused(tmp_path: Path, rows: int, plain: bool) -> None:
    """It would pass for one row an example in each batch of this size, such as all pieces of padded batches."""
    with pytest.raises(UnsupportedLayer, match="other than one row an example"):
        train(tmp_path, network_of(Shared(rows)), plain=plain)


class Keeping(nn.Module):
    """Keeps the mean of what it sees, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self._way = way
        self.register_buffer("mean", torch.zeros(8))
        self.frozen = nn.Parameter(torch.zeros(8), requires_grad=False)

    @torch.no_grad()
    def forward_keeping(self, x: Tensor) -> None:
        found = x.mean(0)
        match self._way:
            case "in place":
                self.mean.add_(found)
            case "assigned":
                self.mean = self.mean + found
            case "data in place":
                self.mean.data.add_(found)
            case "data":
                self.mean.data = self.mean + found
            case "frozen":
                self.frozen.add_(found)
            case "frozen data":
                self.frozen.data.add_(found)
            case "later":
                self.register_buffer("seen", found)

    def forward(self, x: Tensor) -> Tensor:
        self.forward_keeping(x.detach())
        return x


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("way", ["in place", "assigned", "data in place", "data", "frozen", "frozen data", "later"])
def test_a_network_that_keeps_what_it_sees_is_refused(tmp_path: Path, way: str, plain: bool) -> None:
    """A bundle would have it, without noise."""
    with pytest.raises(UnsupportedLayer, match="would keep what they saw, without noise"):
        train(tmp_path, network_of(Keeping(way)), plain=plain)


class Own(nn.Linear):
    """A linear layer that has only the rules of these tests."""


@contextmanager
def ruled(weight: Callable[[Tensor, Tensor, int], Tensor]) -> Iterator[None]:
    """Give `Own` a rule: (gradients (N * K, out), inputs (N * K, in), N) -> gradients of the weight."""

    def rule(layer: nn.Module, grad: Tensor, count: int, x: Tensor) -> dict[str, Gradient]:
        return {
            "weight": Direct(weight(grad, x, count)),
            "bias": Direct(grad.unflatten(0, (count, -1)).sum(1)),
        }

    register(Own)(rule)
    try:
        yield
    finally:
        del RULES[Own]


def right(grad: Tensor, x: Tensor, count: int) -> Tensor:
    return torch.einsum("nko,nki->noi", grad.unflatten(0, (count, -1)), x.unflatten(0, (count, -1)))


def test_a_right_rule_is_used(tmp_path: Path) -> None:
    with ruled(right):
        assert train(tmp_path, network_of(Own(8, 8)), k=2) == STEPS


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda grad, x, count: right(grad, x, count).mT.contiguous(), "differ from those of automatic"),
        (lambda grad, x, count: right(grad, x, count) * 1.1, "differ from those of automatic"),
        (lambda grad, x, count: right(grad, x, count).mean(0).expand(count, 8, 8).clone(), "differ from those of"),
        (lambda grad, x, count: right(grad, x, count).sum(0, keepdim=True), "other than one gradient of 'weight' an"),
        (lambda grad, x, count: torch.einsum("no,ni->noi", grad, x), "other than one gradient of 'weight' an example"),
        (lambda grad, x, count: right(grad, x, count).flatten(1), "other than one gradient of 'weight' an example"),
    ],
)
def test_a_wrong_rule_is_refused(tmp_path: Path, wrong: Callable[[Tensor, Tensor, int], Tensor], words: str) -> None:
    with ruled(wrong), pytest.raises(UnsupportedLayer, match=words):
        train(tmp_path, network_of(Own(8, 8)), k=2)
