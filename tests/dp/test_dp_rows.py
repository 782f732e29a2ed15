"""Functions of private rows, one example at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rapid.dp.rows import PrivateTensor, applied, apply

COUNT = 1200
"""More than are handled at a time."""
PIXELS = torch.randint(0, 256, (COUNT, 3, 5), generator=torch.Generator().manual_seed(0)) / 255
LABELS = torch.arange(COUNT) % 3


@pytest.mark.parametrize(
    "mixes",
    [
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).train(),
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(15)).train(),
        lambda rows: rows - rows.mean(0),
        lambda rows: rows - rows[:1],
        lambda rows: rows.cumsum(0),
        lambda rows: rows.flip(0),
        lambda rows: rows + rows.roll(1, 0) * (torch.arange(len(rows)) == len(rows) // 2)[:, None, None, None],
        lambda rows: rows + rows.roll(1, 0) * (torch.arange(len(rows)) == len(rows) - 1)[:, None, None, None],
        lambda rows: rows + 0.01 * rows.mean(0),
        lambda rows: 1e4 * (rows + 0.01 * rows.mean(0)),
        lambda rows: (255 * rows).long().cumsum(0),
        lambda rows: rows.flatten(1).sum(1) > rows.flatten(1).sum(1).median(),
        lambda rows: rows.flatten(1).mean(0, keepdim=True),
        lambda rows: rows.sum(),
        lambda rows: torch.cat([rows, rows]),
    ],
)
def test_a_function_that_mixes_examples_is_refused(mixes: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"mixes examples|one row per example|more than 1 value per channel"):
        apply(lambda rows: mixes(rows[:, None]), [PrivateTensor(PIXELS)])


def test_a_function_of_single_examples_is_applied_to_all() -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).eval()
    found = apply(lambda rows: network(rows[:, None]), [PrivateTensor(PIXELS)])
    with torch.no_grad():
        expected = network(PIXELS[:, None])
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad
    both = apply(lambda rows, labels: rows.sum(1) + labels, [PrivateTensor(found), PrivateTensor(LABELS)])
    torch.testing.assert_close(both, expected.sum(1) + LABELS)


@pytest.mark.parametrize("scale", [1, 1e6])
def test_rounding_that_depends_on_the_batch_is_not_mixing(scale: float) -> None:
    """Kernels add in another order where there are more rows."""
    values = scale * torch.linspace(-1, 1, 15).view(1, 3, 5)

    def rounds(rows: Tensor) -> Tensor:
        return values + rows + scale * 1e-4 * (len(rows) > 1)

    assert len(apply(rounds, [PrivateTensor(PIXELS)])) == COUNT


def test_rows_without_numbers_are_the_same() -> None:
    assert apply(lambda rows: rows[:, :0], [PrivateTensor(PIXELS)]).shape == (COUNT, 0, 5)


def test_rows_of_another_shape_are_refused_without_their_shape() -> None:
    """It could depend on the images: `one_hot` without the number of classes has as many columns as the largest."""
    labels = [PrivateTensor(LABELS)]
    with pytest.raises(ValueError, match="of the same shape for all") as refused:
        list(applied(nn.functional.one_hot, labels, shape=(1,)))
    assert not any(character.isdigit() for character in str(refused.value))
    parts = list(applied(lambda rows: nn.functional.one_hot(rows, 3), labels, shape=(3,)))
    assert torch.equal(torch.cat(parts).argmax(1), LABELS)
