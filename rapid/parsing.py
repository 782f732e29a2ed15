"""JSON and YAML that users write: whatever is wrong with them is one kind of error."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from rapid.errors import InputError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Model = TypeVar("Model", bound=BaseModel)

DEEP = "is nested too deeply"
_KINDS = {
    "bool": "true or false",
    "date": "a date",
    "datetime": "a date and a time",
    "dict": "a section, such as {name: value}",
    "finite_number": "a finite number",
    "float": "a number",
    "int": "a whole number",
    "list": "a list, such as [a, b]",
    "model": "a section, such as {name: value}",
    "string": "text",
    "tuple": "a list, such as [1, 2]",
}
"""What a value is to be, by the beginning of the kind of error that pydantic reports."""
_BOUNDS = {"greater_than": "more than", "greater_than_equal": "at least", "less_than": "less than"}
_BOUNDS |= {"less_than_equal": "at most"}
_LENGTHS = {"too_short": "at least", "too_long": "at most"}
_LENGTHS |= {f"string_{name}": words for name, words in _LENGTHS.items()}


def parse_json(text: str | bytes, **options: Any) -> Any:
    """What a JSON text says.

    Args:
        text: the JSON.
        options: of `json.loads`.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError(DEEP) from None


INTEGER, FLOAT, MERGE = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "merge"))


class _Loader(yaml.SafeLoader):
    """YAML that makes plain objects only, with the numbers of YAML 1.2: `010` is ten, `1e-3` a number, `1:30` text.

    A key that stands twice is an error: the second would silently win.
    """


class Repeated(yaml.constructor.ConstructorError):
    """A key stands twice."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    # what `<<` brings in may be given again: that is what it is for
    names: list[Any] = [loader.construct_object(key, deep=True) for key, _ in node.value if key.tag != MERGE]
    for name in names:
        if names.count(name) > 1:
            raise Repeated(problem=f"'{name}' stands twice", problem_mark=node.start_mark)
    return loader.construct_mapping(node, deep=True)


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)))


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in (INTEGER, FLOAT)]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(INTEGER, re.compile(r"[-+]?[0-9][0-9_]*$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    FLOAT,
    re.compile(
        r"(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)
_Loader.add_constructor(INTEGER, _whole)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str) -> Any:
    """What a YAML text says.

    Args:
        text: the YAML; JSON is YAML, too.

    Raises:
        yaml.YAMLError: it is not YAML, nested too deeply, has a key twice, or a date or a number that there is not.
    """
    try:
        # a safe loader: it makes plain objects only
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError(DEEP) from None
    except (ValueError, LookupError, AttributeError):
        # of dates such as 2026-13-45, of thousands of digits, and of tags such as !!bool beside other text
        raise yaml.YAMLError("a value is out of range") from None


def problem_of(error: ErrorDetails, verb: str = "must") -> str:
    """What is wrong with a value, in words that follow its name: "must be at least 1", or with another verb."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in _BOUNDS:
        (bound,) = context.values()
        return f"{verb} be {_BOUNDS[kind]} {str(bound).removesuffix('.0')}"
    if kind in _LENGTHS:
        name = next(name for name in ("min_length", "max_length") if name in context)
        entries = "character" if kind.startswith("string") else "entry"
        many = "characters" if kind.startswith("string") else "entries"
        return f"{verb} have {_LENGTHS[kind]} {context[name]} {entries if context[name] == 1 else many}"
    for beginning, words in _KINDS.items():
        if kind == beginning or kind.removeprefix(beginning) in ("_type", "_parsing", "_from_float", "_parsing_size"):
            return f"{verb} be {words}"
    return error["msg"].replace("Input should", verb, 1).removeprefix("Value error, ")


def read_yaml(path: Path, model: type[Model], field: str, content: str) -> Model:
    """Read a YAML file of settings.

    Args:
        path: the file; an empty one has no settings.
        model: what it must hold.
        field: name of the argument that gave it; for messages.
        content: what it holds, with an example; for messages.

    Raises:
        InputError: it cannot be read, or has an unknown setting, one that stands twice, or a bad value.
    """
    try:
        found = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(field, f"cannot be read ({error.strerror}); give a YAML file", path) from None
    except UnicodeDecodeError:
        raise InputError(field, "is not a text file; give a YAML file", path) from None
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or " ".join(map(str, error.args)) or "a character is not allowed"
        raise InputError(field, f"is not valid YAML: {problem}", path) from None
    if found is None:
        found = {}
    if not isinstance(found, dict):
        raise InputError(field, f"must hold {content}", path)
    try:
        return model.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        what = "there is no such setting" if first["type"] == "extra_forbidden" else problem_of(first)
        raise InputError(field, f"{name}: {what}" if name else what, path) from None
