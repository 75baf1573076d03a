"""Metrics against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diffusionblocks.metrics import accuracy, calibration_error, combine, cross_entropy, mixture


def logs(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows).log()


def confident(confidence: float, right: int, wrong: int) -> tuple[Tensor, Tensor]:
    """Beliefs of one confidence in class 0 of 3, and labels of which `right` agree."""
    rest = (1 - confidence) / 2
    return logs([[confidence, rest, rest]] * (right + wrong)), torch.tensor([0] * right + [1] * wrong)


def test_accuracy_is_the_share_of_right_classes() -> None:
    beliefs = logs([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.2, 0.3, 0.5], [0.4, 0.3, 0.3]])
    assert accuracy(beliefs, torch.tensor([0, 1, 2, 0])) == 1.0
    assert accuracy(beliefs, torch.tensor([0, 1, 1, 1])) == 0.5
    assert accuracy(beliefs, torch.tensor([1, 0, 0, 2])) == 0.0
    # Over examples, not the mean over classes: classes 0 and 1 alone would give 1/2 of 1 and 1/3.
    assert accuracy(beliefs, torch.tensor([0, 0, 0, 0])) == 0.5


def test_cross_entropy_is_the_mean_surprise() -> None:
    beliefs = logs([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]])
    assert cross_entropy(beliefs, torch.tensor([0, 2])) == pytest.approx((math.log(2) + math.log(8)) / 2)
    assert cross_entropy(beliefs, torch.tensor([1, 1])) == pytest.approx((math.log(4) - math.log(0.75)) / 2)


def test_calibrated_beliefs_have_no_calibration_error() -> None:
    parts = [confident(0.75, 75, 25), confident(0.9, 90, 10), confident(0.5, 10, 10)]
    beliefs, labels = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    assert calibration_error(beliefs, labels) == pytest.approx(0, abs=1e-6)


def test_over_confidence_is_its_distance_from_the_accuracy() -> None:
    beliefs, labels = confident(0.98, 50, 50)
    assert calibration_error(beliefs, labels) == pytest.approx(0.48, abs=1e-6)
    beliefs, labels = confident(0.55, 100, 0)
    assert calibration_error(beliefs, labels) == pytest.approx(0.45, abs=1e-6)


def test_calibration_error_weighs_bins_by_their_examples() -> None:
    # 30 examples 0.2 too sure, and 10 examples 0.1 too shy: (30 * 0.2 + 10 * 0.1) / 40; the signs don't cancel.
    parts = [confident(0.9, 21, 9), confident(0.5, 6, 4)]
    beliefs, labels = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    assert calibration_error(beliefs, labels) == pytest.approx(0.175, abs=1e-6)


def test_calibration_error_stands_rounding_above_one() -> None:
    assert calibration_error(torch.tensor([[1e-6, -20.0]]), torch.tensor([0])) == pytest.approx(0, abs=1e-5)


def test_combine_is_the_normalised_geometric_mean() -> None:
    beliefs = torch.stack([logs([[0.8, 0.1, 0.1]]), logs([[0.2, 0.4, 0.4]])])
    # sqrt(0.16), sqrt(0.04), sqrt(0.04) = 0.4, 0.2, 0.2, which sum to 0.8.
    torch.testing.assert_close(combine(beliefs).exp(), torch.tensor([[0.5, 0.25, 0.25]]))


def test_mixture_is_the_mean_of_probabilities() -> None:
    beliefs = torch.stack([logs([[0.8, 0.1, 0.1]]), logs([[0.2, 0.4, 0.4]])])
    torch.testing.assert_close(mixture(beliefs), logs([[0.5, 0.25, 0.25]]))
    # They differ where one of them is sure that a class is wrong.
    sure = torch.stack([logs([[1.0, 0.0]]), logs([[0.5, 0.5]])])
    torch.testing.assert_close(mixture(sure), logs([[0.75, 0.25]]))


@given(k=st.integers(1, 5), n=st.integers(1, 4), classes=st.integers(2, 6), seed=st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_both_means_are_distributions(k: int, n: int, classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    beliefs = (30 * torch.randn(k, n, classes, generator=generator)).log_softmax(2)
    for mean in (combine(beliefs), mixture(beliefs)):
        assert mean.shape == (n, classes)
        torch.testing.assert_close(mean.exp().sum(1), torch.ones(n))
    torch.testing.assert_close(mixture(beliefs).exp(), beliefs.exp().mean(0))
    torch.testing.assert_close(mixture(beliefs[:1]), beliefs[0])
    torch.testing.assert_close(combine(beliefs[:1]), beliefs[0])
