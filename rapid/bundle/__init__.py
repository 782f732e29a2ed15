"""Bundles: a folder with the components of a model, their hashes, its settings, its card and its privacy statement."""

from rapid.bundle.components import Component, StoredComponent, Thumbnails, save_component
from rapid.bundle.format import Bundle, BundleConfig, PublicData, is_finished, write_bundle

__all__ = [
    "Bundle",
    "BundleConfig",
    "Component",
    "PublicData",
    "StoredComponent",
    "Thumbnails",
    "is_finished",
    "save_component",
    "write_bundle",
]
