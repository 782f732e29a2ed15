"""The exceptions of rapid, and the exit code that each one stands for.

RapidError            1  something failed inside
├── InputError        2  bad input or usage: the message names the argument and the fix
└── PrivacyRefused    3  refused, because going on would break the privacy promise
"""

from __future__ import annotations


class RapidError(Exception):
    """A failure that rapid can explain in one line."""

    exit_code = 1


class InputError(RapidError):
    """Bad input or usage; the message names the argument and how to mend it."""

    exit_code = 2


class PrivacyRefused(RapidError):
    """Refused for privacy: nothing was computed from the private images."""

    exit_code = 3
