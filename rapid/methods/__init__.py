"""The methods by name: folders with `METHOD`, and entry points of the group `rapid.methods`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapid.config.presets import DEFAULT_METHOD, Tree, build_settings, generation_settings, preset_tree
from rapid.config.sections import MethodSettings
from rapid.errors import InputError
from rapid.methods.base import Classifying, Method, Probed, Teaching

if TYPE_CHECKING:
    import torch

    from rapid.bundle import Bundle
    from rapid.sampling.classifier import Classifier
    from rapid.sampling.generator import Generator

GROUP = "rapid.methods"


def method_names() -> list[str]:
    """Names of all methods, of rapid and of installed packages."""
    return sorted({*_own(), *_installed()})


def find_method(name: str) -> Method[Any]:
    """The method of this name.

    Raises:
        InputError: there is none.
    """
    if name in (own := _own()):
        return _method(importlib.import_module(f"{__name__}.{own[name]}").METHOD)
    if name in (installed := _installed()):
        return _method(installed[name].load())
    raise InputError("method", f"is unknown; choose one of {', '.join(method_names())}", name)


def settings_class(name: str) -> type[MethodSettings]:
    """The class of a method's settings.

    Raises:
        InputError: there is no such method.
    """
    return find_method(name).settings


def load_settings(preset: str, overrides: Sequence[str] = ()) -> MethodSettings:
    """Load a preset and apply `section.name=value` overrides. The preset's method determines the class.

    Raises:
        InputError: an unknown preset or setting, or an invalid value.
    """
    return apply_overrides(preset_tree(preset) | {"preset": preset}, overrides)


def apply_overrides(tree: Tree, overrides: Sequence[str]) -> MethodSettings:
    """Build settings from a tree after `section.name=value` overrides.

    Args:
        tree: nested settings; left unchanged. `method` names the settings class, `DEFAULT_METHOD` if it is missing.
        overrides: the values are read as YAML: numbers, true, [1, 2].

    Raises:
        InputError: an unknown method or setting, a malformed override, or an invalid value.
    """
    return build_settings(settings_class(tree.get("method", DEFAULT_METHOD)), tree, overrides)


def open_generator(
    path: Path, device: str = "auto", overrides: Sequence[str] = (), *, for_training: bool = False
) -> Generator:
    """Open a bundle of any method for sampling.

    Args:
        path: a bundle.
        device: auto, cpu or cuda.
        overrides: generation settings, as `generation.steps=50`.
        for_training: the images are only to train classifiers on, by soft labels; the method's settings for that are
            the defaults.

    Raises:
        InputError: not a finished bundle, a bundle that makes no images, or an unknown device or setting; or it has no
            probe, and is to be for training.
    """
    from rapid.bundle import Bundle
    from rapid.runtime import choose_device

    bundle = Bundle.open(path, "model")
    if for_training:
        overrides = [*settings_for_training(bundle), *overrides]
    return generator_of(bundle, choose_device(device), overrides)


def settings_for_training(bundle: Bundle) -> Sequence[str]:
    """The generation settings of a bundle for images that are only to train classifiers on.

    Raises:
        InputError: it has no probe that tells soft labels.
    """
    method = find_method(bundle.config.method)
    settings = method.for_training(bundle) if isinstance(method, Teaching) else None
    if settings is None:
        raise InputError("for_training", "the model has no probe that tells soft labels; leave it out", bundle.path)
    return settings


def generator_of(bundle: Bundle, device: torch.device, overrides: Sequence[str] = ()) -> Generator:
    """The generator of an opened bundle; see `open_generator`."""
    method = find_method(bundle.config.method)
    settings = generation_settings(bundle.settings_as(method.settings), overrides)
    generator = method.generator(bundle, device, settings.generation)
    if generator is None:
        hint = "; use rapid predict" if isinstance(method, Classifying) else ""
        raise InputError("model", f"was made by {method.name}, which makes no images{hint}", bundle.path)
    return generator


def open_classifier(path: Path, device: str = "auto") -> Classifier:
    """Open a bundle of any method that classifies images, or that has a probe.

    Args:
        path: a bundle.
        device: auto, cpu or cuda.

    Raises:
        InputError: not a finished bundle, a bundle that does not classify, or an unknown device.
    """
    from rapid.bundle import Bundle
    from rapid.runtime import choose_device

    bundle, place = Bundle.open(path, "model"), choose_device(device)
    method: object = find_method(bundle.config.method)
    if isinstance(method, Classifying):
        return method.classifier(bundle, place)
    if isinstance(method, Probed) and (probe := method.probe(bundle, place)) is not None:
        return probe
    raise InputError("model", f"was made by {bundle.config.method}, and has no classifier of images", path)


def open_model(path: Path, device: str = "auto") -> Generator | Classifier:
    """Open a bundle of any method: a classifier if it classifies, or else a generator.

    Args:
        path: a bundle.
        device: auto, cpu or cuda.

    Raises:
        InputError: not a finished bundle, or an unknown device.
    """
    from rapid.bundle import Bundle
    from rapid.runtime import choose_device

    bundle, place = Bundle.open(path, "model"), choose_device(device)
    method: object = find_method(bundle.config.method)
    return method.classifier(bundle, place) if isinstance(method, Classifying) else generator_of(bundle, place)


def _own() -> dict[str, str]:
    """The methods of rapid: name to module."""
    return {info.name.replace("_", "-"): info.name for info in pkgutil.iter_modules(__path__) if info.ispkg}


def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _method(found: Any) -> Method[Any]:
    method: Method[Any] = found
    return method
