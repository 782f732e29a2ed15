"""The privacy statement: `privacy.json`, and the same in words."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import rapid
from rapid.config.sections import PrivateSettings
from rapid.data.thumbnails import LIKENESS, SIDE
from rapid.dp.accounting import accountant_name, group_accountant_name
from rapid.dp.budget import Budget
from rapid.dp.overlap import REFUSED, smallest_found
from rapid.dp.randomness import NOISE_SOURCES, Randomness

PACKAGES = ("torch", "opacus", "diffusers", "faiss-cpu", "faiss-gpu-cu12", "numpy", "cryptography", "dp-accounting")

OPTIMIZERS = {"adam": "Adam", "momentum": "gradient descent with momentum"}


def privacy_statement(budget: Budget, settings: PrivateSettings) -> dict[str, Any]:
    """Content of `privacy.json` of a finished training.

    Args:
        budget: what was spent.
        settings: optimizer and noise source.
    """
    plan = budget.denoiser
    statement = {
        "epsilon": _round_up(plan.epsilon()),
        "delta": plan.delta,
        "accountant": accountant_name(),
        "epsilon_rdp": _round_up(plan.epsilon_rdp()),
        "adjacency": "add or remove one image",
        "unit": "one image",
        "mechanism": f"DP-SGD: Poisson-sampled, per-example clipped, Gaussian noise, {OPTIMIZERS[settings.optimizer]}",
        "noise_multiplier": plan.noise_multiplier,
        "sample_rate": plan.sample_rate,
        "expected_batch": plan.expected_batch,
        "steps": plan.steps,
        "clip_norm": plan.clip_norm,
        "multiplicity": plan.multiplicity,
        "dataset_size": plan.dataset_size,
        "noise_source": NOISE_SOURCES[settings.noise_source],
        "overlap_check": _overlap_check(budget),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "packages": {"rapid": rapid.__version__, **_versions()},
    }
    if budget.probe is not None:
        statement["probe"] = {
            "mechanism": "DP gradient descent on all images, per-example clipped, Gaussian noise, momentum",
            "noise_multiplier": budget.probe.noise_multiplier,
            "sample_rate": budget.probe.sample_rate,
            "steps": budget.probe.steps,
            "clip_norm": budget.probe.clip_norm,
        }
    if plan.group_size > 1:
        statement["group"] = {
            "unit": f"{plan.group_size} images of one person",
            "size": plan.group_size,
            "epsilon": _round_up(plan.epsilon_group()),
            "delta": plan.delta,
            "accountant": group_accountant_name(),
        }
    return statement


def _overlap_check(budget: Budget) -> dict[str, Any] | str:
    if budget.overlap is None:
        return "not made"
    return {
        "mechanism": "number of private images with a near-duplicate among all public ones, Gaussian noise, once",
        "near_duplicate": f"correlation of {SIDE}x{SIDE} grey thumbnails of {LIKENESS} or more",
        "noise_multiplier": budget.overlap.noise_multiplier,
        "sample_rate": budget.overlap.sample_rate,
        "steps": budget.overlap.steps,
        "noise_source": NOISE_SOURCES[Randomness.source],
        "refused_above": REFUSED * budget.overlap.noise_multiplier,
        "almost_surely_refused_from": smallest_found(budget.overlap),
    }


def _round_up(epsilon: float) -> float:
    return math.ceil(epsilon * 1e6) / 1e6


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
