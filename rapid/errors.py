"""The exceptions of rapid, and the exit code that each one stands for.

RapidError            1  something failed inside
├── LostRank          1  another process of a distributed run is gone
├── InputError        2  bad input or usage: the message names the argument and the fix
└── PrivacyRefused    3  refused, because going on would break the privacy promise
"""

from __future__ import annotations


class RapidError(Exception):
    """A failure that rapid can explain in one line."""

    exit_code = 1
    told = False
    """Whether another process says it already."""


class LostRank(RapidError):
    """Another process of a distributed run is gone."""


class InputError(RapidError):
    """Bad input or usage; the message names the argument and how to mend it."""

    exit_code = 2


class PrivacyRefused(RapidError):
    """Refused for privacy: nothing is made known of the private images but what the message tells, if anything."""

    exit_code = 3
