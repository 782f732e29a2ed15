"""The tracer of the replay tests: all that runs of rapid, to compare two runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import rapid_index

import rapid

SOURCES = tuple(str(Path(str(package.__file__)).parent) for package in (rapid, rapid_index))
BY_LINES = "dp/gradients/"
"""The rules of layers run most, so their lines are compared; elsewhere every instruction is."""
Place = tuple[str, int, int]
"""File, line, and offset of the instruction in its function (0 where lines are compared)."""


@contextmanager
def places_executed() -> Iterator[list[Place]]:
    """All that runs of rapid and rapid_index, in order; by instructions, a branch within a line shows, too."""
    found: list[Place] = []
    ours: dict[CodeType, str | None] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code not in ours:
            root = next((root for root in SOURCES if code.co_filename.startswith(root)), None)
            ours[code] = None if root is None else code.co_filename[len(root) + 1 :]
        name = ours[code]
        if name is None:
            return None
        by_lines = name.startswith(BY_LINES)
        frame.f_trace_opcodes = not by_lines
        if event == ("line" if by_lines else "opcode"):
            found.append((name, frame.f_lineno, 0 if by_lines else frame.f_lasti))
        return trace

    sys.settrace(trace)
    try:
        yield found
    finally:
        sys.settrace(None)


def first_difference(one: list[Place], other: list[Place]) -> tuple[Place, ...] | None:
    """Where two runs part, for a message that can be read."""
    for place, pair in enumerate(zip(one, other, strict=False)):
        if pair[0] != pair[1]:
            return *one[max(0, place - 3) : place], *pair
    return None if len(one) == len(other) else (one + other)[min(len(one), len(other)) - 1 :][:1]
