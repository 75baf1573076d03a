"""The noise laws and EDM's scalings against recorded numbers, brute force and wide ranges."""

import json
import math
import pathlib
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_ndtr
from scipy.stats import kstest

from diffusionblocks.errors import InputError
from diffusionblocks.layers import random_codes, simplex_codes
from diffusionblocks.noise import EqualInformation, LogNormal, Preconditioning, log_posterior_from_z
from diffusionblocks.partition import Partition, make_partition
from oracles import FiniteSet

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden.json").read_text())
DIGITS = 1e-9  # golden.json holds ten digits


@st.composite
def log_normals(draw: st.DrawFn) -> LogNormal:
    """Laws far beyond the useful ones: the mass may lie wholly outside the range, in either tail."""
    low = draw(st.floats(-4, 4.9))
    high = draw(st.floats(low + 0.01, 5))
    mean, std = draw(st.floats(-20, 20)), 10 ** draw(st.floats(-2, math.log10(20)))
    return LogNormal(mean, std, 10**low, 10**high)


def share_error(law: LogNormal) -> float:
    """How well a share survives level and mass: scipy's ndtri_exp inverts log tail probabilities to 1.4e-12.

    They are of the order 1 in any useful law and reach -5e6 here, where 2e-6 of the mass is what can be had.
    """
    ends = (np.log([law.sigma_min, law.sigma_max]) - law.p_mean) / law.p_std
    deepest = max(np.abs(log_ndtr(ends)).max(), np.abs(log_ndtr(-ends)).max())
    return min(1e-9 + 2e-12 * float(deepest), 2e-6)


def equal_information(
    codes: torch.Tensor, frequencies: list[float] | None = None, **settings: float
) -> EqualInformation:
    shares = np.ones(len(codes)) if frequencies is None else np.array(frequencies, dtype=np.float64)
    return EqualInformation(codes.double().numpy(), shares, **settings)


# -- log-normal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [int(b) for b in GOLDEN["block_boundaries"]])
def test_equal_masses_are_the_recorded_boundaries(blocks: int) -> None:
    levels = LogNormal().level(np.arange(blocks + 1) / blocks)
    np.testing.assert_allclose(levels[::-1], GOLDEN["block_boundaries"][str(blocks)], rtol=DIGITS)
    np.testing.assert_allclose(LogNormal().mass(levels), np.arange(blocks + 1) / blocks, atol=1e-13)


@pytest.mark.parametrize("points", [int(n) for n in GOLDEN["step_levels"]])
def test_equal_masses_are_the_recorded_step_levels(points: int) -> None:
    levels = LogNormal().level(np.linspace(0, 1, points))
    np.testing.assert_allclose(levels, GOLDEN["step_levels"][str(points)], rtol=DIGITS)


def test_ends_are_pinned_where_the_cdf_saturates() -> None:
    assert LogNormal().level([0.0, 1.0]).tolist() == [80.0, 0.002]
    assert LogNormal().mass([80.0, 0.002]).tolist() == [0.0, 1.0]
    far = LogNormal(sigma_min=1e-4, sigma_max=1e5)  # its cdf at 1e5 is 1.0 in float64
    assert far.cdf(1e5) == 1.0
    assert far.level([0.0, 1.0]).tolist() == [1e5, 1e-4]
    # A share that 1 - cdf can't tell from 0 still comes back: P(level > 1e4) = 2e-18.
    assert float(far.level(far.mass(1e4))) == pytest.approx(1e4, rel=1e-9)


def test_levels_outside_the_range_are_clamped_and_bad_shares_refused() -> None:
    assert LogNormal().mass([1e-9, 1e9]).tolist() == [1.0, 0.0]
    for share in (-0.01, 1.01, math.nan):
        with pytest.raises(InputError, match="between 0 and 1"):
            LogNormal().level(share)


@pytest.mark.parametrize(
    "ends", [(0.0, 80.0), (-1.0, 80.0), (80.0, 0.002), (1.0, 1.0), (0.1, math.inf), (math.nan, 1.0)]
)
def test_ends_that_make_no_range_are_refused(ends: tuple[float, float]) -> None:
    with pytest.raises(InputError, match="0 < sigma_min < sigma_max"):
        LogNormal(sigma_min=ends[0], sigma_max=ends[1])
    with pytest.raises(InputError, match="0 < sigma_min < sigma_max"):
        equal_information(simplex_codes(3), sigma_min=ends[0], sigma_max=ends[1])


@pytest.mark.parametrize("parameters", [(math.nan, 1.0), (math.inf, 1.0), (0.0, 0.0), (0.0, -1.0), (0.0, math.inf)])
def test_parameters_that_make_no_law_are_refused(parameters: tuple[float, float]) -> None:
    with pytest.raises(InputError, match="p_std"):
        LogNormal(*parameters)


def test_mass_agrees_with_the_truncated_cdf() -> None:
    law = LogNormal()
    levels = np.geomspace(0.002, 80, 1001)
    low, high = law.cdf(0.002), law.cdf(80.0)
    np.testing.assert_allclose(law.mass(levels), (high - law.cdf(levels)) / (high - low), atol=1e-12)


