"""The arguments of every command. `rapid COMMAND --help` prints them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import rapid
from rapid.cli.arguments import (
    DEVICE,
    add_command,
    add_delta,
    add_device,
    add_json,
    add_label_column,
    add_ledger_file,
    add_minutes,
    add_output,
    add_overrides,
    add_private_set,
    add_settings,
    add_show_paths,
    add_training,
    add_unit_folders,
    add_units,
    given,
    given_path,
)
from rapid.cli.usage import Parser

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def build_parser() -> argparse.ArgumentParser:
    """The parser. It sets `run` to the command's function, "module:function", which is imported only when needed."""
    parser: argparse.ArgumentParser = Parser(prog="rapid", description=rapid.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"rapid {rapid.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        _build_kb, _plan, _train_private, _tune, _generate, _predict, _evaluate, _serve, _token, _info, _ledger, _audit,
        _release, _demo,
    ):  # fmt: skip
        add(subparsers)
    return parser


def _build_kb(subparsers: Subparsers) -> None:
    build = add_command(
        subparsers, "build-kb", "build:build_kb", "train networks on public images, and build a knowledge base"
    )
    build.add_argument(
        "--public",
        type=given_path,
        action="append",
        required=True,
        metavar="PATH",
        help="public images; may be repeated",
    )
    build.add_argument("--method", metavar="NAME", help="method; default: that of --preset")
    reuse = (
        "reuse trained networks: builtin:scripts, a folder made by scripts/export-networks, or a public bundle of the "
    )
    reuse += "same images (parts that --preset or --set change are made again)"
    build.add_argument("--networks", type=given_path, metavar="DIR|builtin:NAME", help=reuse)
    add_label_column(build)
    add_output(build)
    add_settings(
        build,
        default_preset=None,
        shown="auto, which chooses settings from the public images, the machine and --minutes",
    )
    add_minutes(build, "time limit of --preset auto; default: 30")
    add_training(build)


def _plan(subparsers: Subparsers) -> None:
    plan = add_command(subparsers, "plan", "train:plan", "compare what private trainings would cost; spends nothing")
    size = plan.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--size", type=int, metavar="N", help="number of private images, or of people if they are the units"
    )
    size.add_argument("--private", type=given_path, metavar="PATH", help="private images, to be counted")
    add_private_set(plan)
    add_units(plan)
    plan.add_argument("--epsilon", type=float, action="append", metavar="E", help="may be repeated; default: 1 and 10")
    add_delta(plan)
    several = "to compare; may be repeated; default: several with the same number of gradient computations"
    plan.add_argument(
        "--batch", type=int, action="append", default=[], metavar="B", help=f"expected batch size {several}"
    )
    plan.add_argument("--steps", type=int, action="append", default=[], metavar="S", help=f"number of steps {several}")
    plan.add_argument("--method", metavar="NAME", help="method; default: that of --base or --preset")
    plan.add_argument(
        "--base", type=given_path, metavar="DIR", help="public bundle whose network and settings are used"
    )
    add_json(plan)
    add_settings(plan, default_preset=None, shown="that of --base, none with --method, or letters-mnist")


def _train_private(subparsers: Subparsers) -> None:
    private = add_command(subparsers, "train-private", "train:train_private", "fine-tune on private images with DP-SGD")
    _private_run(private)
    add_minutes(
        private,
        "time limit of the private stage, which sets the number of steps; default: 30 with auto, else private.steps",
    )


def _tune(subparsers: Subparsers) -> None:
    words = "choose settings privately: train a random number of candidates, and release only the best model"
    tune = add_command(subparsers, "tune", "tune:tune", words)
    candidates = "YAML file: the name of each candidate and the settings that it changes"
    tune.add_argument("--candidates", type=given_path, required=True, metavar="FILE", help=candidates)
    mean = "mean number of trials; each trains a random candidate; default: 10"
    tune.add_argument("--mean-trials", type=float, default=10.0, metavar="M", help=mean)
    shape = (
        "shape of the distribution of that number; 1: geometric (default); 0: logarithmic, which varies more and costs "
    )
    shape += "less epsilon"
    tune.add_argument("--shape", type=float, default=1.0, metavar="ETA", help=shape)
    images = "number of synthetic images to train the classifier of each trial on; default: 5000"
    tune.add_argument("--score-images", type=int, default=5000, metavar="N", help=images)
    share = "fraction of a trial's epsilon for its score; default: 0.1"
    tune.add_argument("--score-share", type=float, default=0.1, metavar="S", help=share)
    _private_run(tune)


