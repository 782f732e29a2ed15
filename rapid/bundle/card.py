"""Text of a bundle: model cards in the form of the Hugging Face Hub, and the privacy statement in plain language."""

from __future__ import annotations

from typing import Any

import yaml

from rapid.bundle.format import BundleConfig
from rapid.data.units import ONE_PERSON
from rapid.rounding import rounded_down, rounded_up

CLASSIFICATION = "image-classification"
"""The task of a classifier, which its method states as the fact `task`."""

_USE = """In Python:

```python
from rapid.interop.pipeline import RapidPipeline

images = RapidPipeline.from_pretrained("THIS")(num_images=8).images
```"""


_USE_GENERATOR = f"""Use: `rapid generate --model THIS --count 100 --out images.npz`, or `rapid serve --model THIS`.
{_USE}"""
_USE_CLASSIFIER = "Use: `rapid predict --model THIS --data PATH --out predictions.csv`, or `rapid serve --model THIS`."
_LIMITS_GENERATOR = """\
Not for: facts about single people, or conclusions that rest on rare cases; differential privacy hides exactly these.
Synthetic images do not replace validation on real data."""
_LIMITS_CLASSIFIER = """The guarantee covers the images that it was trained on, not those that it is asked to classify.
Rare cases are learned less well: differential privacy hides exactly these."""
GENERATION = "unconditional-image-generation"


def privacy_in_words(statement: dict[str, Any]) -> str:
    """The content of `privacy.json` as a few sentences."""
    epsilon, delta = rounded_up(statement["epsilon"]), rounded_up(statement["delta"])
    group = statement.get("group")
    people = (
        f" For a person with {group['size']} images, all of them together, epsilon is "
        f"{rounded_up(group['epsilon'])} at the same delta; accountant: {group['accountant']}."
        if group
        else ""
    )
    size = f"{statement['dataset_size']:,}"
    person = statement["unit"] == ONE_PERSON
    respect = f"the private images of {size} people" if person else f"the {size} private images"
    who = "any one person was among them, with any number of images," if person else "any one image was among them"
    counted = "people" if person else "private images"
    selection, choosing = statement.get("selection"), "Choosing settings"
    chosen = ""
    if selection:
        chosen = (
            f" Its settings, '{selection['chosen']}', were chosen privately among {len(selection['candidates'])}; "
            "epsilon covers the choice and all trials."
        )
        choosing = "Any other choice of settings"
    notes = "".join(f" {note}" for note in statement.get("notes", []))
    return (
        f"The model is ({epsilon}, {delta})-differentially private with respect to {respect}: "
        f"whether {who} changes the probability of every possible outcome by a factor of at most "
        f"e^{epsilon}, except for a probability of {delta}. This holds for the model and for all its "
        f"outputs, however many. "
        f"Adjacency: {statement['adjacency']}; unit: {statement['unit']}; accountant: {statement['accountant']}."
        f"{people}{chosen}{notes} "
        f"The number of {counted} and the list of classes count as public. {choosing} by looking at the "
        "private images is not covered."
    )


def public_card(config: BundleConfig, about: str) -> str:
    """Model card of a public bundle, Markdown.

    Args:
        config: of the bundle.
        about: the method's description of the bundle.
    """
    public = config.public
    assert public is not None
    classifies = _classifies(config)
    tag = CLASSIFICATION if classifies else "image-generation"
    return f"""{_front_matter(tag, task=CLASSIFICATION if classifies else GENERATION)}
# Public bundle ({config.settings.get("preset") or config.method})

Made by rapid {config.rapid}, method {config.method}, from public images only: {", ".join(public.sources)}
({public.pre_training:,} images trained the networks; {public.reference:,} others are held for reference).

{about.strip()}

Classes: {", ".join(config.classes) or "none (unlabelled)"}.
It holds no private information. Next: `rapid train-private --base THIS --private PATH --epsilon 1 --out DIR`.
{"" if classifies else _USE}
"""


def private_card(config: BundleConfig, statement: dict[str, Any], about: str) -> str:
    """Model card of a private bundle, Markdown.

    Args:
        config: of the bundle.
        statement: content of `privacy.json`.
        about: the method's description of the bundle.
    """
    rows = "\n".join(_row(release) for release in statement["releases"])
    classifies = _classifies(config)
    if classifies:
        head = _front_matter(CLASSIFICATION, "differential-privacy", task=CLASSIFICATION)
        title, use, limits = "Image classifier with differential privacy", _USE_CLASSIFIER, _LIMITS_CLASSIFIER
    else:
        head = _front_matter("image-generation", "synthetic-data", "differential-privacy")
        title, use, limits = "Synthetic images with differential privacy", _USE_GENERATOR, _LIMITS_GENERATOR
    return f"""{head}
# {title}

{privacy_in_words(statement)}

| | |
|---|---|
| epsilon, delta | {statement["epsilon"]}, {rounded_up(statement["delta"])} (RDP: {statement["epsilon_rdp"]}) |
{rows}
| noise | {statement["noise_source"]} |
| made | {statement["created"]}, rapid {config.rapid}, method {config.method} |

{about.strip()}
Classes: {", ".join(config.classes) or "none (unconditional)"}.

{use}

{limits}
"""


def _row(release: dict[str, Any]) -> str:
    """Table row of one release."""
    steps = f", {release['steps']} steps" if release["steps"] > 1 else ", once"
    steps += f", noise_band {release['noise_band']}" if "noise_band" in release else ""
    return (
        f"| {release['name']} | {release['title']}: noise_multiplier {rounded_down(release['noise_multiplier'], 4)}, "
        f"sample_rate {rounded_up(release['sample_rate'], 4)}{steps}, clip_norm {release['clip_norm']:g} |"
    )


def _classifies(config: BundleConfig) -> bool:
    return bool(config.facts.get("task") == CLASSIFICATION)


def _front_matter(*tags: str, task: str = GENERATION) -> str:
    """Metadata of a model card of the Hugging Face Hub.

    The licence is the user's to choose. The names of image sets are not those of data sets of the Hub, which
    `datasets` would link to.
    """
    metadata = {
        "license": "unknown",
        "library_name": "rapid",
        "pipeline_tag": task,
        "tags": ["rapid", *tags],
    }
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n"
