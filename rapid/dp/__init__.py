"""The differentially private mechanism, its accounting and its ledger; knows no method."""

from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.ranks import Ranks
from rapid.dp.releases import Plan, default_delta

__all__ = ["Plan", "PrivateMechanism", "Ranks", "default_delta"]
