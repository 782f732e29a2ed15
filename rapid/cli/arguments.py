"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rapid.errors import InputError
from rapid.places import check_outside

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEVICE = "default: auto, which is a GPU if there is one"


def given(text: str) -> str:
    """An argument that may not be empty, as a variable of the shell is that was never set.

    Raises:
        argparse.ArgumentTypeError: it is.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; give a path")
    return text


def given_path(text: str) -> Path:
    """A path; an empty one would be the current folder.

    Raises:
        argparse.ArgumentTypeError: it is empty.
    """
    return Path(given(text))


def add_command(subparsers: Subparsers, name: str, run: str, description: str) -> argparse.ArgumentParser:
    """A command that runs `run`, "module:function" of `rapid.cli`."""
    parser = subparsers.add_parser(name, help=description, description=description, allow_abbrev=False)
    parser.set_defaults(run=f"rapid.cli.{run}")
    return parser


def add_delta(parser: argparse.ArgumentParser) -> None:
    """`--delta`."""
    parser.add_argument(
        "--delta",
        type=float,
        metavar="D",
        help="by how much probabilities may change beyond epsilon; default: 1 / (N ln N) for N images, or people",
    )


def add_private_set(parser: argparse.ArgumentParser) -> None:
    """How a private set is read."""
    words = "classes of --private: names, a file with one name per line, or a folder with one sub-folder per class; "
    words += "default: its sub-folders (which may be empty), its array 'classes', or its ClassLabel"
    parser.add_argument("--classes", metavar="a,b,c|FILE", help=words)
    add_label_column(parser)
    add_show_paths(parser)


def add_label_column(parser: argparse.ArgumentParser) -> None:
    """`--label-column`."""
    words = "column of the labels; none: read no labels; default: the one called label, labels, class, class_name, "
    words += "category or target"
    parser.add_argument("--label-column", metavar="NAME", help=words)


def add_show_paths(parser: argparse.ArgumentParser) -> None:
    """`--show-paths`."""
    parser.add_argument(
        "--show-paths", action="store_true", help="name private files in error messages, which then must not be shared"
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """`--out` of a bundle."""
    parser.add_argument("--out", type=given_path, required=True, metavar="DIR", help="new folder for the bundle")


def add_units(parser: argparse.ArgumentParser) -> None:
    """Who is protected with all their images."""
    unit = parser.add_mutually_exclusive_group()
    words = "the unit is one person with all their images: this array or column of --private says whose image each is"
    unit.add_argument("--unit-column", metavar="NAME", help=words)
    add_unit_folders(unit)


def add_unit_folders(parser: argparse._ActionsContainer) -> None:
    """`--unit-folders`."""
    words = "the unit is one person: the innermost folders are people, class/person/*.png or person/*.png"
    parser.add_argument("--unit-folders", action="store_true", help=words)


def add_ledger_file(parser: argparse.ArgumentParser) -> None:
    """`--ledger`."""
    where = "privacy ledger; default: $RAPID_LEDGER, or ~/.local/share/rapid/ledger.jsonl"
    parser.add_argument("--ledger", type=given_path, metavar="FILE", help=where)


def add_settings(parser: argparse.ArgumentParser, default_preset: str | None, shown: str = "that of --base") -> None:
    """`--preset` and `--set`."""
    words = f"preset of settings; default: {default_preset or shown}"
    parser.add_argument("--preset", default=default_preset, metavar="NAME", help=words)
    add_overrides(parser, "override a setting, such as private.steps=400")


def add_minutes(parser: argparse.ArgumentParser, words: str) -> None:
    """`--minutes`."""
    parser.add_argument("--minutes", type=float, metavar="M", help=words)


def add_overrides(parser: argparse.ArgumentParser, description: str) -> None:
    """`--set`."""
    words = f"{description}; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="overrides", help=words)


def add_training(parser: argparse.ArgumentParser) -> None:
    """`--resume` and `--device`."""
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run in --out")
    add_device(parser)


def check_resume(options: argparse.Namespace) -> None:
    """Refuse `--resume` where `--out` is not there: a run that begins anew may spend the budget of a mistyped name.

    Raises:
        InputError: see above.
    """
    if options.resume and not options.out.exists():
        raise InputError("out", "holds no run to resume; correct the name, or leave out --resume", options.out)


def check_apart(options: argparse.Namespace, *fields: str) -> None:
    """Refuse an `--out` inside of one of the image sets that these arguments give.

    Raises:
        InputError: see above.
    """
    for field in fields:
        given = getattr(options, field)
        for path in given if isinstance(given, list) else [given]:
            if path is not None:
                check_outside(options.out, path, field)


def add_device(parser: argparse.ArgumentParser) -> None:
    """`--device`."""
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help=DEVICE)


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
