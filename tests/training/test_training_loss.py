"""Value and gradients of a loss, recordings of which are run again on a CPU; gradients in the layout of parameters."""

from __future__ import annotations

import pytest
import torch
from tests_support import traced
from torch import Tensor, nn

from rapid.recording import Capture
from rapid.training.loss import Loss, LossGradient
from rapid.training.optimizers import set_gradients


class Task:
    """A network with a parameter that the loss does not use."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 1))
        self.parameters: list[Tensor] = [nn.Parameter(torch.ones(2)), *self.network.parameters()]
        self.loss = Loss(
            lambda generator: [torch.randn(5, 2, 4, 4, generator=generator), torch.rand(5, generator=generator)],
            lambda x, y: (self.network(x)[:, 0] - y).square().mean(),
        )


@pytest.mark.parametrize("capture", [None, traced], ids=["called", "recorded"])
def test_it_is_the_gradient_of_autograd_at_the_weights_of_now(capture: Capture | None) -> None:
    task = Task()
    gradient = LossGradient(task.loss, task.parameters, "float32", capture)
    for step in range(4):
        batch = task.loss.draw(torch.Generator().manual_seed(step))
        value, (unused, *found) = gradient(batch)
        wanted = task.loss.value(*batch)
        assert not value.requires_grad
        assert unused is None
        torch.testing.assert_close(value, wanted.detach())
        for one, other in zip(found, torch.autograd.grad(wanted, task.parameters[1:]), strict=True):
            assert one is not None
            torch.testing.assert_close(one, other)
        with torch.no_grad():
            for parameter in task.network.parameters():
                parameter.sub_(0.1)


def test_a_loss_that_waits_for_other_ranks_is_not_recorded() -> None:
    task, captured = Task(), []

    def capture(work: object) -> object:
        captured.append(work)
        return work

    loss = Loss(task.loss.draw, task.loss.value, exchanges=True)
    gradient = LossGradient(loss, task.parameters, "float32", capture)  # type: ignore[arg-type]
    for _ in range(3):
        gradient(loss.draw(torch.Generator().manual_seed(0)))
    assert captured == []


def test_gradients_get_the_layout_of_their_parameters() -> None:
    """Fused Adam reads both in the order in which they lie in memory."""
    layer = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    assert isinstance(layer.bias, nn.Parameter)
    gradient = torch.randn(6, 4, 3, 3)
    set_gradients([layer.weight, layer.bias], [gradient, None])
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, gradient)
    assert layer.weight.grad.stride() == layer.weight.stride() != gradient.stride()
    assert layer.bias.grad is None


def test_fused_and_plain_steps_are_the_same_for_any_layout() -> None:
    layers = [nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [
        torch.optim.Adam(layer.parameters(), lr=0.1, fused=fused)
        for layer, fused in zip(layers, (True, None), strict=True)
    ]
    for _ in range(3):
        gradients = [torch.randn(p.shape) for p in layers[0].parameters()]
        for layer, optimizer in zip(layers, optimizers, strict=True):
            set_gradients(list(layer.parameters()), gradients)
            optimizer.step()
    for one, other in zip(*(layer.parameters() for layer in layers), strict=True):
        torch.testing.assert_close(one, other)
