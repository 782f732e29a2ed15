"""Which way imports point: down the list, never between methods, and from nothing public to anything private."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    "cli", "release", "evaluate", "stages", "interop", "methods", "probe", "tones", "sampling", "bundle", "dp",
    "training", "nn", "diffusion", "data", "config",
)  # fmt: skip
"""Folders of rapid; each may import those behind it. The single modules of rapid lie below all of them."""
SERVER_MAY = ("rapid.parsing", "rapid.sampling", "rapid.bundle", "rapid.errors", "rapid.metadata", "rapid.pictures")


def modules(folder: str) -> dict[str, Path]:
    """Module name -> file, of a package's folder."""
    root = ROOT / folder
    base = root.parent
    found = {}
    for file in sorted(root.rglob("*.py")):
        parts = list(file.relative_to(base).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(file: Path, module: str, *, types: bool = True, functions: bool = True) -> Iterator[str]:
    """Modules that a file imports.

    Args:
        file: to be parsed.
        module: its name, for relative imports.
        types: also those under `if TYPE_CHECKING`.
        functions: also those inside of functions.
    """
    pending: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module if file.name == "__init__.py" else module.rpartition(".")[0]
            start = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            name = (start + (node.module or "")).rstrip(".")
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and not types and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
        elif functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += list(ast.iter_child_nodes(node))


RAPID, INDEX, SERVER = (modules(folder) for folder in ("rapid", "index/rapid_index", "server/rapid_server"))


def layer(module: str) -> int:
    """Place in LAYERS; behind all of them for a single module of rapid."""
    parts = module.split(".")
    return LAYERS.index(parts[1]) if len(parts) > 1 and parts[1] in LAYERS else len(LAYERS)


@pytest.mark.parametrize("module", [name for name in RAPID if name not in ("rapid", "rapid.__main__")])
def test_imports_point_down(module: str) -> None:
    wrong = {
        name
        for name in imports(RAPID[module], module)
        if name.startswith("rapid.") and name in RAPID and layer(name) < layer(module)
    }
    assert not wrong
    assert not [name for name in imports(RAPID[module], module) if name.split(".")[0] == "rapid_server"] or (
        module == "rapid.cli.serve"
    )


def test_every_folder_of_rapid_has_its_layer() -> None:
    folders = {path.name for path in (ROOT / "rapid").iterdir() if (path / "__init__.py").is_file()}
    assert folders == set(LAYERS)


def test_methods_do_not_import_each_other() -> None:
    for module, file in RAPID.items():
        parts = module.split(".")
        if parts[:2] == ["rapid", "methods"] and len(parts) > 2 and (ROOT / "rapid/methods" / parts[2]).is_dir():
            others = {
                name.split(".")[2]
                for name in imports(file, module)
                if name.startswith("rapid.methods.") and (ROOT / "rapid/methods" / name.split(".")[2]).is_dir()
            }
            assert others <= {parts[2]}


def test_the_public_stage_cannot_reach_the_private_one() -> None:
    """All that is loaded by it, followed through every import that is not for types alone."""
    pending = ["rapid.cli.build", "rapid.stages.public", *(name for name in RAPID if name.endswith(".public_stage"))]
    seen: set[str] = set()
    while pending:
        module = pending.pop()
        if module in seen or module not in RAPID:
            continue
        seen.add(module)
        # imports inside of functions: a method's METHOD imports each stage when it runs
        pending += list(imports(RAPID[module], module, types=False, functions=False))
        pending.append(module.rpartition(".")[0])
    assert not [module for module in seen if module.startswith("rapid.dp") or "private" in module]


def test_the_index_knows_nothing_of_the_rest() -> None:
    for module, file in INDEX.items():
        assert not [name for name in imports(file, module) if name.split(".")[0] in ("rapid", "rapid_server", "torch")]


def test_the_server_knows_only_sampling_and_bundles() -> None:
    for module, file in SERVER.items():
        used = {name for name in imports(file, module) if name.startswith("rapid.")}
        extra = {name for name in used if not name.startswith(SERVER_MAY)}
        allowed = {"rapid.methods", "rapid.methods.open_model"} if module == "rapid_server.run" else set()
        assert extra <= allowed | {"rapid.__version__"}


def test_maps_of_packages_have_all_their_modules() -> None:
    """A docstring of a package that lists its files, as rapid.dp does."""
    checked = 0
    for file in (found for folder in ("rapid", "index", "server") for found in (ROOT / folder).rglob("__init__.py")):
        words = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        listed = set(re.findall(r"(?<![\w.])\w+\.py\b", words))
        if len(listed) < 2:
            continue
        assert listed == {other.name for other in file.parent.glob("*.py")} - {"__init__.py"}, file
        checked += 1
    assert checked >= 10


def test_no_base_name_stands_three_times() -> None:
    """Outside of the methods, whose folders are alike on purpose."""
    files = [file for part in (RAPID, INDEX, SERVER) for file in part.values() if file.name != "__init__.py"]
    names = [file.name for file in files if "methods" not in file.parts]
    assert not {name for name in names if names.count(name) > 2}