def _private_run(private: argparse.ArgumentParser) -> None:
    private.add_argument("--method", metavar="NAME", help="method; default: that of --base or --preset")
    private.add_argument(
        "--base", type=given_path, metavar="DIR", help="public bundle made by build-kb, if the method has one"
    )
    private.add_argument("--private", type=given_path, required=True, metavar="PATH", help="private images")
    add_private_set(private)
    add_units(private)
    private.add_argument(
        "--epsilon", type=float, required=True, metavar="E", help="privacy budget: 1 or less is strong, 10 is weak"
    )
    add_delta(private)
    add_output(private)
    add_ledger_file(private)
    add_settings(private, default_preset=None)
    add_training(private)


def _generate(subparsers: Subparsers) -> None:
    generate = add_command(subparsers, "generate", "generate:generate", "generate synthetic images")
    generate.add_argument("--model", type=given_path, required=True, metavar="DIR", help="bundle to sample from")
    generate.add_argument("--count", type=int, metavar="N", help="number of images; needed without --class-counts")
    out = "a folder (in the form of Hugging Face's imagefolder), or a file; .png is one picture of up to 2500 images"
    generate.add_argument("--out", type=given_path, required=True, metavar="FOLDER|FILE.npz|.parquet|.png", help=out)
    generate.add_argument(
        "--labels", metavar="0,1,2|all", help="classes to generate in turn, by name or number; default: all"
    )
    counts = "images of each class, instead of --count; a file: .json with an object, or .csv with lines class,count"
    generate.add_argument("--class-counts", metavar="7=500,cat=200|FILE", help=counts)
    generate.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same images")
    soft = "write the probabilities of the classes by the probe with each image, from which classifiers learn more"
    generate.add_argument("--soft-labels", action="store_true", help=soft)
    training = "for images that are only to train classifiers on: varied ones, none refused, with --soft-labels"
    generate.add_argument("--for-training", action="store_true", help=training)
    how = "write how the images were made: candidates, network calls, and the share that the probe accepted"
    generate.add_argument("--report", type=given_path, metavar="FILE.json", help=how)
    add_overrides(generate, "override a generation setting, such as generation.sampler=pndm")
    add_device(generate)


def _predict(subparsers: Subparsers) -> None:
    predict = add_command(
        subparsers, "predict", "predict:predict", "classify images with a classifier, into a CSV file"
    )
    predict.add_argument(
        "--model", type=given_path, required=True, metavar="DIR", help="bundle of a classifier, or with a probe"
    )
    predict.add_argument(
        "--data", type=given_path, required=True, metavar="PATH", help="images; labels are not looked at"
    )
    out = "a row for each image: file name or row, most likely class, probability of each class"
    predict.add_argument("--out", type=given_path, required=True, metavar="predictions.csv", help=out)
    add_device(predict)


def _evaluate(subparsers: Subparsers) -> None:
    words = "measure the utility and fidelity of synthetic images, or the accuracy and calibration of a classifier"
    evaluate = add_command(subparsers, "evaluate", "evaluate:evaluate", words)
    synthetic = "images to evaluate, generated by any method; left out to evaluate a classifier or a probe"
    evaluate.add_argument("--synthetic", type=given_path, metavar="PATH", help=synthetic)
    evaluate.add_argument("--real", type=given_path, required=True, metavar="PATH", help="real test images")
    train_real = "real training images, evaluated in the same way as an upper bound; needs --open-data"
    evaluate.add_argument("--train-real", type=given_path, metavar="PATH", help=train_real)
    add_label_column(evaluate)
    open_data = "confirm that the images of --train-real are open data and need no privacy"
    evaluate.add_argument("--open-data", action="store_true", help=open_data)
    public = "public images, for the feature space and the search for copies; may be repeated"
    evaluate.add_argument("--public", type=given_path, action="append", default=[], metavar="PATH", help=public)
    model = "bundle: search its knowledge base for copies; without --synthetic its classifier or probe"
    evaluate.add_argument("--model", type=given_path, metavar="DIR", help=model)
    features = (
        "network saved by --save-features: measure distances in its features, and how often it agrees with labels"
    )
    evaluate.add_argument("--features", type=given_path, metavar="FILE", help=features)
    save = "train a network on --train-real once, test it on --real, and save it for --features; without --synthetic"
    evaluate.add_argument("--save-features", type=given_path, metavar="FILE.safetensors", help=save)
    weights = "weights of pytorch-fid's Inception network, for FID against --train-real, as DPImageBench measures it"
    evaluate.add_argument("--inception", type=given_path, metavar="FILE", help=weights)
    names = "all (default), none, or some of small,resnet,wideresnet,resnext; with --save-features one, default small"
    evaluate.add_argument("--classifiers", default="all", metavar="NAMES", help=names)
    evaluate.add_argument("--epochs", type=int, default=8, metavar="E", help="for each classifier; default: 8")
    soft = "train the classifiers also on the soft labels of --synthetic (see rapid generate --soft-labels)"
    evaluate.add_argument("--soft-labels", action="store_true", help=soft)
    several = "train N classifiers of each kind, and test their ensembles, too; default: 1"
    evaluate.add_argument("--ensemble", type=int, default=1, metavar="N", help=several)
    out = "the report, needed for images; an HTML page and a picture are written next to it; none may exist yet"
    evaluate.add_argument("--out", type=given_path, metavar="FILE.json", help=out)
    add_device(evaluate)