@settings(deadline=None, max_examples=200)
@given(log_normals(), st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_level_falls_from_end_to_end_and_mass_returns(law: LogNormal, shares: list[float]) -> None:
    given_shares = np.array([0.0, *sorted(shares), 1.0])
    levels = law.level(given_shares)
    assert levels[0] == law.sigma_max
    assert levels[-1] == law.sigma_min
    assert np.isfinite(levels).all()
    tolerance = share_error(law)
    # Equal to rounding where two shares are (nearly) the same.
    assert (np.diff(levels) <= 1e-12 * levels[:-1]).all()
    # A level is a float64: where the density is steep, its last digit alone moves the mass.
    step = np.abs(law.mass(levels * (1 + 4e-16)) - law.mass(levels * (1 - 4e-16)))
    assert (np.abs(law.mass(levels) - given_shares) <= tolerance + step).all()


@settings(deadline=None, max_examples=200)
@given(log_normals(), st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_mass_falls_with_the_level_and_level_returns(law: LogNormal, places: list[float]) -> None:
    levels = np.sort(law.sigma_min * (law.sigma_max / law.sigma_min) ** np.array(places))
    masses = law.mass(levels)
    assert ((masses >= 0) & (masses <= 1)).all()
    assert (np.diff(masses) <= share_error(law)).all()
    # Where the law has no density to speak of, no share can say where in the gap the level was.
    around = law.mass(levels * 0.999) - law.mass(levels * 1.001)
    dense = around > 1e4 * share_error(law)
    np.testing.assert_allclose(law.level(masses)[dense], levels[dense], rtol=1e-5)


@pytest.mark.parametrize("block", [0, 1, 2])
def test_draws_follow_the_law_restricted_to_the_training_range(block: int) -> None:
    partition = make_partition(LogNormal(), 12, 3)
    sigma = partition.draw(block, 20_000, torch.Generator().manual_seed(block)).sigma.double().numpy()
    low, high = partition.training_range(block)
    at_low, at_high = partition.law.mass([low, high])
    # Above sigma lies the share mass(sigma): draws must be uniform in it.
    statistic = kstest((partition.law.mass(sigma) - at_high) / (at_low - at_high), "uniform")
    assert statistic.pvalue > 0.01
    assert sigma.min() < low * 1.1 or low == 0.002
    assert sigma.min() >= low * (1 - 1e-7)
    assert sigma.max() <= high * (1 + 1e-7)


# -- equal information --------------------------------------------------------------------------------------------

SKEWED = [0.5, 0.25, 0.125, 0.0625, 0.0625]


@pytest.mark.parametrize("frequencies", [[0.2] * 5, SKEWED, [8, 4, 2, 1, 1]])
def test_little_noise_reveals_the_entropy_and_much_noise_nothing(frequencies: list[float]) -> None:
    law = equal_information(simplex_codes(5), frequencies)
    shares = np.array(frequencies) / np.sum(frequencies)
    entropy = float(-(shares * np.log2(shares)).sum())
    assert law.bits(law.sigma_min) == pytest.approx(entropy, abs=1e-3)
    assert law.bits(law.sigma_max) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_bits_of_two_codes_agree_with_an_integral(share: float) -> None:
    # y = +1 with probability p, else -1: I = h(p) - E log2(1 + odds against y given z), over both targets.
    law = equal_information(torch.tensor([[1.0], [-1.0]]), [share, 1 - share])
    eps = np.linspace(-10, 10, 20_001)
    density = np.exp(-(eps**2) / 2) / math.sqrt(2 * math.pi) * (eps[1] - eps[0])
    for sigma in (0.3, 0.7, 1.5, 5.0):
        bits = 0.0
        for p in (share, 1 - share):
            lost = np.logaddexp(0, math.log((1 - p) / p) - 2 * (1 + sigma * eps) / sigma**2) / math.log(2)
            bits -= p * (math.log2(p) + float((density * lost).sum()))
        assert law.bits(sigma) == pytest.approx(bits, abs=0.01)


def test_equal_information_maps_levels_and_shares_to_each_other() -> None:
    law = equal_information(simplex_codes(10))
    shares = np.linspace(0, 1, 101)
    levels = law.level(shares)
    assert levels[[0, -1]].tolist() == [80.0, 0.002]
    assert (np.diff(levels) < 0).all()
    np.testing.assert_allclose(law.mass(levels), shares, atol=1e-9)
    masses = law.mass(np.geomspace(0.002, 80, 1001))
    assert (np.diff(masses) <= 0).all()
    # Shares of the bits: halfway down the law, z has revealed half of what it ever will.
    assert law.bits(float(law.level(0.5))) == pytest.approx(math.log2(10) / 2, abs=0.02)


def test_equal_information_is_part_of_the_recipe_and_draws_the_same_numbers() -> None:
    levels = [equal_information(simplex_codes(10)).level(np.linspace(0, 1, 11)).tolist() for _ in range(2)]
    assert levels[0] == levels[1]


def test_frequencies_and_codes_shape_the_law() -> None:
    uniform = equal_information(simplex_codes(5))
    skewed = equal_information(simplex_codes(5), [0.9, 0.025, 0.025, 0.025, 0.025])
    assert abs(float(uniform.level(0.5)) / float(skewed.level(0.5)) - 1) > 0.05
    # Twice as long codes drown in twice the noise.
    longer = equal_information(2 * simplex_codes(5))
    assert float(longer.level(0.5)) == pytest.approx(2 * float(uniform.level(0.5)), rel=0.01)


def test_a_large_table_takes_seconds() -> None:
    start = time.perf_counter()
    law = equal_information(random_codes(2000, 64, torch.Generator().manual_seed(0)))
    partition = make_partition(law, 4, 4)
    assert np.isfinite(partition.edges).all()
    assert time.perf_counter() - start < 30  # measured: 5 s on one core


@pytest.mark.parametrize("frequencies", [[0.5, 0.5], [0.5, 0.5, 0.0], [1.0, 1.0, -1.0]])
def test_frequencies_that_fit_no_table_are_refused(frequencies: list[float]) -> None:
    with pytest.raises(InputError, match="one positive frequency for each"):
        equal_information(simplex_codes(3), frequencies)


def test_one_code_alone_is_refused() -> None:
    with pytest.raises(InputError, match="two or more codes"):
        EqualInformation(np.ones((1, 2)), np.ones(1))


@settings(deadline=None, max_examples=15)
@given(st.integers(2, 12), st.floats(-3, -0.5), st.floats(1, 3), st.integers(1, 8))
def test_equal_information_pins_its_ends_whatever_the_range(classes: int, low: float, high: float, blocks: int) -> None:
    law = EqualInformation(simplex_codes(classes).double().numpy(), np.ones(classes), 10**low, 10**high, grid=65)
    partition = make_partition(law, blocks, blocks)
    assert (partition.edges[0], partition.edges[-1]) == (10**high, 10**low)
    assert (np.diff(partition.edges) < 0).all()
    np.testing.assert_allclose([partition.mass(b) for b in range(blocks)], 1 / blocks, atol=1e-9)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 20.0])
