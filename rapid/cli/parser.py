"""The arguments of every command. `rapid COMMAND --help` prints them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import rapid

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def build_parser() -> argparse.ArgumentParser:
    """The parser. It sets `run` to the command's function, "module:function", which is imported only when needed."""
    parser = argparse.ArgumentParser(prog="rapid", description=rapid.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"rapid {rapid.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        _build_kb, _plan, _train_private, _tune, _generate, _predict, _evaluate, _serve, _token, _info, _ledger, _audit,
        _release, _demo,
    ):  # fmt: skip
        add(subparsers)
    return parser


def _build_kb(subparsers: Subparsers) -> None:
    build = _command(subparsers, "build-kb", "build:build_kb", "train on public images and build the knowledge base")
    build.add_argument(
        "--public", type=Path, action="append", required=True, metavar="PATH", help="public images; may be repeated"
    )
    build.add_argument("--method", metavar="NAME", help="method; default: that of --preset")
    reuse = "trained networks to build on, without training: builtin:scripts, or exported ones; or a public bundle of "
    reuse += "the same images: its settings, and every part that --preset and --set do not change"
    build.add_argument("--networks", type=Path, metavar="DIR|builtin:NAME", help=reuse)
    _label_column(build)
    _output(build)
    _settings(build, default_preset=None, shown="auto: chosen by the images, the machine and --minutes")
    _minutes(build, "time that --preset auto may take; default: 30")
    _training(build)


def _plan(subparsers: Subparsers) -> None:
    plan = _command(subparsers, "plan", "train:plan", "compare the privacy cost of private trainings; spends nothing")
    size = plan.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--size", type=int, metavar="N", help="number of private images, or of people if they are the units"
    )
    size.add_argument("--private", type=Path, metavar="PATH", help="private images, to be counted")
    _private_set(plan)
    _units(plan)
    plan.add_argument("--epsilon", type=float, action="append", metavar="E", help="may be repeated; default: 1 and 10")
    _delta(plan)
    several = "may be repeated; default: values that keep the number of gradient computations"
    plan.add_argument("--batch", type=int, action="append", default=[], metavar="B", help=f"expected batch; {several}")
    plan.add_argument("--steps", type=int, action="append", default=[], metavar="S", help=several)
    plan.add_argument("--base", type=Path, metavar="DIR", help="public bundle: use its network and settings")
    _json(plan)
    _settings(plan, default_preset=None, shown="that of --base, or letters-mnist")


def _train_private(subparsers: Subparsers) -> None:
    private = _command(subparsers, "train-private", "train:train_private", "fine-tune on private images with DP-SGD")
    _private_run(private)
    _minutes(private, "of the private stage, which decide the number of steps; default: 30 by auto, else private.steps")


def _tune(subparsers: Subparsers) -> None:
    words = "choose settings privately: train a random number of candidates, and release only the best model"
    tune = _command(subparsers, "tune", "tune:tune", words)
    candidates = "YAML: for each candidate its name and the settings that it changes"
    tune.add_argument("--candidates", type=Path, required=True, metavar="FILE", help=candidates)
    mean = "mean number of trials, each of a random candidate; default: 10"
    tune.add_argument("--mean-trials", type=float, default=10.0, metavar="M", help=mean)
    shape = "of the distribution of that number: 1 geometric (default), 0 logarithmic, which varies more and costs less"
    tune.add_argument("--shape", type=float, default=1.0, metavar="ETA", help=shape)
    images = "synthetic images on which each trial's classifier is trained; default: 5000"
    tune.add_argument("--score-images", type=int, default=5000, metavar="N", help=images)
    share = "of a trial's epsilon that its score would spend by itself; default: 0.1"
    tune.add_argument("--score-share", type=float, default=0.1, metavar="S", help=share)
    _private_run(tune)


def _private_run(private: argparse.ArgumentParser) -> None:
    private.add_argument("--method", metavar="NAME", help="method; default: that of --base or --preset")
    private.add_argument(
        "--base", type=Path, metavar="DIR", help="public bundle made by build-kb, if the method has one"
    )
    private.add_argument("--private", type=Path, required=True, metavar="PATH", help="private images")
    _private_set(private)
    _units(private)
    private.add_argument("--epsilon", type=float, required=True, metavar="E", help="privacy budget, such as 1 or 10")
    _delta(private)
    _output(private)
    _ledger_file(private)
    _settings(private, default_preset=None)
    _training(private)