def _serve(subparsers: Subparsers) -> None:
    # no defaults here: the environment and the settings file decide about flags that are not given
    serve = add_command(
        subparsers, "serve", "serve:serve", "serve bundles over HTTP: POST /generate, and a web page at /"
    )
    serve.add_argument("--model", action="append", metavar="[NAME=]DIR", help="bundle to serve; may be repeated")
    where = "YAML file with these and further settings (see docs/serving.md); default: $RAPID_SERVE_SETTINGS"
    serve.add_argument("--settings", type=given_path, metavar="FILE", help=where)
    serve.add_argument(
        "--host",
        help="address to listen on; default: 127.0.0.1; other machines need tokens (see rapid token) or --open",
    )
    serve.add_argument("--port", type=int, help="default: 8000; 0 picks a free port")
    serve.add_argument("--device", metavar="auto|cpu|cuda", help=DEVICE)
    serve.add_argument(
        "--open",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="accept requests of all machines, without tokens",
    )
    for name, value, words in (
        ("--max-count", "10000", "images per request"),
        ("--max-queued", "50000", "images waiting or in progress"),
        ("--max-client", "20000", "images per client at a time"),
    ):
        serve.add_argument(name, type=int, metavar="N", help=f"most {words}; default: {value}")
    origin = "allow web pages of this origin, such as https://example.org, to call the API; may be repeated"
    serve.add_argument("--cors-origin", action="append", metavar="ORIGIN", dest="cors_origins", help=origin)
    host = (
        "allow requests that name this host, such as that of a proxy on this machine, without tokens; may be repeated"
    )
    serve.add_argument("--allowed-host", action="append", metavar="NAME", dest="allowed_hosts", help=host)
    serve.add_argument("--log-format", choices=["text", "json"], help="default: text")
    serve.add_argument("--batch", type=int, metavar="N", help="images per denoising step; default: measured at start")


def _token(subparsers: Subparsers) -> None:
    token = add_command(subparsers, "token", "serve:token", "create an access token for a client of rapid serve")
    token.add_argument("name", metavar="NAME", help="the client's name in the logs")


def _info(subparsers: Subparsers) -> None:
    info = add_command(subparsers, "info", "info:info", "show the contents of a bundle")
    info.add_argument("path", type=given_path, metavar="DIR", help="bundle")
    info.add_argument(
        "--verify",
        action="store_true",
        help="first check all components against their hashes, a large knowledge base too",
    )


