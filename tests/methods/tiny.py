"""The smallest settings of each method, for tests that run over all methods.

`settings` (nested) make the private training of 100 digits a matter of seconds; `public` are settings for `build-kb`
with 60 letters, or None where the method trains without a base.
"""

from __future__ import annotations

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
}
