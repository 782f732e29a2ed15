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
    return sorted({*_own(), *(entry.name for entry in entry_points(group=GROUP))})


def find_method(name: str) -> Method[Any]:
    """The method of this name.

    Raises:
        InputError: there is none, or several, or its package cannot be loaded.
    """
    own, installed = _own(), [entry for entry in entry_points(group=GROUP) if entry.name == name]
    packages = " and ".join(sorted(map(_package, installed)))
    if name in own:
        if installed:
            problem = (
                f"is a method of rapid, and {packages} would replace it; remove that package, or rename its method"
            )
            raise InputError("method", problem, name)
        return _method(importlib.import_module(f"{__name__}.{own[name]}").METHOD)
    if len(installed) > 1:
        raise InputError("method", f"is the method of several packages, {packages}; remove all but one", name)
    if installed:
        return _loaded(installed[0])
    raise InputError("method", f"is unknown; choose one of {', '.join(method_names())}", name)


def method_of(bundle: Bundle) -> Method[Any]:
    """The method that made a bundle.

    Raises:
        InputError: its package is not installed, or cannot be loaded.
    """
    name = bundle.config.method
    if name not in method_names():
        problem = f"was made by the method {name}, which is not installed; install its package"
        raise InputError("model", problem, bundle.path)
    return find_method(name)


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


def settings_for_training(bundle: Bundle, field: str = "for_training") -> Sequence[str]:
    """The generation settings of a bundle for images that are only to train classifiers on.

    Args:
        bundle: of any method.
        field: the argument that asks for soft labels; for the message.

    Raises:
        InputError: it has no probe that tells soft labels.
    """
    method = method_of(bundle)
    settings = method.for_training(bundle) if isinstance(method, Teaching) else None
    if settings is None:
        raise InputError(field, "the model has no probe that tells soft labels; leave it out", bundle.path)
    return settings


def generator_of(bundle: Bundle, device: torch.device, overrides: Sequence[str] = ()) -> Generator:
    """The generator of an opened bundle; see `open_generator`."""
    settings = check_generation(bundle, overrides)
    generator = method_of(bundle).generator(bundle, device, settings.generation)
    if generator is None:
        raise InputError("model", f"was made by {bundle.config.method}, which makes no images", bundle.path)
    return generator


def check_generation(bundle: Bundle, overrides: Sequence[str] = ()) -> MethodSettings:
    """The settings with which a bundle makes images, without opening its networks.

    Raises:
        InputError: it makes no images, or an unknown or invalid setting.
    """
    method = method_of(bundle)
    settings: MethodSettings = generation_settings(bundle.settings_as(method.settings), overrides)
    if isinstance(method, Classifying):
        raise InputError("model", f"was made by {method.name}, which makes no images; use rapid predict", bundle.path)
    return settings


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
    method: object = method_of(bundle)
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
    method: object = method_of(bundle)
    return method.classifier(bundle, place) if isinstance(method, Classifying) else generator_of(bundle, place)


def _own() -> dict[str, str]:
    """The methods of rapid: name to module."""
    return {info.name.replace("_", "-"): info.name for info in pkgutil.iter_modules(__path__) if info.ispkg}


def _package(entry: EntryPoint) -> str:
    """Name of the package that an entry point belongs to."""
    return entry.dist.name if entry.dist else entry.value


def _loaded(entry: EntryPoint) -> Method[Any]:
    """The method of an installed package."""
    package = _package(entry)
    try:
        found = entry.load()
    except Exception as error:
        problem = f"the package {package} cannot be loaded ({type(error).__name__}: {error}); mend or remove it"
        raise InputError("method", problem, entry.name) from error
    own = getattr(found, "name", None)
    if own != entry.name:
        there = "no method" if own is None else f"the method {own}"
        problem = f"the package {package} has {there} under this name; mend its entry point"
        raise InputError("method", problem, entry.name)
    return _method(found)


def _method(found: Any) -> Method[Any]:
    method: Method[Any] = found
    return method
