"""Progress of long work on standard error: units done, rate and time left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm import tqdm

_hidden = ContextVar("hidden", default=False)


@contextmanager
def hidden() -> Iterator[None]:
    """Show no progress within the block, where it would tell what nobody should see."""
    before = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(before)


class Progress:
    """A progress bar; a line every ten seconds if standard error is not a terminal. Use it as a context manager.

    Args:
        title: what is being done.
        total: number of units.
        unit: name of one unit.
        done: units that an earlier run finished.
        shown: False shows nothing.
    """

    def __init__(self, title: str, total: int, unit: str = "step", done: int = 0, *, shown: bool = True) -> None:
        terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=f"{title:<18}",
            unit=unit,
            unit_scale=total > 10_000,
            ncols=None if terminal else 100,
            mininterval=0.2 if terminal else 10.0,
            file=sys.stderr,
            dynamic_ncols=terminal,
            disable=not shown or _hidden.get(),
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.close()

    def advance(self, units: int = 1) -> None:
        """Count units as done."""
        self._bar.update(units)

    def advance_to(self, done: int) -> None:
        """Set the number of units done, an absolute one."""
        self._bar.update(done - self._bar.n)

    def note(self, text: str) -> None:
        """Show `text` after the bar, from the next refresh on."""
        self._bar.set_postfix_str(text, refresh=False)
