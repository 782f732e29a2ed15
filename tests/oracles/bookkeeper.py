"""`BookKeeper` against the loop over single examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from oracles.gradients import clipped_sum
from rapid.dp.gradients import BookKeeper


def compare(
    network: nn.Module,
    losses: Callable[[slice], Tensor],
    count: int,
    clip_norm: float,
    tolerance: float,
    draws: int = 1,
) -> None:
    """Every parameter's clipped sum and every example's norm, within a relative tolerance.

    `losses` takes a slice of rows, of which every `draws` belong to an example.
    """
    keeper = BookKeeper(network)
    sums, norms = keeper.clipped_sum(lambda: losses(slice(None)), count, clip_norm, multiplicity=draws)

    def mean_loss(examples: slice) -> Tensor:
        return losses(slice(examples.start * draws, examples.stop * draws)) / draws

    expected, expected_norms = clipped_sum(keeper.parameters, mean_loss, count, clip_norm)
    torch.testing.assert_close(norms.double(), expected_norms, rtol=tolerance, atol=1e-7)
    # some gradients are zero in exact arithmetic (attention key biases, biases before a normalisation): what floats
    # make of them is measured against the whole gradient
    whole = torch.sqrt(sum((e.square().sum() for e in expected), torch.zeros((), dtype=torch.float64)))
    for found, wanted in zip(sums, expected, strict=True):
        error = (found.double() - wanted).norm()
        assert error <= tolerance * wanted.norm() + 1e-2 * tolerance * whole + 1e-9


class Squared(nn.Module):
    """Sums a fixed random projection of a layer's output: a loss an example with a gradient everywhere."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def losses(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return (out * torch.linspace(-1, 1, out[0].numel()).view(out.shape[1:]) + 0.5 * out**2).flatten(1).sum(1)


def compare_layer(layer: nn.Module, x: Tensor, tolerance: float = 1e-4, draws: int = 1) -> None:
    model = Squared(layer)
    compare(model, lambda rows: model.losses(x[rows]), len(x) // draws, 0.7, tolerance, draws)


@contextmanager
def forms_chosen(cost: str) -> Iterator[None]:
    """Make all layers take one form, whatever it costs."""
    with pytest.MonkeyPatch.context() as patch:
        if cost != "by cost":
            patch.setattr("rapid.dp.gradients.rules.ghost_is_cheaper", lambda *_, **__: cost == "ghost")
        yield
