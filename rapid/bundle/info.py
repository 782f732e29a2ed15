"""Description of a bundle, ready for JSON."""

from __future__ import annotations

import json
import math
from typing import Any

from safetensors import safe_open

import rapid
from rapid.bundle.format import Bundle
from rapid.data.origin import KEYWORD, MADE_FROM

WEIGHTS = "*.safetensors"
GUARANTEE = ("method", "epsilon", "delta", "adjacency")
"""What of `privacy.json` goes with every image; see `rapid.data.origin.Origin`."""


def describe(bundle: Bundle) -> dict[str, Any]:
    """Method, classes, components, the method's facts (for RAPID: k, v and the knowledge base), privacy statement."""
    config = bundle.config
    components = {name: {"sha256": digest} | _parameters(bundle, name) for name, digest in config.components.items()}
    return {
        "name": bundle.name,
        "kind": config.kind,
        "method": config.method,
        "rapid": config.rapid,
        "preset": config.settings.get("preset", ""),
        "classes": list(config.classes),
        "image": {"size": config.image.size, "channels": config.image.channels},
        **config.facts,
        "generation": config.settings.get("generation"),
        "components": components,
        "public": None if config.public is None else config.public.model_dump(mode="json", exclude={"fingerprint"}),
        "privacy": bundle.privacy,
    }


def provenance(bundle: Bundle, name: str = "") -> dict[str, str]:
    """Metadata for every image: that it is synthetic, which model made it, and its privacy guarantee.

    If the public images of the model were themselves made by private models, these are named, too.

    Args:
        bundle: of the model.
        name: of the model; default: that of its folder.
    """
    content: dict[str, Any] = {"synthetic": True, "model": name or bundle.name, "sha256": bundle.digest}
    if bundle.privacy is not None:
        content |= {name: bundle.privacy[name] for name in GUARANTEE if name in bundle.privacy}
    if bundle.origins:
        content[MADE_FROM] = [one.model_dump(mode="json") for one in bundle.origins]
    return {"Software": f"rapid {rapid.__version__}", KEYWORD: json.dumps(content, ensure_ascii=False)}


def _parameters(bundle: Bundle, name: str) -> dict[str, int]:
    """The number of parameters of a component with weights."""
    files = sorted((bundle.path / name).glob(WEIGHTS))
    if not files:
        return {}
    with safe_open(files[0], "pt") as weights:
        return {"parameters": sum(math.prod(weights.get_slice(key).get_shape()) for key in weights.keys())}  # noqa: SIM118 - not a dict