def test_belief_from_z_alone_is_bayes_rule(sigma: float) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    prior = torch.tensor([0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05], dtype=torch.float64)
    z = codes[torch.arange(50) % 7] + sigma * torch.randn(50, 3, generator=generator, dtype=torch.float64)
    expected = FiniteSet(codes, prior).posterior(z, sigma).log()
    torch.testing.assert_close(log_posterior_from_z(z, sigma, codes, prior), expected, rtol=1e-9, atol=1e-9)
    each = torch.full((50,), sigma, dtype=torch.float64)
    torch.testing.assert_close(log_posterior_from_z(z, each, codes, 3 * prior), expected, rtol=1e-9, atol=1e-9)


# -- preconditioning and weight -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", list(GOLDEN["preconditioning"]))
def test_scalings_are_the_recorded_ones(sigma: str) -> None:
    scalings, level = Preconditioning(0.5), torch.tensor([float(sigma)], dtype=torch.float64)
    for name, expected in GOLDEN["preconditioning"][sigma].items():
        value = scalings.weight(level) if name == "w" else getattr(scalings, name)(level)
        assert value.dtype == torch.float64
        np.testing.assert_allclose(value.numpy(), [expected], rtol=DIGITS, err_msg=name)


def mean_weight(partition: Partition, block: int, points: int = 100_000) -> float:
    """E w(sigma) over the law restricted to the training range."""
    at_low, at_high = partition.law.mass(partition.training_range(block))
    # Midpoints in t, t^4 being the share below: w rises steeply towards sigma_min, so those shares are cut finest.
    t = (np.arange(points) + 0.5) / points
    levels = partition.law.level(at_low - (at_low - at_high) * t**4)
    return float((Preconditioning(0.5).weight(torch.from_numpy(levels)).numpy() * 4 * t**3).mean())


@pytest.mark.parametrize("name", list(GOLDEN["mean_weight_per_block"]))
def test_mean_weights_are_the_recorded_ones(name: str) -> None:
    blocks, overlap = name.split(",")
    partition = make_partition(LogNormal(), 12, int(blocks[2:]), overlap=float(overlap[6:]))
    weights = [mean_weight(partition, block) for block in range(partition.blocks)]
    np.testing.assert_allclose(weights, GOLDEN["mean_weight_per_block"][name], rtol=5e-6)  # six digits


def test_clamped_weight_is_the_weight_up_to_its_cap() -> None:
    scalings = Preconditioning(0.5)
    sigma = torch.tensor([0.002, 0.05, 0.5 / math.sqrt(5) * 1.001, 0.5, 1.0, 80.0], dtype=torch.float64)
    clamped, plain = scalings.clamped_weight(sigma), scalings.weight(sigma)
    torch.testing.assert_close(clamped[2:], plain[2:])
    torch.testing.assert_close(clamped[:2], torch.full((2,), (1 + 5) / 0.25, dtype=torch.float64))
    torch.testing.assert_close(scalings.clamped_weight(sigma, gamma=1.0).max(), torch.tensor(8.0).double())
