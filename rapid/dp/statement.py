"""The privacy statement: the content of `privacy.json` of a private bundle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from dp_accounting import NeighboringRelation

import rapid
from rapid.data.units import ONE_PERSON
from rapid.dp.accounting import composition, group_accountant_name, group_epsilon, pld_epsilon, prv_epsilon, rdp_epsilon
from rapid.dp.budget import Budget
from rapid.dp.entry import Spent
from rapid.dp.events import compose, event_to_json
from rapid.dp.randomness import NOISE_SOURCES, Randomness
from rapid.dp.releases import DpSgdSpec, Release
from rapid.dp.renyi import renyi_accountant_name
from rapid.dp.selection import SCORE, Selection
from rapid.rounding import up_to_places

RETAKEN_NOTE = (
    "Steps were taken again because a checkpoint was gone: epsilon counts all steps as often as they were taken."
)
PACKAGES = ("torch", "opacus", "diffusers", "faiss-cpu", "faiss-gpu", "numpy", "cryptography", "dp-accounting")


def privacy_statement(
    budget: Budget, *, method: str, noise_source: str, retaken: Sequence[Spent] = ()
) -> dict[str, Any]:
    """Content of `privacy.json` of a finished private stage.

    Args:
        budget: what was to be spent.
        method: name of the method.
        noise_source: of trainings, a key of `NOISE_SOURCES`; queries always take noise from the stream cipher.
        retaken: what was spent instead, if saved steps were taken again (see `rapid.dp.spending.Charge.retaken`).
    """
    main, unit = budget.main, budget.unit
    replaced = "the number of private images N is public: one image"
    if unit == ONE_PERSON:
        replaced = "the number of people N is public: one person, with all their images,"
    statement: dict[str, Any] = {
        "epsilon": _round_up(budget.spent),
        "delta": budget.delta,
        "accountant": composition(budget.events(), budget.delta).accountant,
        "epsilon_rdp": _round_up(budget.spent_rdp),
        "epsilon_pld": _round_up(budget.spent_pld),
        "adjacency": f"add or remove {unit}",
        "relation": {
            "name": NeighboringRelation.REPLACE_SPECIAL.name,
            "library": f"dp_accounting {metadata.version('dp-accounting')}",
            "words": f"{replaced} is replaced by one that contributes nothing",
        },
        "unit": unit,
        "method": method,
        **_numbers(main, unit),
        "dataset_size": budget.dataset_size,
        "noise_source": _noise_source(main, noise_source),
        "releases": [_release(release, unit, noise_source) for release in budget.releases],
        "event": event_to_json(compose(budget.events())),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "packages": {"rapid": rapid.__version__, **_versions()},
    }
    if budget.group_size > 1:
        statement["group"] = {
            "unit": f"{budget.group_size} images of one person",
            "size": budget.group_size,
            "epsilon": _round_up(budget.spent_group),
            "delta": budget.delta,
            "accountant": group_accountant_name(),
        }
    return _with_retaken(statement, budget, retaken) if retaken else statement


def _with_retaken(statement: dict[str, Any], budget: Budget, spent: Sequence[Spent]) -> dict[str, Any]:
    """A statement with the figures of what was spent, which is more than the budget."""
    events = [release.dp_event for release in spent]
    taken = {name: compose(one.dp_event for one in spent if one.name == name) for name in budget.names}
    figures: dict[str, Any] = {
        "epsilon": _round_up(prv_epsilon(events, budget.delta)),
        "accountant": composition(events, budget.delta).accountant,
        "epsilon_rdp": _round_up(rdp_epsilon(events, budget.delta)),
        "epsilon_pld": _round_up(pld_epsilon(events, budget.delta)),
        "releases": [one | {"event": event_to_json(taken[one["name"]])} for one in statement["releases"]],
        "event": event_to_json(compose(events)),
        "notes": [RETAKEN_NOTE],
    }
    if "group" in statement:
        together = _round_up(group_epsilon(events, budget.delta, budget.group_size))
        figures["group"] = statement["group"] | {"epsilon": together}
    return statement | figures


def selection_statement(selection: Selection, chosen: str) -> dict[str, Any]:
    """What `privacy.json` of a model has that was chosen privately, instead of the figures of its own training.

    Args:
        selection: what was spent.
        chosen: name of the candidate.
    """
    spent, trials = _round_up(selection.spent), selection.trials
    return {
        "epsilon": spent,
        "delta": selection.delta,
        "accountant": renyi_accountant_name(),
        "epsilon_rdp": spent,
        "epsilon_pld": None,
        "event": event_to_json(selection.event),
        "selection": {
            "words": "the best of a random number of trials, each of a candidate drawn uniformly at random, by a noisy "
            f"score, the release '{SCORE}'; neither the other trials nor their number are released",
            "candidates": [candidate.name for candidate in selection.candidates],
            "chosen": chosen,
            "trials": {
                "distribution": "truncated negative binomial",
                "mean": trials.mean,
                "shape": trials.shape,
                "gamma": trials.gamma,
            },
            "epsilon_of_one_trial": _round_up(selection.trial_epsilon),
            "source": "Papernot and Steinke 2022, arXiv 2110.03620, theorem 2",
        },
    }


def _release(release: Release, unit: str, noise_source: str) -> dict[str, Any]:
    """One item of `releases`."""
    return {
        "name": release.name,
        "title": release.spec.title,
        **_numbers(release, unit),
        "noise_source": _noise_source(release, noise_source),
        "event": event_to_json(release.event()),
    }


def _numbers(release: Release, unit: str) -> dict[str, Any]:
    spec = release.spec
    if isinstance(spec, DpSgdSpec):
        batch = "full batch" if spec.sample_rate == 1 else "Poisson-sampled"
        # of a person, `multiplicity` random images are averaged
        clipped = "sampled and clipped per person" if unit == ONE_PERSON else "per-example clipped"
        mechanism = f"DP-SGD: {batch}, {clipped}, Gaussian noise"
        if spec.band > 1:
            mechanism += f" correlated over {spec.band} steps (DP-BandMF), with a turn in every {spec.band}th batch"
        own: dict[str, Any] = {
            "expected_batch": spec.expected_batch,
            "clip_norm": spec.clip_norm,
            "multiplicity": spec.multiplicity,
        }
        if spec.band > 1:
            own["noise_band"] = spec.band
    else:
        mechanism, own = f"{spec.kind} with Gaussian noise, once", {"clip_norm": spec.sensitivity}
    common = {
        "mechanism": mechanism,
        "noise_multiplier": release.noise_multiplier,
        "sample_rate": spec.sample_rate,
        "steps": spec.steps,
    }
    return common | own


def _noise_source(release: Release, chosen: str) -> str:
    return NOISE_SOURCES[chosen if isinstance(release.spec, DpSgdSpec) else Randomness.source]


def _round_up(epsilon: float) -> float | None:
    """To six decimals; None where an accountant gives no finite number."""
    return up_to_places(epsilon, 6) if math.isfinite(epsilon) else None


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
