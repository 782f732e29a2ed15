"""What `rapid release` asks of a classifier: an audit of its mechanism, and attacks on canaries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rapid.bundle import Bundle
from rapid.data import fit_images, load_images
from rapid.methods import find_method, open_classifier
from rapid.methods.base import Inspectable
from rapid.methods.dp_classifier.attacked import log_odds
from rapid.methods.dp_classifier.audited import subjects
from rapid.release import Request, decide, read_policy

CPU = torch.device("cpu")
POLICY = """
max_epsilon: 10
max_delta: 0.01
unit: one image
signature: false
ledger: {required: false, max_epsilon: null}
copies: {required: false}
membership: {max_advantage: 0.99, false_positive_rates: [0.1]}
"""


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=6), st.integers(0, 5))
def test_log_odds_are_those_of_the_probability(row: list[float], label: int) -> None:
    label %= len(row)
    values = np.array(row, np.longdouble)
    weights = np.exp(values - values.max())
    wanted = np.log(weights[label]) - np.log(np.delete(weights, label).sum())
    found = log_odds(torch.tensor([row], dtype=torch.float64), torch.tensor([label]))
    assert float(found) == pytest.approx(float(wanted), rel=1e-9, abs=1e-9)


def test_log_odds_stay_finite_where_a_probability_rounds_to_one() -> None:
    found = log_odds(torch.tensor([[100.0, -100.0]]), torch.tensor([0]))
    assert found.tolist() == [200.0]


def test_scores_are_the_confidence_in_the_label(classifier_bundle: Path, digits: Path) -> None:
    bundle, method = Bundle.open(classifier_bundle, "model", "private"), find_method("dp-classifier")
    assert isinstance(method, Inspectable)
    images = fit_images(load_images(digits, "digits"), bundle.config.image, "digits")
    scores = method.membership_scores(bundle, images, CPU)
    probability = open_classifier(classifier_bundle, "cpu").probabilities(images.images).astype(np.float64)
    assert images.labels is not None
    own = probability[np.arange(len(images)), images.labels]
    plain, views = scores["confidence of the classifier"], scores["confidence over views"]
    np.testing.assert_allclose(plain, np.log(own / (1 - own)), atol=1e-3)
    assert views.shape == (len(images),)
    # views are moved a little, so both scores agree roughly, but not exactly
    assert np.corrcoef(plain, views)[0, 1] > 0.5
    assert not np.allclose(plain, views)


def test_canaries_have_draws_of_their_own(classifier_bundle: Path) -> None:
    bundle = Bundle.open(classifier_bundle, "model", "private")
    names = [subject.name for subject in subjects(bundle)]
    assert names == ["classifier", "classifier, bfloat16"]
    subject = subjects(bundle)[0]
    losses = subject.losses(torch.arange(subject.count))
    # the same draws whenever it is called
    torch.testing.assert_close(subject.losses(torch.tensor([5, 0])), losses[[5, 0]], rtol=1e-4, atol=1e-5)
    assert losses.unique().numel() == subject.count


def test_a_classifier_can_be_released(classifier_bundle: Path, tmp_path: Path, digits: Path) -> None:
    """Its mechanism is audited on its own network, and canaries are attacked; there are no images to search."""
    with np.load(digits) as found:
        for name, rows in (("members", slice(0, 50)), ("others", slice(50, 100))):
            part = {key: found[key][rows] for key in ("images", "labels")}
            np.savez(tmp_path / f"{name}.npz", **part, classes=found["classes"])
    (tmp_path / "policy.yaml").write_text(POLICY)
    request = Request(
        model=classifier_bundle,
        policy=read_policy(tmp_path / "policy.yaml"),
        out=tmp_path / "report",
        members=tmp_path / "members.npz",
        non_members=tmp_path / "others.npz",
    )
    content = decide(request, CPU).content
    audit = content["audit"]
    assert audit["networks_of_the_model"]
    assert "classifier" in audit["subjects"]
    assert not audit["refuted"]
    assert {attack["score"] for attack in content["membership"]["attacks"]} == {
        "confidence of the classifier",
        "confidence over views",
    }
