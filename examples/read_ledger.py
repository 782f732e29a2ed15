"""What each private data set has cost, by the ledger, and what each run has released.

python examples/read_ledger.py [--ledger ledger.jsonl]
"""

import argparse
from pathlib import Path

from rapid.dp.accounting import prv_epsilon
from rapid.dp.ledger import Ledger, default_path
from rapid.dp.spending import balances
from rapid.rounding import as_typed, rounded_up


def main() -> None:
    """All data sets; the ledger is checked while it is read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ledger", type=Path, default=default_path())
    options = parser.parse_args()
    if not options.ledger.exists():
        print(f"{options.ledger}: there is no ledger, so nothing was spent")
        return
    for found in balances(Ledger(options.ledger).entries()):
        limit = f"of {as_typed(found.limit.epsilon)}" if found.limit else "without a limit"
        spent = f"epsilon {rounded_up(found.epsilon, 4)} {limit} at delta {rounded_up(found.delta)}"
        print(f"data set {found.dataset}: {spent}")
        for run in found.runs:
            for release in run.releases:
                alone = rounded_up(prv_epsilon([release.dp_event], found.delta), 4)
                print(f"  run {run.run}, {run.kind}: {release.name or 'unnamed'} alone has epsilon {alone}")


if __name__ == "__main__":
    main()
