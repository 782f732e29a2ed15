"""Text of a bundle: model cards in the form of the Hugging Face Hub, and the privacy statement in plain language."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from rapid.bundle.format import BundleConfig, PublicData
from rapid.data.origin import Origin, listed
from rapid.data.units import ONE_PERSON
from rapid.errors import InputError
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
    """The content of `privacy.json` as a few sentences.

    Raises:
        InputError: it is damaged.
    """
    try:
        return _in_words(statement)
    except (KeyError, TypeError):
        problem = "privacy.json is damaged or of another version of rapid; copy the bundle again"
        raise InputError("", problem) from None


def _in_words(statement: dict[str, Any]) -> str:
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
        f"whether {who} changes the probability of whatever may come out by a factor of at most "
        f"e^{epsilon}, plus at most {delta}. This holds for the model and for all its "
        f"outputs, however many. "
        f"Adjacency: {statement['adjacency']}; unit: {statement['unit']}; accountant: {statement['accountant']}."
        f"{people}{chosen}{notes} "
        f"The number of {counted} and the list of classes count as public. {choosing} by looking at the "
        "private images is not covered."
    )


def public_in_words(public: PublicData) -> str:
    """What a public bundle tells about private images."""
    if not public.origins:
        return "This model was trained on public images alone: no private image had a part in it."
    covered = "that model's private images falls under that guarantee"
    if len(public.origins) > 1:
        covered = (
            "the private images of these models falls under these guarantees, whose epsilons and deltas add up for "
            "images that trained several of them"
        )
    return (
        f"Some of the images behind it are synthetic, made by {listed(public.origins)}. What it tells about {covered}. "
        "No other private image had a part in it."
    )


def base_note(origins: Sequence[Origin]) -> str:
    """The note of a privacy statement, if private models made images of the base: at least one."""
    several = len(origins) > 1
    return (
        f"The base was made from synthetic images of {listed(origins)}. The private images of "
        f"{'those models have those guarantees' if several else 'that model have that guarantee'}, which this one does "
        f"not include; images that trained {'several of all these models' if several else 'both models'} have the sum "
        "of the epsilons and of the deltas (basic composition)."
    )


def public_card(config: BundleConfig, about: str) -> str:
    """Model card of a public bundle, Markdown.

    Args:
        config: of the bundle.
        about: the method's description of the bundle.
    """
    public = config.public
    assert public is not None
    images, told = "from public images only", "It holds no private information."
    if public.origins:
        images, told = "from public and synthetic images", public_in_words(public)
    held = f"{public.pre_training:,} images trained the networks; {public.reference:,} others are held for reference"
    if given := config.facts.get("networks"):
        total = public.pre_training + public.reference
        held = f"{public.reference:,} of {total:,} images are held for reference; the networks were trained on other "
        held += f"images: {given['name']}, sha256 {given['sha256']}"
    classifies = _classifies(config)
    tag = CLASSIFICATION if classifies else "image-generation"
    return f"""{_front_matter(tag, task=CLASSIFICATION if classifies else GENERATION)}
# Public bundle ({config.settings.get("preset") or config.method})

Made by rapid {config.rapid}, method {config.method}, {images}: {", ".join(public.sources)}
({held}).

{about.strip()}

Classes: {", ".join(config.classes) or "none (unlabelled)"}.
{told} Next: `rapid train-private --base THIS --private PATH --epsilon 1 --out DIR`.
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