def _generate(subparsers: Subparsers) -> None:
    generate = _command(subparsers, "generate", "generate:generate", "generate synthetic images")
    generate.add_argument("--model", type=Path, required=True, metavar="DIR", help="bundle to sample from")
    generate.add_argument("--count", type=int, metavar="N", help="number of images")
    out = "a folder (in the form of Hugging Face's imagefolder), or a file; .png is one picture of up to 2500 images"
    generate.add_argument("--out", type=Path, required=True, metavar="FOLDER|FILE.npz|.parquet|.png", help=out)
    generate.add_argument("--labels", metavar="0,1,2|all", help="classes to cycle through, by name or number")
    counts = "images of each class, instead of --count; a file: .json with an object, or .csv with lines class,count"
    generate.add_argument("--class-counts", metavar="7=500,cat=200|FILE", help=counts)
    generate.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same images")
    how = "write how the images were made: candidates, network calls, and the share that the probe accepted"
    generate.add_argument("--report", type=Path, metavar="FILE.json", help=how)
    _overrides(generate, "override a generation setting, such as generation.sampler=pndm")
    _device(generate)


def _predict(subparsers: Subparsers) -> None:
    predict = _command(subparsers, "predict", "predict:predict", "classify images with a classifier, into a CSV file")
    predict.add_argument("--model", type=Path, required=True, metavar="DIR", help="bundle of a classifier")
    predict.add_argument("--data", type=Path, required=True, metavar="PATH", help="images; labels are not looked at")
    out = "a row for each image: file name or row, most likely class, probability of each class"
    predict.add_argument("--out", type=Path, required=True, metavar="predictions.csv", help=out)
    _device(predict)


def _evaluate(subparsers: Subparsers) -> None:
    words = "measure the utility and fidelity of synthetic images, or the accuracy and calibration of a classifier"
    evaluate = _command(subparsers, "evaluate", "evaluate:evaluate", words)
    synthetic = "images to evaluate, generated by any method; left out if --model is a classifier"
    evaluate.add_argument("--synthetic", type=Path, metavar="PATH", help=synthetic)
    evaluate.add_argument("--real", type=Path, required=True, metavar="PATH", help="real test images")
    train_real = "real training images: what a perfect generator would achieve"
    evaluate.add_argument("--train-real", type=Path, metavar="PATH", help=train_real)
    _label_column(evaluate)
    open_data = "confirm that the images of --train-real are open data and need no privacy"
    evaluate.add_argument("--open-data", action="store_true", help=open_data)
    public = "public images, for the feature space and the search for copies; may be repeated"
    evaluate.add_argument("--public", type=Path, action="append", default=[], metavar="PATH", help=public)
    model = "bundle: search its knowledge base for copies; or a classifier, which is evaluated itself"
    evaluate.add_argument("--model", type=Path, metavar="DIR", help=model)
    features = "file of --save-features: measure in its features, and whether its network takes images for their label"
    evaluate.add_argument("--features", type=Path, metavar="FILE", help=features)
    save = "train a network on --train-real once, test it on --real, and save it for --features; without --synthetic"
    evaluate.add_argument("--save-features", type=Path, metavar="FILE.safetensors", help=save)
    weights = "weights of pytorch-fid's Inception network, for FID against --train-real, as DPImageBench measures it"
    evaluate.add_argument("--inception", type=Path, metavar="FILE", help=weights)
    names = "all (default), none, or some of small,resnet,wideresnet,resnext; with --save-features one, default small"
    evaluate.add_argument("--classifiers", default="all", metavar="NAMES", help=names)
    evaluate.add_argument("--epochs", type=int, default=8, metavar="E", help="for each classifier; default: 8")
    several = "train N classifiers of each kind, and test their ensembles, too; default: 1"
    evaluate.add_argument("--ensemble", type=int, default=1, metavar="N", help=several)
    out = "the report; an HTML page and a picture are written next to it"
    evaluate.add_argument("--out", type=Path, metavar="report.json", help=out)
    _device(evaluate)


