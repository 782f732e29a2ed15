"""Stage 2, the only code that touches private images: objectives, mechanism, accounting, training."""

from rapid.private.mechanism import PrivateMechanism
from rapid.private.plan import Plan, default_delta
from rapid.private.ranks import Ranks
from rapid.private.stage import train_private_bundle

__all__ = ["Plan", "PrivateMechanism", "Ranks", "default_delta", "train_private_bundle"]
