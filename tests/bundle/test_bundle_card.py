"""The words that go with a bundle: model cards, and the privacy statement in plain language."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st

import rapid
from rapid.bundle import Bundle, BundleConfig, PublicData
from rapid.bundle.card import base_note, privacy_in_words, private_card, public_card, public_in_words
from rapid.config.sections import ImageSettings
from rapid.data.origin import Origin
from rapid.dp.budget import calibrate
from rapid.dp.releases import DpSgdSpec, QuerySpec
from rapid.dp.statement import privacy_statement
from rapid.rounding import rounded_down, rounded_up


def statement(group_size: int = 1) -> dict[str, Any]:
    """Of a training and a count on 12,000 images."""
    specs = [
        QuerySpec(name="count", kind="count", title="a count", share=0.1, dataset_size=12_000),
        DpSgdSpec(
            name="main", title="a training", dataset_size=12_000, expected_batch=600, steps=30, clip_norm=0.5
        ),
    ]  # fmt: skip
    budget = calibrate(specs, epsilon=2.0, delta=1e-5, group_size=group_size)
    return privacy_statement(budget, method="rapid", noise_source="chacha20")


def config(**changes: Any) -> BundleConfig:
    public = PublicData(
        sources=("letters", "signs"), classes=("A", "B"), pre_training=1_200, reference=300, fingerprint="f"
    )
    common: dict[str, Any] = {
        "kind": "public", "method": "rapid", "settings": {"preset": "demo"}, "image": ImageSettings(),
        "classes": ("zero", "one"), "public": public,
    }  # fmt: skip
    return BundleConfig(**(common | changes))


def test_the_statement_in_words_has_its_numbers() -> None:
    told = statement()
    words = privacy_in_words(told)
    epsilon = rounded_up(told["epsilon"])
    assert f"({epsilon}, 1e-05)-differentially private" in words
    assert "12,000 private images" in words
    assert f"a factor of at most e^{epsilon}, plus at most 1e-05" in words
    assert f"Adjacency: {told['adjacency']}; unit: one image; accountant: {told['accountant']}." in words
    # what is not covered belongs to it
    assert "The number of private images and the list of classes count as public." in words
    assert "Choosing settings by looking at the private images is not covered." in words
    assert "person" not in words


@settings(max_examples=50, deadline=None)
@given(epsilon=st.floats(1e-3, 50), delta=st.floats(1e-12, 1e-2), group=st.floats(50, 200), rate=st.floats(1e-5, 1))
def test_no_number_in_words_is_below_the_true_one(epsilon: float, delta: float, group: float, rate: float) -> None:
    release = {
        "name": "main", "title": "a training", "noise_multiplier": 1 / rate, "sample_rate": rate, "steps": 3,
        "clip_norm": 1.0,
    }  # fmt: skip
    told = {
        "epsilon": epsilon, "delta": delta, "epsilon_rdp": epsilon, "dataset_size": 12, "adjacency": "a", "unit": "u",
        "accountant": "x", "releases": [release], "noise_source": "n", "created": "today",
        "group": {"size": 3, "epsilon": group, "accountant": "y"},
    }  # fmt: skip
    card = private_card(config(kind="private"), told, "")
    number = r"([0-9.]+(?:e-[0-9]+)?)"
    pattern = (
        rf"is \({number}, {number}\)-diff.* e\^{number}, plus at most {number}\. .*"
        rf"together, epsilon is {number} at"
    )
    (found,) = re.findall(pattern, card)
    for shown, value in zip(map(float, found), (epsilon, delta, epsilon, delta, group), strict=True):
        assert value <= shown <= value * 1.01
    (shown_delta,) = re.findall(rf"^\| epsilon, delta \| \S+, {number} \(RDP", card, re.MULTILINE)
    ((noise, sampled),) = re.findall(rf"noise_multiplier {number}, sample_rate {number},", card)
    assert delta <= float(shown_delta) <= delta * 1.01
    # less noise and larger samples are less private
    assert float(noise) <= 1 / rate
    assert float(sampled) >= rate


def test_a_person_with_several_images_is_told() -> None:
    told = statement(group_size=3)
    assert told["group"]["epsilon"] > told["epsilon"]
    assert f"For a person with 3 images, all of them together, epsilon is {rounded_up(told['group']['epsilon'])} " in (
        privacy_in_words(told)
    )


def test_notes_are_told_in_their_order() -> None:
    words = privacy_in_words(statement() | {"notes": ["First this.", "Then that."]})
    assert " First this. Then that. The number of private images" in words


def test_private_models_behind_a_base_are_told() -> None:
    """Each with its guarantee, which is never shown smaller than it is."""
    one = Origin(model="a", sha256="0" * 64, method="dpdm", epsilon=1.00001, delta=1.2345e-5, adjacency="add one image")
    other = one.model_copy(update={"model": "b", "epsilon": 3.0})
    shown = "'a' (dpdm, epsilon 1.01, delta 1.24e-05, add one image)"
    assert base_note([one]).startswith(f"The base was made from synthetic images of the private model {shown}. The")
    assert "that model have that guarantee, which this one does not include; images that trained both" in base_note(
        [one]
    )
    both = base_note([one, other])
    assert f"of the private models {shown} and 'b' (dpdm, epsilon 3, delta 1.24e-05, add one image). The" in both
    assert "those models have those guarantees, which this one does not include; images that trained several" in both
    public = config().public
    assert public is not None
    assert public_in_words(public).endswith("no private image had a part in it.")
    told = public_card(config(public=public.model_copy(update={"origins": (one,)})), "x")
    assert f"synthetic, made by the private model {shown}. What it tells about that model's private images" in told


def text_of(card: str) -> str:
    """A card without its metadata, as the Hub's client reads it."""
    return ModelCard(card).text.lstrip()