def _serve(subparsers: Subparsers) -> None:
    # no defaults here: the environment and the settings file decide about flags that are not given
    serve = _command(subparsers, "serve", "serve:serve", "serve bundles over HTTP: POST /generate, and a web page at /")
    serve.add_argument("--model", action="append", metavar="[NAME=]DIR", help="bundle to serve; may be repeated")
    where = "YAML file with these settings and those of rapid_server/settings.py; default: $RAPID_SERVE_SETTINGS"
    serve.add_argument("--settings", type=Path, metavar="FILE", help=where)
    serve.add_argument("--host", help="default: 127.0.0.1; any other needs tokens (see rapid token) or --open")
    serve.add_argument("--port", type=int, help="default: 8000; 0 picks a free port")
    serve.add_argument("--device", metavar="auto|cpu|cuda")
    serve.add_argument(
        "--open", action=argparse.BooleanOptionalAction, default=None, help="serve all clients, without tokens"
    )
    for name, value, words in (
        ("--max-count", "10000", "images per request"),
        ("--max-queued", "50000", "images waiting or in progress"),
        ("--max-client", "20000", "images per client at a time"),
    ):
        serve.add_argument(name, type=int, metavar="N", help=f"most {words}; default: {value}")
    origin = "allow web pages of this origin, such as https://example.org, to call the API; may be repeated"
    serve.add_argument("--cors-origin", action="append", metavar="ORIGIN", dest="cors_origins", help=origin)
    serve.add_argument("--log-format", choices=["text", "json"], help="default: text")
    serve.add_argument("--batch", type=int, metavar="N", help="images per denoising step; default: measured at start")


def _token(subparsers: Subparsers) -> None:
    token = _command(subparsers, "token", "serve:token", "create an access token for a client of rapid serve")
    token.add_argument("name", metavar="NAME", help="the client's name in the logs")


def _info(subparsers: Subparsers) -> None:
    info = _command(subparsers, "info", "info:info", "show the contents of a bundle")
    info.add_argument("path", type=Path, metavar="DIR")
    info.add_argument(
        "--verify", action="store_true", help="read all of a knowledge base first, and check that nothing was altered"
    )


def _ledger(subparsers: Subparsers) -> None:
    description = "show and limit the privacy spent on each private data set"
    parser = subparsers.add_parser("ledger", help=description, description=description, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = _command(actions, "show", "ledger:show", "show the privacy spent on each data set")
    show.add_argument("dataset", nargs="?", metavar="DATASET", help="account or path of the images; default: all")
    _json(show)
    limit = _command(actions, "limit", "ledger:limit", "limit the privacy that may be spent on a data set")
    limit.add_argument("dataset", metavar="DATASET", help="path of the images, or an account of rapid ledger show")
    limit.add_argument("--epsilon", type=float, required=True, metavar="E")
    limit.add_argument("--delta", type=float, required=True, metavar="D")
    verify = _command(actions, "verify", "ledger:verify", "check that no line of the ledger was altered")
    for action in (show, limit):
        _show_paths(action)
        _unit_folders(action)
    for action in (show, limit, verify):
        _ledger_file(action)


def _audit(subparsers: Subparsers) -> None:
    words = "test noise, sensitivity and sampling of each step, and bound epsilon from below by training on canaries"
    audit = _command(subparsers, "audit", "audit:audit", words)
    audit.add_argument("--epsilon", type=float, required=True, metavar="E", help="the claim to test")
    audit.add_argument("--delta", type=float, default=1e-5, metavar="D", help="of the claim; default: 1e-5")
    audit.add_argument("--canaries", type=int, metavar="M", help="default: 1000; with --end-to-end: 200")
    audit.add_argument("--steps", type=int, default=50, metavar="S", help="of each training; default: 50")
    audit.add_argument("--sample-rate", type=float, metavar="Q", help="default: 0.25; with --end-to-end: 0.1")
    audit.add_argument("--confidence", type=float, default=0.95, metavar="P", help="of all bounds; default: 0.95")
    audit.add_argument("--base", type=Path, metavar="DIR", help="public bundle: audit the training of its networks")
    whole = "run the whole private stage, as train-private does, on canary images instead"
    audit.add_argument("--end-to-end", action="store_true", help=whole)
    audit.add_argument("--method", metavar="NAME", help="with --end-to-end: one that needs no --base")
    canaries = "with --end-to-end: public images that are the canaries, none of which are in --base; default: noise"
    audit.add_argument("--images", type=Path, metavar="PATH", help=canaries)
    strict = "exit with 1 if so few canaries could not refute the claim"
    audit.add_argument("--require-conclusive", action="store_true", help=strict)
    audit.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="with --end-to-end; default: auto")
    _json(audit)
    _settings(audit, default_preset=None, shown="demo, or that of --base")


