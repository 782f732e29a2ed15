"""Recipes of components, as hashes: a finished component is reused only if its recipe is the same.

The function that makes a component gets its recipe instead of the settings of the whole model, so it cannot depend on a
setting that is not in the hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from rapid.config.sections import Section


class Recipe(Section):
    """All inputs of a component. Subclasses add the sections of settings that they use.

    Attributes:
        images: hash of the training images, their labels and their split.
        made_from: hashes of the components that this component is made with, by name.
    """

    images: str
    made_from: Mapping[str, str] = {}

    @property
    def digest(self) -> str:
        """sha256 (hex) of the recipe and its class, so two kinds of components never share one."""
        content = {"class": f"{type(self).__module__}.{type(self).__qualname__}", **self.model_dump(mode="json")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
