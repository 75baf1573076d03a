"""One loss and one weight per example, and a mean that can't broadcast."""

import math

import pytest
import torch

from diffusionblocks.errors import InputError
from diffusionblocks.noise import Preconditioning
from diffusionblocks.objective import WEIGHTS, cross_entropy, reduce, squared_error, weights

HALF = Preconditioning(0.5)


def test_weighted_mean_is_taken_example_by_example() -> None:
    losses = torch.tensor([1.0, 3.0], dtype=torch.float64)
    sigma = torch.tensor([0.5, 80.0], dtype=torch.float64)
    # w(0.5) = 8 and w(80) = 4.00015625: (1 * 8 + 3 * 4.00015625) / 2. The published code's broadcasting gives 12.0003.
    assert float(reduce(losses, weights("edm", sigma, HALF))) == pytest.approx(10.000234375, abs=1e-12)
    assert float(reduce(losses)) == 2.0
    assert float(reduce(losses, weights("none", sigma, HALF))) == 2.0


def test_weights_of_another_shape_are_refused() -> None:
    losses = torch.ones(4)
    for weight in (torch.ones(4, 1), torch.ones(1, 4), torch.ones(1), torch.tensor(1.0), torch.ones(3)):
        with pytest.raises(ValueError, match="one per example"):
            reduce(losses, weight)
    for wrong in (torch.ones(4, 1), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="one per example"):
            reduce(wrong, wrong)
        with pytest.raises(ValueError, match="one per example"):
            reduce(wrong)


def test_kinds_of_weight() -> None:
    sigma = torch.tensor([0.002, 0.1, 0.5, 80.0])
    assert weights("none", sigma, HALF).tolist() == [1.0] * 4
    torch.testing.assert_close(weights("edm", sigma, HALF), torch.tensor([250004.0, 104.0, 8.0, 4.00015625]))
    # min-SNR's gamma of 5 caps w at (1 + 5) / sigma_data^2, and leaves what lies below.
    torch.testing.assert_close(weights("edm_clamped", sigma, HALF), torch.tensor([24.0, 24.0, 8.0, 4.00015625]))


def test_unknown_weights_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=", ".join(WEIGHTS)):
        weights("snr", torch.ones(1), HALF)


def test_cross_entropy_is_one_number_an_example() -> None:
    logits = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    expected = torch.tensor([math.log(2), math.log(4 / 3)])
    torch.testing.assert_close(cross_entropy(logits, torch.tensor([1, 0])), expected)


def test_cross_entropy_of_bf16_logits_is_computed_in_float32() -> None:
    logits = 10 * torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    target = torch.arange(64) % 50
    logits = logits.bfloat16().requires_grad_()
    losses = cross_entropy(logits, target)
    assert losses.dtype == torch.float32
    picked = logits.double()[torch.arange(64), target]
    exact = logits.double().exp().sum(1).log() - picked
    torch.testing.assert_close(losses.double(), exact, rtol=1e-5, atol=1e-5)  # in bf16 they are off by 1e-2
    reduce(losses).backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_squared_error_is_the_mean_over_an_examples_coordinates() -> None:
    target = torch.zeros(2, 3, 2, 2)
    denoised = torch.stack([torch.full((3, 2, 2), 2.0), torch.full((3, 2, 2), 3.0)])
    assert squared_error(denoised, target).tolist() == [4.0, 9.0]
    assert squared_error(denoised.bfloat16(), target).dtype == torch.float32
    one = torch.zeros(1, 4)
    one[0, 0] = 2.0
    assert squared_error(one, torch.zeros(1, 4)).tolist() == [1.0]
