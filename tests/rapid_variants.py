"""Variants of a RAPID bundle for the tests of its generator."""

from __future__ import annotations

import copy
from typing import Any

import torch

from rapid.bundle import Bundle
from rapid.methods.rapid.generation_settings import GenerationSettings
from rapid.methods.rapid.generator import RapidGenerator
from rapid.methods.rapid.settings import RapidSettings

CPU = torch.device("cpu")


def with_private(bundle: Bundle, **changes: Any) -> Bundle:
    """The same bundle as if its private stage had had other settings."""
    settings = copy.deepcopy(bundle.config.settings)
    settings["private"] |= changes
    changed = copy.copy(bundle)
    changed.config = bundle.config.model_copy(update={"settings": settings})
    return changed


def make(bundle: Bundle, **changes: Any) -> RapidGenerator:
    """A generator with changed generation settings."""
    settings = bundle.settings_as(RapidSettings).generation.model_dump() | changes
    return RapidGenerator(bundle, CPU, GenerationSettings.model_validate(settings))
