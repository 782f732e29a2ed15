"""Settings from presets and overrides.

A preset is a YAML file in `rapid/presets/`. It may say `extends: OTHER` and then holds only what differs from that
preset; lists are replaced as a whole. `--set section.name=value` overrides single settings.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rapid.config.sections import MethodSettings
from rapid.errors import InputError
from rapid.parsing import parse_yaml, problem_of

S = TypeVar("S", bound=MethodSettings)
Tree = dict[str, Any]
"""Nested settings as in YAML."""
PRESETS = resources.files("rapid") / "presets"
DEFAULT_METHOD = "rapid"
UNKNOWN = "extra_forbidden"
"""How pydantic calls a setting that there is not."""
AUTO = "auto"
"""Given instead of a preset where a method can choose its settings (`rapid.stages.automatic`)."""


def preset_names(folder: Traversable = PRESETS) -> list[str]:
    """Names of the presets that ship with rapid, or of those in another folder, sorted."""
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def private_settings(base: S, preset: str | None, overrides: Sequence[str]) -> S:
    """Settings of a private run: public sections from `base`, the others from `preset` (or `base`) and overrides.

    Raises:
        InputError: an override of a section that the public bundle fixes, a preset of another method, an unknown
            setting, or an invalid value.
    """
    for override in overrides:
        name, _ = _split(override)
        section = name.split(".", 1)[0]
        if section in base.fixed_sections():
            raise _refusal(name, f"the public bundle (--base) fixes '{section}'; set it in build-kb")
    return build_settings(type(base), _with_preset(base, preset), overrides).for_private_run(overrides)


def networks_settings(base: S, fixed: Sequence[str], preset: str | None, overrides: Sequence[str]) -> S:
    """Settings of a public stage on given networks: those of the networks, with other sections from `preset` if given.

    Args:
        base: settings that the networks were trained with.
        fixed: sections, or single settings such as "retrieval.k", that the networks fix.
        preset: its sections `private` and `generation` are used.
        overrides: see `build_settings`.

    Raises:
        InputError: an override of what the networks fix, a preset of another method, or an invalid value.
    """
    for override in overrides:
        name, _ = _split(override)
        if any(name == one or name.startswith(f"{one}.") or one.startswith(f"{name}.") for one in fixed):
            raise _refusal(name, "the networks (--networks) fix it; train your own without --networks")
    return build_settings(type(base), _with_preset(base, preset), overrides)


def _with_preset(base: MethodSettings, preset: str | None) -> Tree:
    """The settings of `base`, with the sections `private` and `generation` of a preset."""
    tree = base.model_dump(mode="json")
    if preset is None:
        return tree
    other = preset_tree(preset)
    method = other.get("method", DEFAULT_METHOD)
    if method != base.method:
        raise InputError("preset", f"is for the method {method}, the public bundle for {base.method}", preset)
    return tree | {name: other[name] for name in ("private", "generation") if name in other} | {"preset": preset}


def generation_settings(base: S, overrides: Sequence[str]) -> S:
    """The settings of a bundle with overrides of its generation section.

    Raises:
        InputError: an override of another section, an unknown setting, or an invalid value.
    """
    for override in overrides:
        name, _ = _split(override)
        if not name.startswith("generation."):
            raise _refusal(name, "only generation settings can be changed here, such as generation.steps=50")
    return build_settings(type(base), base.model_dump(mode="json"), overrides)


def check_overrides(kind: type[MethodSettings], overrides: Sequence[str]) -> None:
    """Refuse overrides that fit no settings of a class, before it is known which ones they change.

    Whether settings fit each other is left to `build_settings`.

    Args:
        kind: the class.
        overrides: see `build_settings`.

    Raises:
        InputError: a malformed override, an unknown setting, or a value that is not of its type or out of its range.
    """
    tree = _sections(kind)
    for override in overrides:
        _apply(tree, override)
    names = {_split(override)[0] for override in overrides}
    try:
        kind.model_validate(tree)
    except ValidationError as error:
        for found in error.errors():
            name = _name(found["loc"])
            # errors of whole sections may be those of defaults beside which the override is not meant to stand
            if name in names or found["type"] == UNKNOWN:
                raise _refusal(name, _problem(found, kind)) from None


def section_overrides(section: str, kind: type[BaseModel], overrides: Sequence[str]) -> Tree:
    """What overrides set of one section, ready for JSON, before the other settings are known.

    Args:
        section: its name.
        kind: its class.
        overrides: see `build_settings`; those of other sections are left out.

    Raises:
        InputError: a malformed override, an unknown setting, or an invalid value.
    """
    tree: Tree = {section: {}}
    for override in overrides:
        if _split(override)[0].partition(".")[0] == section:
            _apply(tree, override)
    try:
        found = kind.model_validate(tree[section])
    except ValidationError as error:
        first = error.errors()[0]
        raise _refusal(_name((section, *first["loc"])), _problem(first, kind)) from None
    own: Tree = found.model_dump(mode="json", exclude_unset=True)
    return own


def build_settings(kind: type[S], tree: Tree, overrides: Sequence[str]) -> S:
    """Build settings of one class from a tree after `section.name=value` overrides.

    Args:
        kind: the class.
        tree: nested settings; left unchanged.
        overrides: the values are read as YAML: numbers, true, [1, 2].

    Raises:
        InputError: a malformed override, an unknown setting, or an invalid value; the field is the setting.
    """
    # a section that is given in part keeps the other defaults of its place, which may not be those of its class
    tree = _merge(_sections(kind), copy.deepcopy(tree))
    for override in overrides:
        _apply(tree, override)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        raise _refusal(_name(first["loc"]), _problem(first, kind)) from None


def preset_tree(preset: str, folder: Traversable = PRESETS) -> Tree:
    """The settings that a preset and those that it extends hold, nested as in YAML.

    Raises:
        InputError: there is no such preset, as for AUTO, it extends an unknown one, or presets extend each other in a
            circle.
    """
    names = preset_names(folder)
    if preset == AUTO:
        problem = f"is for build-kb, and for --base that it made; choose one of {', '.join(names)}"
        raise InputError("preset", problem, preset)
    if preset not in names:
        raise InputError("preset", f"unknown; choose one of {', '.join([AUTO, *names])}", preset)
    chain: list[str] = []
    tree: Tree = {}
    name: str | None = preset
    while name is not None:
        if name in chain:
            raise InputError("preset", f"extends itself: {' -> '.join([*chain, name])}", preset)
        if name not in names:
            raise InputError("preset", f"{chain[-1]} extends '{name}', which does not exist", preset)
        chain.append(name)
        own: Tree = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
        name = own.pop("extends", None)
        tree = _merge(own, tree)
    return tree


def _sections(kind: type[BaseModel]) -> Tree:
    """The defaults of the sections of a class."""
    defaults = {name: field.default for name, field in kind.model_fields.items()}
    return {name: value.model_dump(mode="json") for name, value in defaults.items() if isinstance(value, BaseModel)}


def _names(tree: Tree, prefix: str = "") -> Iterator[str]:
    """Names of all sections and settings."""
    for name, value in tree.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{name}.")


def _problem(found: ErrorDetails, kind: type[BaseModel]) -> str:
    """What is wrong with a setting, in words."""
    if found["type"] != UNKNOWN:
        return problem_of(found)
    near = _nearest(_name(found["loc"]), list(_names(_sections(kind))))
    return f"there is no such setting{f'; did you mean {near}?' if near else ''}"


def _nearest(wrong: str, names: list[str]) -> str | None:
    """The setting that was probably meant: of the same section, where there is this section."""
    section, _, last = wrong.rpartition(".")
    if section in names:
        prefix = f"{section}."
        near = get_close_matches(last, (name.removeprefix(prefix) for name in names if name.startswith(prefix)), 1)
        return prefix + near[0] if near else None
    return next(iter(get_close_matches(wrong, names, 1)), None)


def _merge(base: Tree, changes: Tree) -> Tree:
    """`base` with `changes`, section by section; anything but a section is replaced."""
    merged = base | changes
    for name in base.keys() & changes.keys():
        if isinstance(base[name], dict) and isinstance(changes[name], dict):
            merged[name] = _merge(base[name], changes[name])
    return merged


def _apply(tree: Tree, override: str) -> None:
    """Change `tree` by one override."""
    name, value = _split(override)
    *sections, leaf = name.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise _refusal(name, f"'{section}' is a value, not a section")
    try:
        found = parse_yaml(value)
    except yaml.YAMLError:
        raise InputError("set", "the value is not valid YAML", override) from None
    own = tree.get(leaf)
    # a section that is given in part keeps its other values
    tree[leaf] = _merge(own, found) if isinstance(own, dict) and isinstance(found, dict) else found


def _split(override: str) -> tuple[str, str]:
    """Name and value of an override."""
    name, separator, value = override.partition("=")
    if not separator or not name.strip():
        raise InputError("set", "write it as section.name=value", override)
    return name.strip(), value


def _name(place: tuple[int | str, ...]) -> str:
    """The setting at a place that pydantic names."""
    return ".".join(str(part) for part in place)


def _refusal(name: str, problem: str) -> InputError:
    """The error of a setting; of a section or of all settings if the name has no dot or is empty."""
    return InputError(name, problem) if "." in name else InputError("set", problem, name or None)
