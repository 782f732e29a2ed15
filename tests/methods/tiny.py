"""Settings with which the stages of each method take under three seconds on 100 images."""

from __future__ import annotations

from typing import Any

TINY: dict[str, dict[str, Any]] = {
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
}
"""By the name of the method: nested settings, and those of its public stage, or None without one."""
