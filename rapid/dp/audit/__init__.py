"""The audit: does the mechanism do what the accounting says? It uses no private images.

steps.py        the tests of each step                  game.py         the one-run game, a lower bound on epsilon
noise.py        scale, shape and independence of noise  guesses.py      from right guesses to epsilon
sensitivity.py  how much an example changes the sum     bench.py        networks and canaries, run step by step
sampling.py     who is in which batch                   findings.py     results, and the decision from all of them
queries.py      counts, means and histograms            power.py        how often deviations are found
correlation.py  noise correlated over steps

Of a whole private stage that is run on canaries:

canaries.py     canaries in the place of private images evidence.py     tests of what was released, and a bound
watch.py        a training, seen step by step           adversary.py    guesses who took part
"""

from rapid.dp.audit.bench import Build, Subject
from rapid.dp.audit.findings import Finding, StepAudit
from rapid.dp.audit.game import Audit, audit
from rapid.dp.audit.guesses import best_bound, canaries_needed, epsilon_bound, guess_probability, largest_refutable
from rapid.dp.audit.steps import audit_steps

__all__ = [
    "Audit",
    "Build",
    "Finding",
    "StepAudit",
    "Subject",
    "audit",
    "audit_steps",
    "best_bound",
    "canaries_needed",
    "epsilon_bound",
    "guess_probability",
    "largest_refutable",
]
