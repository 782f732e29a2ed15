"""Settings made of a preset and overrides.

A preset is a YAML file in `rapid/presets/`; `--set section.name=value` overrides one of its settings.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import yaml
from pydantic import ValidationError

from rapid.config.sections import PUBLIC_SECTIONS, GenerationSettings, Settings
from rapid.errors import InputError


def preset_names() -> list[str]:
    """Names of the presets that ship with rapid."""
    folder = resources.files("rapid") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_settings(preset: str, overrides: list[str] | None = None) -> Settings:
    """Settings of a preset with `section.name=value` overrides.

    Raises:
        InputError: an unknown preset or setting, or a value that does not fit; the message names it.
    """
    return apply_overrides({**_preset_tree(preset), "preset": preset}, overrides or [])


def private_settings(base: Settings, preset: str | None, overrides: list[str]) -> Settings:
    """Settings of a private run: the public sections of `base`, the others from `preset` (or `base`) and overrides.

    Raises:
        InputError: an override of a section that the public bundle fixes, or one that does not fit.
    """
    for override in overrides:
        section = override.split(".", 1)[0]
        if section in PUBLIC_SECTIONS:
            raise InputError(f"--set {override}: the public bundle (--base) fixes '{section}'; set it in build-kb")
    tree = base.model_dump(mode="json")
    if preset is not None:
        other = _preset_tree(preset)
        tree |= {name: other[name] for name in ("private", "generation") if name in other} | {"preset": preset}
    settings = apply_overrides(tree, overrides)
    if settings.private.objective == "ldm" and not any(o.startswith("generation.retrieval=") for o in overrides):
        # all steps are trained, so all are sampled
        generation = settings.generation.model_copy(update={"retrieval": "none"})
        settings = settings.model_copy(update={"generation": generation})
    return settings


def generation_settings(base: Settings, overrides: list[str]) -> GenerationSettings:
    """How to sample: the generation section of `base` with overrides.

    Raises:
        InputError: an override of another section, or one that does not fit.
    """
    for override in overrides:
        if not override.startswith("generation."):
            raise InputError(f"--set {override}: only generation settings can be changed here, as generation.steps=50")
    return apply_overrides(base.model_dump(mode="json"), overrides).generation


def apply_overrides(tree: dict[str, Any], overrides: list[str]) -> Settings:
    """Build settings from a nested dict after `a.b=c` overrides; c is read as YAML (numbers, true, [1, 2]).

    Raises:
        InputError: an override that is malformed or unknown, or a value that does not fit; the message names it.
    """
    for override in overrides:
        name, separator, value = override.partition("=")
        if not separator or not name.strip():
            raise InputError(f"--set {override}: write it as section.name=value")
        *sections, leaf = name.strip().split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise InputError(f"--set {override}: '{section}' is a value, not a section")
        try:
            node[leaf] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise InputError(f"--set {override}: the value is not valid YAML") from None
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "settings"
        message = first["msg"].removeprefix("Value error, ")
        raise InputError(f"--set {where}: {message}") from None


def _preset_tree(preset: str) -> dict[str, Any]:
    if preset not in preset_names():
        raise InputError(f"--preset {preset}: unknown; choose one of {', '.join(preset_names())}")
    text = (resources.files("rapid") / "presets" / f"{preset}.yaml").read_text(encoding="utf-8")
    tree: dict[str, Any] = yaml.safe_load(text)
    return tree
