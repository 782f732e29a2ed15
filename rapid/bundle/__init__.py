"""Bundles: folders with the components of a model, their settings, their hashes and their privacy statement."""

from rapid.bundle.format import (
    PRIVACY,
    THUMBNAILS,
    Bundle,
    BundleConfig,
    PublicData,
    RetrievalAccuracy,
    is_finished,
    write_config,
)

__all__ = [
    "PRIVACY",
    "THUMBNAILS",
    "Bundle",
    "BundleConfig",
    "PublicData",
    "RetrievalAccuracy",
    "is_finished",
    "write_config",
]
