"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from rapid.rounding import as_typed, rounded_down, rounded_up


class Column(NamedTuple):
    """A column of a table."""

    key: str
    """Where its values stand in the rows."""
    title: str
    form: str | Callable[[Any], str]
    """Format specification of a value, such as ".3g", or a function that makes its text."""

    def text(self, value: Any) -> str:
        """A cell."""
        return format(value, self.form) if isinstance(self.form, str) else self.form(value)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> str:
    """Rows as aligned text under the titles of their columns; leaves out columns that the first row does not have."""
    shown = [column for column in columns if column.key in rows[0]]
    lines = [[column.title for column in shown]]
    lines += [[column.text(row[column.key]) for column in shown] for row in rows]
    widths = [max(len(line[number]) for line in lines) for number in range(len(shown))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def plan_table(rows: Sequence[Mapping[str, Any]], group_size: int) -> str:
    """The table of `rapid plan`.

    Args:
        rows: those of `rapid.dp.proposal.Proposal.row`.
        group_size: images of one person.
    """
    columns = [
        Column("epsilon_wanted", "epsilon", as_typed),
        Column("expected_batch", "batch", ",d"),
        Column("steps", "steps", ",d"),
        Column("epochs", "epochs", ".1f"),
        Column("noise_multiplier", "noise_multiplier", partial(rounded_down, digits=4)),
        Column("epsilon_prv", "by PRV", partial(rounded_up, digits=4)),
        Column("epsilon_rdp", "by RDP", partial(rounded_up, digits=4)),
        Column("epsilon_group", f"of {group_size} images", rounded_up),
        Column("signal_to_noise", "signal/noise", ".3g"),
        Column("signal_to_noise_all", "x sqrt(steps)", ".3g"),
        Column("gradient_computations", "gradients", ",d"),
    ]
    return table(rows, columns)
