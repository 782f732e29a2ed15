"""The command line: parse, call, print. `rapid COMMAND --help` tells the arguments of each command."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import rapid
from rapid.cli import commands
from rapid.errors import InputError, RapidError

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0 done, 1 failure, 2 bad input or usage, 3 refused for privacy."""
    options = _parser().parse_args(arguments)
    warnings.showwarning = _show_warning
    # read when torch is loaded: threads that wait give way soon (libgomp spins 60 times as long), which costs large
    # batches next to nothing on a free machine, and makes one with another busy process two to ten times faster; a
    # server has its machine for itself, and its small batches would take three times as long
    if "OMP_WAIT_POLICY" not in os.environ and options.command != "serve":
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    from rapid.runtime import Interruption, keep_freed_memory

    keep_freed_memory()
    interruption = Interruption()
    try:
        if options.command != "train-private" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError(f"rapid {options.command} runs as a single process; start train-private alone by torchrun")
        options.run(options)
    except (Exception, KeyboardInterrupt) as error:
        if not interruption.happened and not isinstance(error, KeyboardInterrupt):
            return _failure(error)
        trains = "resume" in options
        print(f"{_name()}: stopped" + ("; go on with --resume" if trains else ""), file=sys.stderr)
        return INTERRUPTED
    return 0


