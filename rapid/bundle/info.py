"""What is in a bundle, ready for JSON."""

from __future__ import annotations

import json
import math
from typing import Any

from safetensors import safe_open

import rapid
from rapid.bundle.format import Bundle
from rapid.nn.storage import WEIGHTS


def describe(bundle: Bundle) -> dict[str, Any]:
    """Networks, k, v, knowledge base, privacy statement."""
    settings, config = bundle.settings, bundle.config
    networks = {
        name: {"sha256": digest, "parameters": _parameters(bundle, name)} for name, digest in config.networks.items()
    }
    return {
        "name": bundle.path.resolve().name,
        "kind": config.kind,
        "rapid": config.rapid,
        "preset": settings.preset,
        "classes": list(config.classes),
        "image": {"size": settings.image.size, "channels": settings.image.channels},
        "latent": list(settings.latent_shape),
        "timesteps": settings.schedule.timesteps,
        "k": settings.retrieval.k,
        "v": settings.retrieval.v,
        "start": settings.late_start,
        "objective": settings.private.objective if config.kind == "private" else None,
        "generation": settings.generation.model_dump(mode="json"),
        "networks": networks,
        "knowledge_base": {"entries": len(bundle.knowledge_base()), "index": settings.knowledge_base.index_type},
        "public": config.public.model_dump(mode="json", exclude={"fingerprint"}),
        "retrieval": None if config.retrieval is None else config.retrieval.model_dump(mode="json"),
        "privacy": bundle.privacy,
    }


def provenance(bundle: Bundle) -> dict[str, str]:
    """What every image says of itself: that it is synthetic, which model made it, and what that guarantees."""
    content = {"synthetic": True, "model": bundle.path.resolve().name, "sha256": bundle.digest}
    if bundle.privacy is not None:
        content |= {name: bundle.privacy[name] for name in ("epsilon", "delta", "adjacency") if name in bundle.privacy}
    return {"Software": f"rapid {rapid.__version__}", "rapid": json.dumps(content, ensure_ascii=False)}


def _parameters(bundle: Bundle, name: str) -> int:
    with safe_open(bundle.path / name / WEIGHTS, "pt") as weights:
        return sum(math.prod(weights.get_slice(key).get_shape()) for key in weights.keys())  # noqa: SIM118 - not a dict
