"""SAM against two plain gradient computations by hand, and in public training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_support import whole
from torch import Tensor, nn

from rapid.config.sections import Training
from rapid.training import Checkpoint
from rapid.training.loss import Loss, LossGradient
from rapid.training.public import train
from rapid.training.sam import Gradient, backward_sharp


def gradient_of(loss: Callable[[], Tensor], parameters: list[Tensor]) -> Gradient:
    gradient = LossGradient(Loss(lambda _: [], loss), parameters, "float32")
    return lambda: gradient([])


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.sampled_from([0.01, 0.05, 0.5]))
def test_a_step_is_two_plain_gradients(seed: int, rho: float) -> None:
    """f(w) = sum of a w^4 / 4 + b w: its gradient a w^3 + b is written down in numpy, twice."""
    rng = np.random.default_rng(seed)
    shapes = [(3, 2), (4,)]
    values, a, b = ([rng.normal(size=shape) for shape in shapes] for _ in range(3))
    parameters = [torch.tensor(v, requires_grad=True) for v in values]

    def loss() -> Tensor:
        terms = [
            (torch.tensor(p) * w**4 / 4 + torch.tensor(q) * w).sum() for p, q, w in zip(a, b, parameters, strict=True)
        ]
        return torch.stack(terms).sum()

    optimizer = torch.optim.SGD(parameters, lr=0.1)
    value = backward_sharp(parameters, gradient_of(loss, parameters), rho)
    first = [p * w**3 + q for p, q, w in zip(a, b, values, strict=True)]
    norm = np.sqrt(sum((g**2).sum() for g in first))
    moved = [w + rho * g / norm for w, g in zip(values, first, strict=True)]
    second = [p * w**3 + q for p, q, w in zip(a, b, moved, strict=True)]
    for parameter, old, gradient in zip(parameters, values, second, strict=True):
        assert (parameter.detach().numpy() == old).all()
        assert parameter.grad is not None
        np.testing.assert_allclose(parameter.grad.numpy(), gradient, rtol=1e-9)
    expected = sum((p * w**4 / 4 + q * w).sum() for p, q, w in zip(a, b, values, strict=True))
    np.testing.assert_allclose(value.item(), expected, rtol=1e-9)
    optimizer.step()
    for parameter, old, gradient in zip(parameters, values, second, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), old - 0.1 * gradient, rtol=1e-9)


def test_radius_zero_is_the_plain_gradient_and_one_call() -> None:
    w, calls = torch.tensor([2.0, -1.0], requires_grad=True), []

    def loss() -> Tensor:
        calls.append(1)
        return (w**2).sum()

    assert backward_sharp([w], gradient_of(loss, [w]), 0.0).item() == 5.0
    assert len(calls) == 1
    assert w.grad is not None
    assert w.grad.tolist() == [4.0, -2.0]


def test_a_gradient_of_zero_and_an_unused_parameter_move_nothing() -> None:
    w, unused = torch.zeros(3, requires_grad=True), torch.ones(2, requires_grad=True)
    backward_sharp([w, unused], gradient_of(lambda: w.square().sum(), [w, unused]), 0.1)
    assert w.grad is not None
    assert w.grad.tolist() == [0, 0, 0]
    assert unused.grad is None
    assert unused.tolist() == [1, 1]


def test_training_with_it_draws_the_same_batch_for_both_gradients(tmp_path: Path) -> None:
    seen: list[Tensor] = []
    network = nn.Linear(2, 1)

    def loss(generator: torch.Generator) -> Tensor:
        seen.append(torch.randn(4, 2, generator=generator))
        found: Tensor = network(seen[-1]).square().mean()
        return found

    own = Training(steps=3, batch_size=4, learning_rate=0.1, warmup_steps=0, ema_decay=0)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    train("test", network, whole(loss), own, Checkpoint(tmp_path / "state.pt"), optimizer=optimizer, rho=0.05)
    assert len(seen) == 6
    assert all(torch.equal(seen[n], seen[n + 1]) for n in (0, 2, 4))
    assert not torch.equal(seen[0], seen[2])