def _failure(error: Exception) -> int:
    """Say what went wrong where it is known, and return the exit code; raises what is our own fault."""
    if isinstance(error, RapidError):
        if not error.reported:
            print(f"{_name()}: {error}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        # the reader of our output has gone: nothing more to say, and nothing to say it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, OSError):
        print(f"{_name()}: {error}", file=sys.stderr)
        return 1
    raise error


def _name() -> str:
    """How this process calls itself in messages."""
    from rapid.runtime import process_rank

    rank = process_rank()
    return f"rapid (rank {rank})" if rank else "rapid"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rapid", description=rapid.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"rapid {rapid.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    build = _command(subparsers, "build-kb", commands.build_kb, "train on public images and build the knowledge base")
    build.add_argument("--public", type=Path, action="append", required=True, metavar="PATH", help="may be repeated")
    words = "public bundle of the same images: take over what the settings leave as it is there"
    build.add_argument("--networks", type=Path, metavar="DIR", help=words)
    _output(build)
    _settings(build, default_preset="letters-mnist")
    _training(build)

    _plan(subparsers)

    private = _command(subparsers, "train-private", commands.train_private, "fine-tune on private images with DP-SGD")
    private.add_argument("--base", type=Path, required=True, metavar="DIR", help="public bundle, from build-kb")
    private.add_argument("--private", type=Path, required=True, metavar="PATH", help="private images")
    private.add_argument("--epsilon", type=float, required=True, metavar="E", help="privacy budget, such as 1 or 10")
    private.add_argument("--delta", type=float, metavar="D", help="default: 1 / (N ln N) for N images")
    _output(private)
    _ledger_file(private)
    _settings(private, default_preset=None)
    _training(private)

    generate = _command(subparsers, "generate", commands.generate, "make synthetic images")
    generate.add_argument("--model", type=Path, required=True, metavar="DIR", help="bundle to sample from")
    generate.add_argument("--count", type=int, required=True, metavar="N")
    generate.add_argument("--out", type=Path, required=True, metavar="FILE.npz|FOLDER")
    generate.add_argument("--labels", metavar="0,1,2|all", help="classes to take in turn, by name or number")
    generate.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same images")
    _overrides(generate, "generation settings, such as generation.sampler=pndm")
    _device(generate)

    _evaluate(subparsers)

    _serve(subparsers)

    info = _command(subparsers, "info", commands.info, "show what is in a bundle")
    info.add_argument("path", type=Path, metavar="DIR")

    _ledger(subparsers)
    _audit(subparsers)

    demo = _command(subparsers, "demo", commands.demo, "the whole road on small real images that ship with rapid")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR")
    _device(demo)
    return parser


def _plan(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = _command(subparsers, "plan", commands.plan, "compare what private trainings would cost; nothing is spent")
    size = plan.add_mutually_exclusive_group(required=True)
    size.add_argument("--size", type=int, metavar="N", help="number of private images")
    size.add_argument("--private", type=Path, metavar="PATH", help="private images, to be counted")
    plan.add_argument("--epsilon", type=float, action="append", metavar="E", help="may be repeated; default: 1 and 10")
    plan.add_argument("--delta", type=float, metavar="D", help="default: 1 / (N ln N) for N images")
    several = "may be repeated; default: what keeps the number of gradients equal"
    plan.add_argument("--batch", type=int, action="append", default=[], metavar="B", help=several)
    plan.add_argument("--steps", type=int, action="append", default=[], metavar="S", help=several)
    plan.add_argument("--base", type=Path, metavar="DIR", help="public bundle: its network and settings")
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")
    _settings(plan, default_preset=None, shown="that of --base, or letters-mnist")


def _evaluate(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    evaluate = _command(subparsers, "evaluate", commands.evaluate, "measure what synthetic images are good for")
    evaluate.add_argument(
        "--synthetic", type=Path, required=True, metavar="PATH", help="images to probe, of any method"
    )
    evaluate.add_argument("--real", type=Path, required=True, metavar="PATH", help="real test images")
    evaluate.add_argument(
        "--train-real", type=Path, metavar="PATH", help="real training images, for what perfection would give"
    )
    evaluate.add_argument(
        "--open-data", action="store_true", help="the images of --train-real are open: no privacy is owed to them"
    )
    public = "for the feature space and the search for copies; may be repeated"
    evaluate.add_argument("--public", type=Path, action="append", default=[], metavar="PATH", help=public)
    evaluate.add_argument("--model", type=Path, metavar="DIR", help="bundle: search its knowledge base for copies")
    weights = "weights of torch-fidelity's Inception network, for the real FID"
    evaluate.add_argument("--inception", type=Path, metavar="FILE", help=weights)
    evaluate.add_argument(
        "--classifiers",
        default="all",
        metavar="NAMES",
        help="all (default), none, or some of small,resnet,wideresnet,resnext",
    )
    evaluate.add_argument("--epochs", type=int, default=8, metavar="E", help="for each classifier; default: 8")
    evaluate.add_argument(
        "--out", type=Path, required=True, metavar="report.json", help="report.html and a picture are written beside it"
    )
    _device(evaluate)


def _serve(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    # no defaults here: a flag that is not given leaves the setting to the environment and the settings file
    serve = _command(subparsers, "serve", commands.serve, "answer POST /generate over HTTP, with a page at /")
    serve.add_argument("--model", action="append", metavar="[NAME=]DIR", help="bundle to serve; may be repeated")
    where = "YAML with any of these settings and those in server/settings.py; also $RAPID_SERVE_SETTINGS"
    serve.add_argument("--settings", type=Path, metavar="FILE", help=where)
    serve.add_argument("--host", help="default: 127.0.0.1; others need tokens (see rapid token) or --open")
    serve.add_argument("--port", type=int, help="default: 8000; 0: any free one")
    serve.add_argument("--device", metavar="auto|cpu|cuda")
    serve.add_argument(
        "--open", action=argparse.BooleanOptionalAction, default=None, help="answer anyone who reaches --host"
    )
    for name, value, words in (
        ("--max-count", "10000", "images in one request"),
        ("--max-queued", "50000", "images that wait or are being made"),
        ("--max-client", "20000", "images of one client at once"),
    ):
        serve.add_argument(name, type=int, metavar="N", help=f"most {words}; default: {value}")
    pages = "pages of this origin may ask, such as https://example.org; may be repeated"
    serve.add_argument("--cors-origin", action="append", metavar="ORIGIN", dest="cors_origins", help=pages)
    serve.add_argument("--log-format", choices=["text", "json"], help="default: text")
    serve.add_argument("--batch", type=int, metavar="N", help="rows of a denoising step; default: measured")

    token = _command(subparsers, "token", commands.token, "make a token for a client of rapid serve")
    token.add_argument("name", metavar="NAME", help="what the client is called in the logs")


def _ledger(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    description = "what was spent on which private data set, and what may be"
    parser = subparsers.add_parser("ledger", help=description, description=description, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = _command(actions, "show", commands.ledger_show, "show what each data set has cost")
    show.add_argument("dataset", nargs="?", metavar="DATASET", help="account or path of the images; default: all")
    show.add_argument("--json", action="store_true", help="print JSON instead of a table")
    limit = _command(actions, "limit", commands.ledger_limit, "set what a data set may cost in all")
    limit.add_argument("dataset", metavar="DATASET", help="path of the images, or an account of rapid ledger show")
    limit.add_argument("--epsilon", type=float, required=True, metavar="E")
    limit.add_argument("--delta", type=float, required=True, metavar="D")
    verify = _command(actions, "verify", commands.ledger_verify, "check that no line was altered")
    for action in (show, limit, verify):
        _ledger_file(action)


def _audit(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    audit = _command(subparsers, "audit", commands.audit, "bound epsilon from below by a training on canaries")
    audit.add_argument("--epsilon", type=float, required=True, metavar="E", help="what the training is made for")
    audit.add_argument("--delta", type=float, default=1e-5, metavar="D")
    audit.add_argument("--canaries", type=int, default=1000, metavar="M")
    audit.add_argument("--steps", type=int, default=50, metavar="S")
    audit.add_argument("--sample-rate", type=float, default=0.25, metavar="Q")
    audit.add_argument("--confidence", type=float, default=0.95, metavar="P")
    audit.add_argument("--json", action="store_true", help="print JSON")
    _settings(audit, default_preset="demo")


def _ledger_file(parser: argparse.ArgumentParser) -> None:
    where = "what was spent on private sets; default: $RAPID_LEDGER, or ~/.local/share/rapid/ledger.jsonl"
    parser.add_argument("--ledger", type=Path, metavar="FILE", help=where)


def _command(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], name: str, run: commands.Command, description: str
) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=description, description=description, allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder for the bundle")


def _settings(parser: argparse.ArgumentParser, default_preset: str | None, shown: str = "that of --base") -> None:
    shown = default_preset or shown
    parser.add_argument("--preset", default=default_preset, metavar="NAME", help=f"default: {shown}")
    _overrides(parser, "override a setting, such as private.steps=400")


def _overrides(parser: argparse.ArgumentParser, description: str) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="overrides", help=description)


def _training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="go on with what --out holds")
    _device(parser)


def _device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda")


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    # those of libraries are for developers; our own are UserWarnings
    if category is UserWarning:
        print(f"rapid: warning: {message}", file=sys.stderr)
