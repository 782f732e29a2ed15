"""What a method gives to the private stage, checked before anything follows from it.

A method may come from another package. Its mistakes are told by its name, and before anything is spent or written where
that is possible: a wrong N, or a release that was never made, would make the privacy statement wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rapid.dp.access import PublicFacts
from rapid.dp.releases import DpSgdSpec, QuerySpec
from rapid.dp.selection import SCORE
from rapid.errors import RapidError


def mistake(method: str, problem: str) -> RapidError:
    """The error of a method that breaks its contract: nothing that its user gave is to blame."""
    return RapidError(f"the method {method}: {problem}")


def checked_specs(method: str, specs: object, facts: PublicFacts) -> Sequence[DpSgdSpec | QuerySpec]:
    """The releases that a method plans.

    Args:
        method: its name.
        specs: what its `releases` returned.
        facts: public facts of the private images.

    Raises:
        RapidError: they are no releases of these images that one budget can hold.
    """
    if not isinstance(specs, Sequence) or any(not isinstance(spec, DpSgdSpec | QuerySpec) for spec in specs):
        kinds = sorted({type(spec).__name__ for spec in specs}) if isinstance(specs, Sequence) else []
        given = f"{type(specs).__name__} of {' and '.join(kinds)}" if kinds else type(specs).__name__
        raise mistake(method, f"releases() must return a list of DpSgdSpec and QuerySpec, not {given}")
    for name, count in Counter(spec.name for spec in specs).items():
        if count > 1:
            raise mistake(method, f"releases() names {count} releases '{name}'; give each another name")
        if name == SCORE:
            raise mistake(method, f"releases() names a release '{name}', as rapid tune names its count; rename it")
    for spec in specs:
        if spec.dataset_size != facts.dataset_size:
            problem = f"the release '{spec.name}' has dataset_size {spec.dataset_size:,}"
            raise mistake(method, f"{problem}, not {facts.dataset_size:,}; give it facts.dataset_size")
    rest = [spec.name for spec in specs if spec.share is None]
    if len(rest) != 1:
        found = f"{', '.join(rest)} have none" if rest else "all have one" if specs else "there is no release"
        raise mistake(method, f"exactly one release must have no share of epsilon, and {found}")
    return specs