def test_the_metadata_are_those_of_the_hub() -> None:
    public, private = public_card(config(), "x"), private_card(config(kind="private"), statement(), "x")
    common = {"license": "unknown", "library_name": "rapid", "pipeline_tag": "unconditional-image-generation"}
    tags = ["rapid", "image-generation"]
    assert ModelCard(public).data.to_dict() == common | {"tags": tags}
    assert ModelCard(private).data.to_dict() == common | {"tags": [*tags, "synthetic-data", "differential-privacy"]}
    for card in (public, private):
        assert 'RapidPipeline.from_pretrained("THIS")' in text_of(card)


def test_the_card_of_a_public_bundle() -> None:
    card = public_card(config(), "\nSomething of the method.\n\n")
    assert text_of(card).startswith("# Public bundle (demo)\n")
    assert f"Made by rapid {rapid.__version__}, method rapid, from public images only: letters, signs" in card
    assert "1,200 images trained the networks; 300 others" in card
    assert "\n\nSomething of the method.\n\nClasses: zero, one.\n" in card
    assert "It holds no private information." in card
    unlabelled = public_card(config(classes=(), settings={}), "x")
    assert text_of(unlabelled).startswith("# Public bundle (rapid)\n")
    assert "Classes: none (unlabelled)." in unlabelled


def test_the_card_of_a_private_bundle_has_every_release() -> None:
    told = statement()
    card = private_card(config(kind="private"), told, "About it.")
    assert privacy_in_words(told) in card
    rows = {
        name.strip(): content.strip() for name, content in re.findall(r"^\| ([^|]+)\|([^|]*)\|$", card, re.MULTILINE)
    }
    assert rows["epsilon, delta"] == f"{told['epsilon']}, 1e-05 (RDP: {told['epsilon_rdp']})"
    count, main = told["releases"]
    noise = rounded_down(count["noise_multiplier"], 4)
    assert rows["count"] == f"a count: noise_multiplier {noise}, sample_rate 1, once, clip_norm 1"
    noise = rounded_down(main["noise_multiplier"], 4)
    assert rows["main"] == f"a training: noise_multiplier {noise}, sample_rate 0.05, 30 steps, clip_norm 0.5"
    assert rows["noise"] == told["noise_source"]
    assert rows["made"] == f"{told['created']}, rapid {rapid.__version__}, method rapid"
    assert "About it.\nClasses: zero, one.\n" in card
    assert "Not for: facts about single people" in card
    assert "Classes: none (unconditional)." in private_card(config(kind="private", classes=()), told, "")


@pytest.mark.parametrize("name", ["public_bundle", "private_bundle"])
def test_cards_of_real_bundles(name: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(name)
    bundle, card = Bundle.open(path, ""), (path / "README.md").read_text(encoding="utf-8")
    if bundle.privacy is None:
        assert bundle.config.public is not None
        assert f"{bundle.config.public.pre_training:,} images trained the networks" in card
        assert "k = 800" in card
    else:
        assert privacy_in_words(bundle.privacy) in card
        assert [line for line in card.splitlines() if line.startswith("| denoiser |")]
        assert all(note in card for note in bundle.privacy["notes"])
    # nothing that was not filled in, and lines that a terminal can show
    assert "None" not in card
    assert "{" not in card.replace("`{", "")
