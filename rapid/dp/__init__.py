"""Differential privacy; knows no method.

access.py       the one door to private images          mechanism.py    DP-SGD of any module and loss
rows.py         rows of private examples
releases.py     what may be released                    gradients/      per-example gradients, a rule a layer type
budget.py       releases with their noise               queries.py      noisy counts, means and histograms
events.py       releases as dp_accounting events        randomness.py   where random bits come from
noise.py        noise on a public grid                  cipher.py       ChaCha20 on any device
accounting.py   epsilon by three accountants            physical.py     what fits into memory
padding.py      batches of one size
ledger.py       what was spent on which data set        spending.py     limits and charges
statement.py    privacy.json                            overlap.py      private images among the public ones
audit/          does a step do what is claimed?         proposal.py     plans side by side
"""

from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.budget import Budget, calibrate
from rapid.dp.execution import Execution
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.releases import DpSgdSpec, QuerySpec, Release, default_delta
from rapid.dp.rows import PrivateTensor
from rapid.ranks import Ranks

__all__ = [
    "Budget",
    "DpSgdSpec",
    "Execution",
    "PrivateAccess",
    "PrivateMechanism",
    "PrivateTensor",
    "PublicFacts",
    "QuerySpec",
    "Ranks",
    "Release",
    "calibrate",
    "default_delta",
]
