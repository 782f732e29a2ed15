"""Differential privacy; knows no method.

access.py              the one door to private images    mechanism.py      DP-SGD of any module and loss
rows.py                rows of private examples          units.py          rows of an image or a person
releases.py            what may be released              gradients/        per-example gradients, a rule a layer type
training_spec.py       the spec of a DP-SGD training     queries.py        noisy counts, means and histograms
budget.py              releases with their noise         randomness.py     where random bits come from
events.py              releases as dp_accounting events  cipher.py         ChaCha20 on any device
accounting.py          epsilon by three accountants      noise.py          noise on a public grid
renyi.py               epsilon of any tree of events     correlation.py    noise correlated over steps
renyi_bound.py         a quick bound on epsilon          progress.py       epsilon so far
calibration.py         the noise that an epsilon needs   proposal.py       plans side by side
execution.py           how a training runs               padding.py        batches of one size
objective.py           losses in two parts               recorded_sum.py   clipped sums, replayed on a GPU
physical.py            what fits into memory             release_checkpoint.py  the state of a release
ledger.py              what was spent on which data set  spending.py       limits and charges
attempts.py            charges for each start of a run   whole.py          charges for a release in one piece
filter.py              limits if plans follow results    statement.py      privacy.json
trials.py              the best of a number of trials    selection.py      budgets of a choice of settings
overlap.py             private images among public ones  rehearsal.py      gradients of random rows, compared
plans.py               what a run planned before results entry.py         a line of the ledger
audit/                 does a step do what is claimed?
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
