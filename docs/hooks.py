"""What the site takes from the code and the benchmarks: tables of all settings, and pictures of samples."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic.fields import FieldInfo

PICTURES = {
    "images/samples.png": "benchmarks/demo/samples/samples.png",
    "benchmarks/samples/samples.png": "benchmarks/demo/samples/samples.png",
    "benchmarks/samples/neighbours.png": "benchmarks/demo/samples/neighbours.png",
    "benchmarks/samples/epsilon-10.png": "benchmarks/blood-cells/samples/epsilon-10.png",
    "benchmarks/samples/digits.png": "benchmarks/digits/samples/digits.png",
    "benchmarks/letters-mnist/scripts.png": "benchmarks/letters-mnist/samples/scripts.png",
    "benchmarks/samples/epsilon-1.png": "benchmarks/blood-cells/samples/epsilon-1.png",
    "benchmarks/samples/epsilon-1-confident.png": "benchmarks/blood-cells/samples/epsilon-1-confident.png",
    "benchmarks/samples/epsilon-1-before.png": "benchmarks/blood-cells/samples/epsilon-1-before.png",
    "benchmarks/samples/epsilon-1-moved.png": "benchmarks/blood-cells/samples/epsilon-1-moved.png",
    "benchmarks/growth.svg": "benchmarks/knowledge-base/growth.svg",
    "benchmarks/samples/rapid-10-probe.png": "benchmarks/methods/samples/rapid-10-probe.png",
    "benchmarks/samples/rapid-1-probe.png": "benchmarks/methods/samples/rapid-1-probe.png",
    "benchmarks/samples/dp-gan-1.png": "benchmarks/methods/samples/dp-gan-1.png",
    "benchmarks/samples/dpdm-1.png": "benchmarks/methods/samples/dpdm-1.png",
    "benchmarks/samples/dp-diffusion-1.png": "benchmarks/methods/samples/dp-diffusion-1.png",
    "benchmarks/samples/dp-gan-10.png": "benchmarks/methods/samples/dp-gan-10.png",
    "benchmarks/samples/dpdm-10.png": "benchmarks/methods/samples/dpdm-10.png",
    "benchmarks/samples/dp-diffusion-10.png": "benchmarks/methods/samples/dp-diffusion-10.png",
    "benchmarks/samples/dp-classifier-10.png": "benchmarks/methods/samples/dp-classifier-10.png",
    "benchmarks/samples/epsilon-10-first.png": "benchmarks/blood-cells/samples/epsilon-10-first.png",
    "benchmarks/samples/epsilon-10-noise.png": "benchmarks/blood-cells/samples/epsilon-10-noise.png",
    "benchmarks/samples/epsilon-10-patches.png": "benchmarks/blood-cells/samples/epsilon-10-patches.png",
    "benchmarks/samples/epsilon-1-patches.png": "benchmarks/blood-cells/samples/epsilon-1-patches.png",
}
"""Pictures of the site, and where they are in the project."""
MARK = re.compile(r"^<!-- settings: ([a-z_-]+) -->$", re.MULTILINE)
"""Where a page wants the settings of a method, or of the server."""
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pictures."""
    root = Path(config.config_file_path).parent
    for name, source in PICTURES.items():
        files.append(File.generated(config, name, abs_src_path=str(root / source)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables where a page has its marks."""
    return MARK.sub(lambda found: "\n".join(_tables(found[1])), markdown)


def _tables(name: str) -> Iterator[str]:
    if name == "server":
        from rapid_server.settings import ServerSettings

        yield from _table("", ServerSettings)
        return
    from rapid.methods import find_method

    method = find_method(name)
    settings = method.settings
    public = settings.fixed_sections() if method.has_public_stage else ()
    for section, field in settings.model_fields.items():
        if (kind := _section(field)) is None:
            continue
        yield f"\n## {section}\n\n{(kind.__doc__ or '').strip()}"
        yield "\nFixed by a public bundle: set it in `build-kb`.\n" if section in public else ""
        yield from _table(f"{section}.", kind, field.default)


def _table(prefix: str, kind: type[BaseModel], defaults: BaseModel | None = None) -> Iterator[str]:
    yield "| setting | default | values | meaning |\n|---|---|---|---|"
    yield from _rows(prefix, kind, defaults)


def _rows(prefix: str, kind: type[BaseModel], defaults: BaseModel | None) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        value = field.get_default() if defaults is None else getattr(defaults, name)
        if (inner := _section(field)) is not None:
            yield from _rows(f"{prefix}{name}.", inner, value)
            continue
        default = "required" if field.is_required() else f"`{_shown(value)}`"
        yield f"| `{prefix}{name}` | {default} | {_values(field)} | {field.description or ''} |"


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The class of a field that is a section of settings."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _shown(value: Any) -> str:
    """A default as YAML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(json.dumps(part) if isinstance(part, str) else _shown(part) for part in value)}]"
    return "null" if value is None else f"{value}"


def _values(field: FieldInfo) -> str:
    """Type, choices and range."""
    bounds = [
        f"{sign} {getattr(one, key)}" for one in field.metadata for key, sign in BOUNDS.items() if hasattr(one, key)
    ]
    return ", ".join([_kind(field.annotation), *bounds])


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(part) for part in arguments)
    if origin is tuple:
        return f"list: {_kind(arguments[0])}"
    names = {int: "whole number", float: "number", bool: "true, false", type(None): "null"}
    return _kind(arguments[0]) if arguments else names.get(annotation, "text")
