"""`rapid evaluate`."""

from __future__ import annotations

import argparse

from rapid.evaluate import Request, check_target, write_report
from rapid.evaluate import evaluate as run
from rapid.evaluate.networks import CLASSIFIERS
from rapid.evaluate.report import beside
from rapid.methods import open_generator
from rapid.runtime import choose_device


def evaluate(options: argparse.Namespace) -> None:
    """`rapid evaluate`."""
    check_target(options.out)
    names = tuple(name.strip() for name in options.classifiers.split(","))
    request = Request(
        options.synthetic,
        options.real,
        train_real=options.train_real,
        open_data=options.open_data,
        public=tuple(options.public),
        inception=options.inception,
        classifiers={"all": tuple(CLASSIFIERS), "none": ()}.get(options.classifiers, names),
        epochs=options.epochs,
        ensemble=options.ensemble,
        label_column=options.label_column,
    )
    model = None if options.model is None else open_generator(options.model, options.device)
    report = run(request, choose_device(options.device), model)
    write_report(report, options.out)
    print("\n".join(report.summary()))
    page, picture = beside(options.out)
    print(f"report: {options.out}\npage: {page}\nclosest pairs: {picture}")
    print(report.content["notice"])
