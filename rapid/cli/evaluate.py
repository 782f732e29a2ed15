"""`rapid evaluate`."""

from __future__ import annotations

import argparse
from shlex import quote

from rapid.cli.arguments import check_apart
from rapid.errors import InputError
from rapid.evaluate import Request, check_target, write_report
from rapid.evaluate import evaluate as run
from rapid.evaluate.classification import evaluate_classifier, picture_beside, write_classification
from rapid.evaluate.networks import CLASSIFIERS
from rapid.evaluate.reference import TRAINED_ON_REAL, train_reference
from rapid.evaluate.report import beside
from rapid.files import content_hash
from rapid.mapped import scratch_in
from rapid.methods import open_classifier, open_generator
from rapid.runtime import choose_device


def evaluate(options: argparse.Namespace) -> None:
    """`rapid evaluate`."""
    if options.save_features is not None:
        work, out = _save_features, options.save_features
    elif options.out is None:
        raise InputError("out", "say where to write the report: a name that ends in .json")
    else:
        work, out = _evaluate_classifier if options.synthetic is None else _evaluate_images, options.out
        check_apart(options, "synthetic", "real", "train_real", "public")
    with scratch_in(out):
        work(options)


def _evaluate_images(options: argparse.Namespace) -> None:
    check_target(options.out)
    names = tuple(name.strip() for name in options.classifiers.split(","))
    request = Request(
        options.synthetic,
        options.real,
        train_real=options.train_real,
        open_data=options.open_data,
        public=tuple(options.public),
        features=options.features,
        inception=options.inception,
        classifiers={"all": tuple(CLASSIFIERS), "none": ()}.get(options.classifiers, names),
        epochs=options.epochs,
        ensemble=options.ensemble,
        label_column=options.label_column,
        soft_labels=options.soft_labels,
    )
    model = None if options.model is None else open_generator(options.model, options.device)
    report = run(request, choose_device(options.device), model)
    write_report(report, options.out)
    print("\n".join(report.summary()))
    page, picture = beside(options.out)
    print(f"report: {options.out}\npage: {page}\nclosest pairs: {picture}")
    print(report.content["notice"])


def _evaluate_classifier(options: argparse.Namespace) -> None:
    """Of a classifier, no images are generated and no networks are trained."""
    if options.model is None:
        raise InputError("synthetic", "give the images to evaluate, or leave it out and give a classifier as --model")
    for name in ("train_real", "public", "features", "inception", "soft_labels"):
        if getattr(options, name):
            raise InputError(name, "is for synthetic images; leave it out for a classifier")
    check_target(options.out, [picture_beside(options.out)])
    model = open_classifier(options.model, options.device)
    report = evaluate_classifier(model, options.real, options.label_column)
    write_classification(report, options.out)
    print("\n".join(report.summary()))
    print(f"report: {options.out}\nconfusion matrix: {picture_beside(options.out)}")
    print(report.content["notice"])


def _save_features(options: argparse.Namespace) -> None:
    """Train the reference network, once for many reports."""
    if options.train_real is None:
        raise InputError("train_real", "give the real training images, of open data, for --save-features")
    for name in ("synthetic", "public", "model", "features", "inception", "soft_labels", "out"):
        if getattr(options, name):
            raise InputError(name, "leave it out with --save-features; evaluate with --features FILE then")
    facts = train_reference(
        options.save_features,
        options.train_real,
        options.real,
        choose_device(options.device),
        open_data=options.open_data,
        kind="small" if options.classifiers == "all" else options.classifiers,
        epochs=options.epochs,
        label_column=options.label_column,
    )
    print(
        f"{options.save_features}: {CLASSIFIERS[facts.kind].title}, trained on {facts.train_images:,} images of "
        f"{facts.train_source}, {facts.test_accuracy:.2%} right on {facts.test_source}; sha256 "
        f"{content_hash(options.save_features)}"
    )
    print(f"use it with --features {quote(str(options.save_features))}")
    print(TRAINED_ON_REAL)