def _ledger(subparsers: Subparsers) -> None:
    description = "show and limit the privacy spent on each private data set"
    parser = subparsers.add_parser("ledger", help=description, description=description, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = add_command(actions, "show", "ledger:show", "show the privacy spent on each data set")
    show.add_argument(
        "dataset", nargs="?", type=given, metavar="DATASET", help="account or path of the images; default: all"
    )
    add_json(show)
    limit = add_command(actions, "limit", "ledger:limit", "limit the privacy that may be spent on a data set")
    limit.add_argument(
        "dataset", type=given, metavar="DATASET", help="path of the images, or an account of rapid ledger show"
    )
    limit.add_argument(
        "--epsilon", type=float, required=True, metavar="E", help="the most that all runs together may spend"
    )
    limit.add_argument("--delta", type=float, required=True, metavar="D", help="at which epsilon is computed")
    verify = add_command(actions, "verify", "ledger:verify", "check that no line of the ledger was altered")
    for action in (show, limit):
        add_show_paths(action)
        add_unit_folders(action)
    for action in (show, limit, verify):
        add_ledger_file(action)


def _audit(subparsers: Subparsers) -> None:
    words = (
        "test noise, sensitivity and sampling of each step, and find a lower bound on epsilon by training on canaries"
    )
    audit = add_command(subparsers, "audit", "audit:audit", words)
    audit.add_argument("--epsilon", type=float, required=True, metavar="E", help="epsilon of the claim to test")
    audit.add_argument("--delta", type=float, default=1e-5, metavar="D", help="delta of the claim; default: 1e-5")
    audit.add_argument(
        "--canaries", type=int, metavar="M", help="number of canaries; default: 1000; with --end-to-end: 200"
    )
    audit.add_argument("--steps", type=int, default=50, metavar="S", help="steps of each training; default: 50")
    audit.add_argument(
        "--sample-rate",
        type=float,
        metavar="Q",
        help="probability with which a step uses an image; default: 0.25; with --end-to-end: 0.1",
    )
    audit.add_argument(
        "--confidence", type=float, default=0.95, metavar="P", help="confidence level of all bounds; default: 0.95"
    )
    audit.add_argument("--base", type=given_path, metavar="DIR", help="public bundle whose networks are trained")
    whole = "run the whole private stage, as train-private does, on canary images instead"
    audit.add_argument("--end-to-end", action="store_true", help=whole)
    audit.add_argument("--method", metavar="NAME", help="with --end-to-end: one that needs no --base")
    canaries = "with --end-to-end: public images, not in --base, to use as canaries; default: random pixels"
    audit.add_argument("--images", type=given_path, metavar="PATH", help=canaries)
    strict = "exit with 1 if there are too few canaries to refute the claim"
    audit.add_argument("--require-conclusive", action="store_true", help=strict)
    audit.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help=f"with --end-to-end: {DEVICE}")
    add_json(audit)
    add_settings(audit, default_preset=None, shown="demo, or that of --base")


def _release(subparsers: Subparsers) -> None:
    words = "decide by a policy whether a private bundle may be released, and write a signed report; or verify one"
    release = add_command(subparsers, "release", "release:release", words)
    release.add_argument("--model", type=given_path, metavar="DIR", help="private bundle")
    release.add_argument(
        "--policy",
        type=given_path,
        metavar="FILE.yaml",
        help="policy that the model must meet; see examples/policy.yaml",
    )
    release.add_argument("--out", type=given_path, metavar="DIR", help="new folder for the report")
    private = "its training images, for their ledger account and the noisy count of near-copies"
    release.add_argument("--private", type=given_path, metavar="PATH", help=private)
    add_private_set(release)
    add_units(release)
    add_ledger_file(release)
    synthetic = release.add_mutually_exclusive_group()
    given = "synthetic images of the model; default: new ones are drawn"
    synthetic.add_argument("--synthetic", type=given_path, metavar="PATH", help=given)
    drawn = "number of images to draw; default: copies.min_synthetic of the policy"
    synthetic.add_argument("--count", type=int, metavar="N", help=drawn)
    release.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the drawn images; default: 0")
    members = "canaries that were in the training set; the report is not private for them"
    release.add_argument("--members", type=given_path, metavar="PATH", help=members)
    others = "canaries from the same source that were not, chosen at random"
    release.add_argument("--non-members", type=given_path, metavar="PATH", help=others)
    public = "images like the private ones, but not private, which set the distance of near-copies; may be repeated; "
    public += "default: --non-members"
    release.add_argument("--public", type=given_path, action="append", default=[], metavar="PATH", help=public)
    audit = "output of an earlier rapid audit --json; default: an audit is run, which takes some minutes"
    release.add_argument("--audit", type=given_path, metavar="FILE.json", help=audit)
    epsilon = "epsilon of the count of near-copies; default, and at most: copies.epsilon of the policy"
    release.add_argument("--epsilon", type=float, metavar="E", help=epsilon)
    release.add_argument("--key", type=given_path, metavar="FILE.pem", help="private key that signs the report")
    verify = "check a signed report with --public-key; with --model and --policy also that it belongs to them"
    check = release.add_argument_group("to verify a report")
    check.add_argument("--verify", type=given_path, metavar="DIR", help=verify)
    check.add_argument("--public-key", type=given_path, metavar="FILE.pub", help="public key of the report's signer")
    new = "make a key pair: FILE.pem, and the public key FILE.pub"
    release.add_argument_group("to make a key").add_argument("--new-key", type=given_path, metavar="FILE.pem", help=new)
    add_training(release)


def _demo(subparsers: Subparsers) -> None:
    words = "build, train, generate: all stages on small real images that ship with rapid"
    demo = add_command(subparsers, "demo", "demo:demo", words)
    demo.add_argument("--out", type=given_path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")
    add_device(demo)
