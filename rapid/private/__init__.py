"""Stage 2, the only code that touches private images: objectives, mechanism, accounting, training."""

from rapid.private.plan import Plan, default_delta
from rapid.private.stage import train_private_bundle

__all__ = ["Plan", "default_delta", "train_private_bundle"]
