"""The two stages: from images to a finished bundle."""

from rapid.methods.rapid.private_stage import train_private_bundle
from rapid.methods.rapid.public_stage import build_public_bundle

__all__ = ["build_public_bundle", "train_private_bundle"]
