"""Accuracy, calibration and confusion against closed forms and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, confusion_matrix, log_loss

from rapid.evaluate.classification import BINS, calibration, confusion_picture, measure


@pytest.mark.parametrize(
    ("confidence", "right", "total", "expected"),
    [(0.9, 90, 100, 0.0), (0.9, 70, 100, 0.2), (0.5, 100, 100, 0.5), (1.0, 0, 10, 1.0), (1.0, 10, 10, 0.0)],
)
def test_one_confidence_has_a_closed_form(confidence: float, right: int, total: int, expected: float) -> None:
    """With one confidence c and accuracy a the error is |a - c|."""
    hits = np.arange(total) < right
    found = calibration(np.full(total, confidence), hits)
    assert found["expected_error"] == pytest.approx(expected, abs=1e-12)
    assert found["mean_confidence"] == pytest.approx(confidence)
    assert len(found["bins"]) == 1
    assert found["bins"][0]["up_to"] >= confidence


def test_two_confidences_are_weighted_by_their_images() -> None:
    """30 images of confidence 0.6 and accuracy 1, 10 of 0.95 and 0.5: (30 * 0.4 + 10 * 0.45) / 40."""
    confidence = np.repeat([0.6, 0.95], [30, 10])
    right = np.array([True] * 30 + [True, False] * 5)
    assert calibration(confidence, right)["expected_error"] == pytest.approx((30 * 0.4 + 10 * 0.45) / 40)


def test_errors_of_opposite_sign_cancel_within_a_bin_alone() -> None:
    same, apart = np.array([0.81, 0.83]), np.array([0.61, 0.99])
    right = np.array([True, False])
    assert calibration(same, right)["expected_error"] == pytest.approx(abs(0.5 - 0.82))
    assert calibration(apart, right)["expected_error"] == pytest.approx((0.39 + 0.99) / 2)


@given(st.integers(0, 10_000), st.integers(1, 60))
def test_it_is_the_sum_over_bins(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    confidence, right = rng.uniform(0.01, 1, count), rng.random(count) < 0.5
    total = 0.0
    for number in range(BINS):
        inside = (confidence > number / BINS) & (confidence <= (number + 1) / BINS)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert calibration(confidence, right)["expected_error"] == pytest.approx(total)


def predictions(seed: int, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(3), count).astype(np.float32), rng.integers(0, 3, count)


@given(st.integers(0, 10_000), st.integers(3, 40))
def test_measures_are_those_of_scikit_learn(seed: int, count: int) -> None:
    probabilities, truth = predictions(seed, count)
    found = measure(probabilities, truth, ("x", "y", "z"))
    predicted = probabilities.argmax(1)
    assert found["accuracy"] == pytest.approx(accuracy_score(truth, predicted))
    assert found["confusion"] == confusion_matrix(truth, predicted, labels=[0, 1, 2]).tolist()
    rows = probabilities.astype(np.float64)
    expected = log_loss(truth, rows / rows.sum(1, keepdims=True), labels=[0, 1, 2])
    assert found["negative_log_likelihood"] == pytest.approx(expected, rel=1e-4)
    assert set(found["accuracy_by_class"]) == {name for n, name in enumerate("xyz") if (truth == n).any()}


def test_the_picture_is_darkest_where_all_images_are() -> None:
    counts = np.array([[10, 0], [4, 6]])
    picture = confusion_picture(counts, ("cat", "dog"))
    many = confusion_picture(np.eye(100, dtype=np.int64), [str(n) for n in range(100)])
    assert picture.dtype == many.dtype == np.uint8
    assert picture.shape[2] == many.shape[2] == 3
    # sum over the channel that fades: dark cells on the diagonal
    assert (picture[..., 0] == 0).sum() > 34 * 34 * 0.7
    assert max(many.shape) < 1200
