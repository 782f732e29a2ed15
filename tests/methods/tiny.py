"""The smallest settings of each method, for tests that run over all methods.

`settings` (nested) make the private training of 100 digits take under three seconds; `public` are settings for
`build-kb` with 60 letters, or None where the method trains without a base.
"""

from __future__ import annotations

import json
from typing import Any

TINY: dict[str, dict[str, Any]] = {
    "dp-classifier": {
        "settings": {
            "network": {"depth": 10, "width": 1, "groups": 4, "stride": 2},
            "warmup": {"training": {"steps": 2, "batch_size": 8}},
            "private": {"expected_batch": 20, "steps": 3, "multiplicity": 2, "physical_batch": 16},
        },
        "public": None,
    },
    "dp-diffusion": {
        "settings": {
            "private": {"expected_batch": 20, "steps": 3, "multiplicity": 2, "physical_batch": 8, "ema_decay": 0.5},
            "generation": {"steps": 4},
        },
        "public": {
            "denoiser": {
                "channels": 8,
                "multipliers": [1, 2],
                "attention": [False, True],
                "patch": 4,
                "training": {"steps": 3, "batch_size": 8},
            },
        },
    },
    "dp-gan": {
        "settings": {
            "discriminator": {"channels": 4},
            "generator": {"channels": 4, "latent": 8},
            "private": {"expected_batch": 20, "steps": 6, "physical_batch": 16, "discriminator_steps": None},
        },
        "public": None,
    },
    "dpdm": {
        "settings": {
            "network": {"patch": 4, "channels": 8, "multipliers": [1], "attention": [False], "heads": 1},
            "public": {"training": {"steps": 3, "batch_size": 8}},
            "private": {"expected_batch": 20, "steps": 3, "multiplicity": 2, "physical_batch": 16},
            "generation": {"steps": 3, "batch_size": 16},
        },
        "public": None,
    },
}
"""By name of the method."""


def flags(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Nested settings as `--set` arguments."""
    found = []
    for name, value in tree.items():
        inner = f"{prefix}{name}"
        found += flags(value, f"{inner}.") if isinstance(value, dict) else ["--set", f"{inner}={json.dumps(value)}"]
    return found
