"""Stage 1, on public images only: three networks and the knowledge base. Nothing here imports `rapid.private`."""

from rapid.public.stage import build_public_bundle

__all__ = ["build_public_bundle"]
