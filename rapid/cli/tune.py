"""`rapid tune`."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from rapid.bundle.card import privacy_in_words
from rapid.cli.train import check_run, private_images, settings_chosen, settings_of_run, tell_fit
from rapid.config.sections import MethodSettings
from rapid.dp.selection import Selection
from rapid.dp.trials import LARGEST_MEAN, LARGEST_SHAPE, Trials
from rapid.errors import InputError
from rapid.evaluate.scoring import train_labeller
from rapid.methods import find_method
from rapid.methods.base import Classifying
from rapid.parsing import Repeated, parse_yaml
from rapid.rounding import rounded_up
from rapid.runtime import choose_device
from rapid.stages.tuned import Scoring, tune_private_bundle

MANY = 0.95
LEAST_IMAGES = 10


def tune(options: argparse.Namespace) -> None:
    """`rapid tune`."""
    candidates = _candidates(options)
    if options.score_images < LEAST_IMAGES:
        raise InputError("score_images", f"must be at least {LEAST_IMAGES}", options.score_images)
    scoring = Scoring(
        partial(train_labeller, count=options.score_images), options.score_share, {"images": options.score_images}
    )
    trials, images = _trials(options), private_images(options)
    check_run(options, images)
    tell_fit(next(iter(candidates.values())).image)
    if settings_chosen(options):
        told = "tune does not choose: what --set and the candidates leave out is that of --base, also batch and steps"
        print(told, file=sys.stderr, flush=True)
    print(f"planning the noise of {len(candidates)} candidates", file=sys.stderr, flush=True)
    bundle = tune_private_bundle(
        options.base,
        images,
        options.out,
        candidates,
        scoring,
        epsilon=options.epsilon,
        delta=options.delta,
        trials=trials,
        device=choose_device(options.device),
        resume=options.resume,
        ledger=options.ledger,
        planned=_announce,
    )
    assert bundle.privacy is not None
    chosen = bundle.privacy["selection"]
    print(f"private bundle: {bundle.path}")
    print(
        f"chosen: {chosen['chosen']}, whose synthetic images teach a classifier to label about {chosen['score']:,} of "
        f"{bundle.privacy['dataset_size']:,} private {_units(bundle.privacy)} rightly (a noisy count)"
    )
    print(privacy_in_words(bundle.privacy))
    print(f"next: rapid generate --model {quote(str(bundle.path))} --count 100 --out images.npz")


def _announce(selection: Selection) -> None:
    """Tell what is public: the plan. From here on nothing is shown until the end."""
    trials, size = selection.trials, len(selection.candidates)
    print(
        f"choosing among {size}: {trials.mean:g} trials on average, at most "
        f"{trials.quantile(MANY)} with a probability of {MANY:.0%}; a trial has epsilon "
        f"{rounded_up(selection.trial_epsilon)}, all together {rounded_up(selection.spent)}. No progress is shown: it "
        "would tell how many trials there are, which must stay secret.",
        file=sys.stderr,
        flush=True,
    )


def _units(privacy: dict[str, Any]) -> str:
    return "images" if privacy["unit"] == "one image" else "people (each has one vote)"


def _trials(options: argparse.Namespace) -> Trials:
    """The distribution that --mean-trials and --shape describe."""
    if not 1 < options.mean_trials <= LARGEST_MEAN:
        raise InputError("mean_trials", f"must be above 1 and at most {LARGEST_MEAN:g}", options.mean_trials)
    if not 0 <= options.shape <= LARGEST_SHAPE:
        raise InputError("shape", f"must lie in [0, {LARGEST_SHAPE:g}]", options.shape)
    return Trials(mean=options.mean_trials, shape=options.shape)


def _candidates(options: argparse.Namespace) -> dict[str, MethodSettings]:
    """The settings of each candidate: those of the run, with what --candidates says."""
    found = {}
    for name, changes in _read(options.candidates).items():
        # YAML reads JSON; a date is a setting of no kind
        own = [f"{setting}={json.dumps(value, default=str)}" for setting, value in changes.items()]
        combined = argparse.Namespace(**vars(options) | {"overrides": [*options.overrides, *own]})
        try:
            found[name] = settings_of_run(options.base, combined)
        except InputError as error:
            if not own:
                raise
            raise InputError("candidates", f"'{name}': {error}", options.candidates) from None
        method: object = find_method(found[name].method)
        if isinstance(method, Classifying):
            # its score would need synthetic images
            raise InputError("method", "makes no images, by which trials are compared", found[name].method)
    return found


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Names of candidates, and what each changes: setting -> value.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError("candidates", f"cannot be read ({error.strerror})", path) from None
    except Repeated as error:
        problem = f"{error.problem}; give each candidate, and each of its settings, once"
        raise InputError("candidates", problem, path) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise InputError("candidates", "is not valid YAML", path) from None
    if not isinstance(content, dict) or not content:
        problem = "must name candidates and their settings, such as 'large: {private.expected_batch: 4096}'"
        raise InputError("candidates", problem, path)
    for name, changes in content.items():
        good = isinstance(changes, dict) and all(isinstance(setting, str) for setting in changes)
        if not isinstance(name, str) or not good:
            problem = f"'{name}' must be a name with a mapping of settings to values, such as {{private.steps: 400}}"
            raise InputError("candidates", problem, path)
    return content
