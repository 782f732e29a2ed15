"""What a method gives to the private stage, checked before anything follows from it.

A method may come from another package. Its mistakes are told by its name, and before anything is spent or written where
that is possible: a wrong N, or a release that was never made, would make the privacy statement wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from rapid.bundle import Bundle, Component
from rapid.bundle.format import check_names
from rapid.config.sections import MethodSettings
from rapid.dp.access import PrivateAccess, PublicFacts
from rapid.dp.budget import Budget
from rapid.dp.releases import DpSgdSpec, QuerySpec
from rapid.dp.selection import SCORE
from rapid.errors import RapidError
from rapid.methods.base import Description, Method

AGAIN = "mend it, and go on with --resume"
"""What helps once releases were made: a resumed run makes none of them again."""


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


def described(
    method: Method[Any], settings: MethodSettings, base: Bundle | None, budget: Budget
) -> tuple[Description, list[str]]:
    """How a method describes its private bundle, and its notes for the statement; both see nothing private.

    Args:
        method: that is asked.
        settings: of the run.
        base: the opened public bundle; None without one.
        budget: of the run.

    Raises:
        RapidError: they cannot be written.
    """
    found: object = method.describe_private(settings, base, budget)
    if not isinstance(found, Description):
        raise mistake(method.name, f"describe_private() must return a Description, not {type(found).__name__}")
    try:
        to_json(found.facts)
    except PydanticSerializationError as error:
        raise mistake(method.name, f"facts of describe_private() are not ready for JSON ({error})") from None
    notes: object = method.privacy_notes(base, budget)
    if not isinstance(notes, Sequence) or isinstance(notes, str) or any(not isinstance(note, str) for note in notes):
        raise mistake(method.name, f"privacy_notes() must return a list of sentences, not {type(notes).__name__}")
    return found, list(notes)


def checked_components(method: str, components: object, access: PrivateAccess) -> Mapping[str, Component]:
    """What a method trained, if it made all its releases: the statement claims each, and no more.

    Call it on the first rank, which has the checkpoints of the releases and writes the components.

    Args:
        method: its name.
        components: what its `train_private` returned.
        access: that it was given.

    Raises:
        RapidError: a release was not made, or the components cannot be written.
    """
    taken = access.steps_taken()
    for release in access.budget.releases:
        # the score of a trial is not the method's, and comes later
        if release.name != SCORE and taken[release.name] != release.spec.steps:
            made = f"{taken[release.name]:,} of {release.spec.steps:,} steps"
            problem = f"train_private() has made {made} of the release '{release.name}' that releases() plans"
            raise mistake(method, f"{problem}, so the statement would be wrong; {AGAIN}")
    if not isinstance(components, Mapping):
        given = type(components).__name__
        raise mistake(method, f"train_private() must return components by name, not {given}; {AGAIN}")
    if not components:
        raise mistake(method, f"train_private() returned no component; {AGAIN}")
    try:
        check_names(components)
    except RapidError as error:
        raise mistake(method, f"{error}; {AGAIN}") from None
    for name, component in components.items():
        if not callable(getattr(component, "save", None)):
            problem = f"its component '{name}' is a {type(component).__name__}, which has no save(folder)"
            raise mistake(method, f"{problem}; {AGAIN}")
    return components