def _release(subparsers: Subparsers) -> None:
    words = "decide by a policy whether a private bundle may be released, and write a signed report; or verify one"
    release = _command(subparsers, "release", "release:release", words)
    release.add_argument("--model", type=Path, metavar="DIR", help="private bundle")
    release.add_argument("--policy", type=Path, metavar="FILE.yaml", help="what it must fulfil")
    release.add_argument("--out", type=Path, metavar="DIR", help="new folder for the report")
    private = "the images that it was trained on: for their ledger account, and for the noisy count of near-copies"
    release.add_argument("--private", type=Path, metavar="PATH", help=private)
    _private_set(release)
    _units(release)
    _ledger_file(release)
    synthetic = release.add_mutually_exclusive_group()
    given = "synthetic images of the model; default: they are drawn"
    synthetic.add_argument("--synthetic", type=Path, metavar="PATH", help=given)
    drawn = "images to draw; default: copies.min_synthetic of the policy"
    synthetic.add_argument("--count", type=int, metavar="N", help=drawn)
    release.add_argument("--seed", type=int, default=0, metavar="S", help="of the drawn images; default: 0")
    members = "canaries that were among the private images; they are the tester's own, and have no protection here"
    release.add_argument("--members", type=Path, metavar="PATH", help=members)
    others = "canaries that were not, chosen at random from the same images"
    release.add_argument("--non-members", type=Path, metavar="PATH", help=others)
    public = "images like the private ones, but not private, which set the distance of near-copies; may be repeated; "
    public += "default: those of --non-members"
    release.add_argument("--public", type=Path, action="append", default=[], metavar="PATH", help=public)
    audit = "output of an earlier rapid audit --json; default: an audit is run, which takes some minutes"
    release.add_argument("--audit", type=Path, metavar="FILE.json", help=audit)
    epsilon = "of the count of near-copies; default and largest: copies.epsilon of the policy"
    release.add_argument("--epsilon", type=float, metavar="E", help=epsilon)
    release.add_argument("--key", type=Path, metavar="FILE.pem", help="private key that signs the report")
    verify = "check a report with --public-key; with --model and --policy, that it is about these"
    release.add_argument("--verify", type=Path, metavar="DIR", help=verify)
    release.add_argument("--public-key", type=Path, metavar="FILE.pub", help="public key of the report's signer")
    new = "make a key: FILE.pem, and the public key FILE.pub"
    release.add_argument("--new-key", type=Path, metavar="FILE.pem", help=new)
    _training(release)


def _demo(subparsers: Subparsers) -> None:
    words = "build, train, generate: all stages on small real images that ship with rapid"
    demo = _command(subparsers, "demo", "demo:demo", words)
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    _device(demo)


def _command(subparsers: Subparsers, name: str, run: str, description: str) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=description, description=description, allow_abbrev=False)
    parser.set_defaults(run=f"rapid.cli.{run}")
    return parser


def _delta(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--delta", type=float, metavar="D", help="default: 1 / (N ln N) for N images, or people if they are the units"
    )


def _private_set(parser: argparse.ArgumentParser) -> None:
    words = "classes of --private: names, a file with one name per line, or a folder with one sub-folder per class; "
    words += "default: its sub-folders (which may be empty), its array 'classes', or its ClassLabel"
    parser.add_argument("--classes", metavar="a,b,c|FILE", help=words)
    _label_column(parser)
    _show_paths(parser)


def _label_column(parser: argparse.ArgumentParser) -> None:
    words = "column of the labels, in formats with columns; none: no labels; default: that called label, class, ..."
    parser.add_argument("--label-column", metavar="NAME", help=words)


def _show_paths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--show-paths", action="store_true", help="name private files in error messages")


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder for the bundle")


def _units(parser: argparse.ArgumentParser) -> None:
    unit = parser.add_mutually_exclusive_group()
    words = "the unit is one person with all their images: this array or column of --private says whose image each is"
    unit.add_argument("--unit-column", metavar="NAME", help=words)
    _unit_folders(unit)


def _unit_folders(parser: argparse._ActionsContainer) -> None:
    words = "the unit is one person: the innermost folders are people, class/person/*.png or person/*.png"
    parser.add_argument("--unit-folders", action="store_true", help=words)


def _ledger_file(parser: argparse.ArgumentParser) -> None:
    where = "privacy ledger; default: $RAPID_LEDGER, or ~/.local/share/rapid/ledger.jsonl"
    parser.add_argument("--ledger", type=Path, metavar="FILE", help=where)


def _settings(parser: argparse.ArgumentParser, default_preset: str | None, shown: str = "that of --base") -> None:
    parser.add_argument("--preset", default=default_preset, metavar="NAME", help=f"default: {default_preset or shown}")
    _overrides(parser, "override a setting, such as private.steps=400")


def _minutes(parser: argparse.ArgumentParser, words: str) -> None:
    parser.add_argument("--minutes", type=float, metavar="M", help=words)


def _overrides(parser: argparse.ArgumentParser, description: str) -> None:
    words = f"{description}; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="overrides", help=words)


def _training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run in --out")
    _device(parser)


def _device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="default: auto")


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
