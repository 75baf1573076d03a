"""One loss and one weight per example, and a mean that can't broadcast."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusionblocks.errors import InputError
from diffusionblocks.memory import MemoryMeter
from diffusionblocks.noise import Preconditioning
from diffusionblocks.objective import WEIGHTS, chunked_cross_entropy, cross_entropy, reduce, squared_error, weights

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


def head_case() -> tuple[nn.Linear, Tensor, Tensor]:
    """A head, hidden states of 3 x 7 tokens, and their targets."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(5, 11, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(11, 5, generator=generator))
    target = torch.randint(11, (3, 7), generator=generator)
    return head, torch.randn(3, 7, 5, generator=generator), target


@pytest.mark.parametrize("chunk", [0, 1, 4, 7, 10, 21, 100])
def test_chunked_cross_entropy_has_the_values_and_gradients_of_the_whole(chunk: int) -> None:
    head, h, target = head_case()
    weights = torch.tensor([1.0, 2.0, 3.0])
    h.requires_grad_()
    whole = F.cross_entropy(head(h).transpose(1, 2), target, reduction="none").mean(1)
    expected = torch.autograd.grad((weights * whole).sum(), [h, head.weight])
    losses = chunked_cross_entropy(h, head.weight, target, chunk)
    got = torch.autograd.grad((weights * losses).sum(), [h, head.weight])
    torch.testing.assert_close(losses, whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("chunk", [0, 4])
def test_chunked_cross_entropy_under_autocast_is_float32(chunk: int) -> None:
    head, h, target = head_case()
    exact = chunked_cross_entropy(h, head.weight, target, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = chunked_cross_entropy(h, head.weight, target, chunk)
    losses.sum().backward()
    assert losses.dtype == torch.float32
    assert head.weight.grad is not None
    torch.testing.assert_close(losses, exact, rtol=0, atol=0.03)


def peak_of_head(chunk: int, tokens: int, vocabulary: int) -> int:
    """Bytes of activations at the peak of a head's forward and backward pass."""
    head = nn.Linear(4, vocabulary, bias=False)
    optimizer = torch.optim.SGD(head.parameters())
    h, target = torch.ones(2, tokens // 2, 4, requires_grad=True), torch.zeros(2, tokens // 2, dtype=torch.long)
    meter = MemoryMeter()
    meter.watch(head, optimizer)
    with meter:
        chunked_cross_entropy(h, head.weight, target, chunk).sum().backward()
    return meter.peak["activations"]


@pytest.mark.usefixtures("little_to_sweep")
def test_chunks_bound_the_memory_of_the_logits() -> None:
    tokens, vocabulary = 512, 2000
    whole = peak_of_head(0, tokens, vocabulary)
    logits = 4 * tokens * vocabulary
    # log-probabilities, and gradients of them and of the logits
    assert whole == pytest.approx(3 * logits, rel=0.05)
    for chunk in (128, 32):
        kept = 3 * logits * chunk // tokens
        # Each chunk's gradient of the weight beside their sum, and h with its gradient: small, because h is narrow.
        assert peak_of_head(chunk, tokens, vocabulary) == pytest.approx(kept, abs=0.03 * whole)


def test_squared_error_is_the_mean_over_an_examples_coordinates() -> None:
    target = torch.zeros(2, 3, 2, 2)
    denoised = torch.stack([torch.full((3, 2, 2), 2.0), torch.full((3, 2, 2), 3.0)])
    assert squared_error(denoised, target).tolist() == [4.0, 9.0]
    assert squared_error(denoised.bfloat16(), target).dtype == torch.float32
    one = torch.zeros(1, 4)
    one[0, 0] = 2.0
    assert squared_error(one, torch.zeros(1, 4)).tolist() == [1.0]
