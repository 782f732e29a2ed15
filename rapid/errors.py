"""The exceptions of rapid, and the exit code of each.

RapidError            1  a failure that rapid can explain
├── LostRank          1  another process of a distributed run is gone
├── InputError        2  bad input or usage: names the field, the problem and the fix
├── PrivacyRefused    3  refused, because continuing would break the privacy guarantee
└── Stopped         130  the user asked to stop; what was done is saved
"""

from __future__ import annotations

DENIED = "cannot be read (permission denied); give yourself the right to read it"
"""What is wrong with a file that is there, and perhaps in order."""


def printable(text: str) -> str:
    """A message in one line, whatever the names in it: what a terminal would obey becomes a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class RapidError(Exception):
    """A failure that rapid can explain in one line."""

    exit_code = 1
    reported = False
    """Whether another process reports it."""


class LostRank(RapidError):
    """Another process of a distributed run is gone."""


class InputError(RapidError):
    """Bad input or usage.

    The command line shows the field as a flag, the server as a JSON path; `str` shows it as it is.

    Args:
        field: name of the argument in snake_case ("train_real"), a dotted setting ("private.steps"), a positional in
            capitals ("DATASET"), a field of a JSON request ("labels"), or "" where none is to blame.
        problem: what is wrong and how to fix it.
        value: what was given, if it helps; shown behind the field.
    """

    exit_code = 2

    def __init__(self, field: str, problem: str, value: object = None) -> None:
        self.field = field
        self.problem = problem
        self.value = value
        super().__init__(self.describe(field))

    def __reduce__(self) -> tuple[object, ...]:
        # an exception is rebuilt from its message alone otherwise; ranks send theirs to each other
        return type(self), (self.field, self.problem, self.value), self.__dict__

    def describe(self, name: str, equals: str = " ") -> str:
        """The message with the field under another name, such as a flag.

        Args:
            name: shown instead of the field.
            equals: between name and value.
        """
        where = name if self.value is None else f"{name}{equals if name else ''}{self.value}"
        return f"{where}: {self.problem}" if where else self.problem


class PrivacyRefused(RapidError):
    """Refused for privacy: nothing about the private images is revealed but what the message tells, if anything."""

    exit_code = 3


class Stopped(RapidError):
    """The user asked to stop; what was done is saved."""

    exit_code = 130
