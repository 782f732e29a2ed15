"""The smallest settings of each method: private training of 100 digits in a few seconds."""

from __future__ import annotations

from typing import Any

TINY: dict[str, dict[str, Any]] = {
    "dp-gan": {
        "settings": {
            "discriminator": {"channels": 4},
            "generator": {"channels": 4, "latent": 8},
            "private": {"expected_batch": 20, "steps": 6, "physical_batch": 16},
        },
        "public": None,
    },
}
"""Name of the method -> nested settings, and those of its public stage or None."""
