"""A rehearsal of a private training on random rows, which are public, before its first step.

The book-keeper takes three things on trust: that losses do not mix examples outside of trained layers, that the rules
of layers are right, and that a tensor with as many rows as the batch has one row an example. Here gradients of a few
rows are compared with plain automatic differentiation of one example after the other. Nothing private is read.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from rapid.dp.gradients import BookKeeper, UnsupportedLayer
from rapid.dp.gradients.bookkeeper import CHANGED
from rapid.dp.gradients.forms import ROUNDING_MARGIN
from rapid.dp.objective import Objective, as_objective
from rapid.dp.releases import DpSgdSpec, QuerySpec
from rapid.dp.rows import MIXES, PrivateTensor, Rows, alike, check_rows, random_rows
from rapid.precision import exact_float32

COUNTS = (2, 3)
"""Examples: a tensor that is not by example can have as many rows as one batch, but not as many as both."""
DRAWS = 2
"""Rows of an example at most, of a training with more."""
REPEATED, TRIES = 3, 300
"""How often a batch is prepared, and at most a row alone: draws that coincide are not taken for mixing."""
SMALL, NEGLIGIBLE = 1e-3, 1e-4
"""Norms of gradients below which rounding errors may be as large, relative to the largest norm, and absolute: such as
that of a cross-entropy whose probability is 1 up to rounding."""
SAME = 0.01
"""Tolerance for the norm of each example's gradient, and for the gradient once it is clipped; float32 differs by far
less."""


def rehearse(network: nn.Module, losses: Rows, data: Sequence[PrivateTensor], spec: DpSgdSpec | QuerySpec) -> None:
    """Compute gradients of random rows, and check what the guarantee of `BookKeeper` rests on.

    Of losses that are an `Objective` the gradients are compared with those of one example alone, and so is what it
    prepares, except for numbers that it draws. Other losses may draw numbers as they are computed: of them only the
    network is checked, with several numbers of rows.

    Args:
        network: that is trained.
        losses: as for `PrivateAccess.train`.
        data: only shapes and dtypes are used.
        spec: of the training, a `DpSgdSpec`.

    Raises:
        UnsupportedLayer: see `BookKeeper`; or the network keeps what it sees, or a layer has a wrong rule.
        ValueError: the losses mix examples, or are not one a row.
    """
    objective = as_objective(losses)
    with warnings.catch_warnings():
        # the mechanism warns of slow layers
        warnings.simplefilter("ignore")
        keeper = BookKeeper(network)
    before = _copies(network)
    if isinstance(losses, Objective):
        _check_losses(losses, data)
    assert isinstance(spec, DpSgdSpec)
    draws = min(spec.multiplicity, DRAWS)
    for count in COUNTS:
        rows = [part.repeat_interleave(draws, 0) for part in random_rows(data, count)]
        prepared = objective.prepare(*rows)
        if isinstance(losses, Objective):
            _check_gradients(keeper, objective, prepared, count, draws)
        else:
            keeper.clipped_sum(partial(_computed, keeper, objective, prepared), count, 1.0, multiplicity=draws)
    after = _copies(network)
    if before.keys() != after.keys() or not all(_same(before[name], after[name]) for name in before):
        raise UnsupportedLayer(CHANGED)


def _check_losses(objective: Objective, data: Sequence[PrivateTensor]) -> None:
    """Check that what is prepared and the losses are those of each row alone.

    Layers without parameters can mix examples, too, and the book-keeper does not see them.
    """
    rows = random_rows(data, COUNTS[-1])
    prepared, *again = [objective.prepare(*rows) for _ in range(REPEATED)]
    for number, part in enumerate(prepared):
        # other parts are drawn, and a row alone would get other draws
        if all(_same(part, other[number]) for other in again):
            _check_prepared(objective, rows, number, part)
    with torch.no_grad(), exact_float32():
        found = objective.compute(*prepared)
    check_rows(objective.compute, prepared, found, "objective")


def _check_prepared(objective: Objective, rows: Sequence[Tensor], number: int, part: Tensor) -> None:
    """Check that a part of what is prepared, (n, ...), is prepared of each row alone, too."""
    for row, together in enumerate(part.split(1)):
        own = [one[row : row + 1] for one in rows]
        # if it is drawn after all, and was the same by chance, it will be so again
        if not any(alike(objective.prepare(*own)[number], together) for _ in range(TRIES)):
            raise ValueError(f"the objective's prepare {MIXES}")


def _check_gradients(
    keeper: BookKeeper, objective: Objective, prepared: Sequence[Tensor], count: int, draws: int
) -> None:
    """Compare the clipped sum of examples with plain automatic differentiation."""
    alone = [
        partial(_computed, keeper, objective, [part[number * draws : (number + 1) * draws] for part in prepared])
        for number in range(count)
    ]
    norms = [_norm(_gradient(keeper, losses)) for losses in alone]
    finite = [norm for norm in norms if norm < torch.inf]
    least = max(NEGLIGIBLE, SMALL * max(finite, default=0.0))
    # so that all of them are clipped
    clip_norm = min((norm for norm in finite if norm >= least), default=least) / 2
    sums, found = keeper.clipped_sum(
        partial(_computed, keeper, objective, prepared), count, clip_norm, multiplicity=draws
    )
    pairs = zip(found.tolist(), norms, strict=True)
    wrong = any(least <= norm < torch.inf and not abs(own - norm) <= SAME * norm for own, norm in pairs)
    for losses, norm in zip(alone, norms, strict=True):
        if 0 < norm < torch.inf:
            factor = min(1.0, clip_norm / (norm * (1 + ROUNDING_MARGIN)))
            # the sums hold what the book-keeper adds beyond
            for part, own in zip(sums, _gradient(keeper, losses), strict=True):
                part.sub_(own.double(), alpha=factor)
    if wrong or not _norm(sums) <= SAME * count * clip_norm:
        raise UnsupportedLayer(
            "the gradients of single examples differ from those of automatic differentiation: the losses mix examples, "
            f"or a layer has a wrong rule; most in '{_worst(keeper, sums)}'"
        )


def _computed(keeper: BookKeeper, objective: Objective, prepared: Sequence[Tensor]) -> Tensor:
    return objective.computed(prepared, keeper.parameters[0].device, autocast=False)


def _gradient(keeper: BookKeeper, losses: partial[Tensor]) -> list[Tensor]:
    """Of the mean of the losses, one tensor for each parameter; zeros where there is none."""
    with exact_float32():
        found = torch.autograd.grad(losses().mean(), keeper.parameters, allow_unused=True)
    return [torch.zeros_like(p) if own is None else own for p, own in zip(keeper.parameters, found, strict=True)]


def _norm(parts: Sequence[Tensor]) -> float:
    norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts])
    return float(norms.square().sum().sqrt())


def _worst(keeper: BookKeeper, differences: Sequence[Tensor]) -> str:
    """Name of the parameter whose gradients differ most."""
    names = {parameter: name for name, parameter in keeper.network.named_parameters()}
    norms = [float(torch.linalg.vector_norm(part).nan_to_num(torch.inf)) for part in differences]
    return names[keeper.parameters[norms.index(max(norms))]]


def _copies(network: nn.Module) -> dict[str, Tensor]:
    """All that a bundle would keep of a network."""
    return {name: part.clone() for name, part in network.state_dict().items() if isinstance(part, Tensor)}


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, 0, 0, equal_nan=True)
