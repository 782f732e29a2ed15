"""The smallest settings of each method: private training of 100 digits takes under three seconds."""

from __future__ import annotations

from typing import Any

TINY: dict[str, dict[str, Any]] = {
    "dpdm": {
        "settings": {
            "network": {"patch": 4, "channels": 8, "multipliers": [1], "attention": [False], "heads": 1},
            "private": {"expected_batch": 20, "steps": 3, "multiplicity": 2, "physical_batch": 16},
            "generation": {"steps": 3, "batch_size": 16},
        },
        "public": None,
    },
}
"""By name of the method: nested settings; those of the public stage, or None if there is none."""
