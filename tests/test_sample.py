"""Walks against probability flows that are known in closed form."""

import json
import math
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from diffusionblocks.errors import InputError
from diffusionblocks.model import Denoiser
from diffusionblocks.noise import LogNormal
from diffusionblocks.partition import make_partition, plan_walk
from diffusionblocks.sample import STARTS, Denoise, Step, euler_step, heun_step, integrate, solver, start_state, walk
from oracles import FiniteSet, Gaussian, Perfect

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden.json").read_text())
POINTS = torch.tensor([[1.0, 0.0], [-0.5, 0.8], [-0.5, -0.8]], dtype=torch.float64)


def printed_step(denoise: Denoise, z: Tensor, sigma: float, next_sigma: float) -> Tensor:
    """The paper's Eq. 3 as printed: the step away from D."""
    return z - (next_sigma - sigma) / sigma * (z - denoise(z, sigma))


def slope_of_error(step: Step, sigma: float = 10.0, next_sigma: float = 0.1) -> float:
    """Exponent p of error ~ steps^-p on the Gaussian's flow, over equal steps of log sigma."""
    data, z = Gaussian(0.5), torch.tensor([[3.0, -1.0]], dtype=torch.float64)
    exact = data.flow(z, sigma, next_sigma)
    counts = [64, 128, 256, 512]
    errors = []
    for steps in counts:
        levels = np.geomspace(sigma, next_sigma, steps + 1).tolist()
        errors.append(float((integrate(data, z, levels, step) - exact).norm()))
    return -float(np.polyfit(np.log(counts), np.log(errors), 1)[0])


@pytest.mark.parametrize("points", list(GOLDEN["euler_coeffs"]))
def test_euler_step_has_the_recorded_coefficients(points: str) -> None:
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    levels = LogNormal().level(np.linspace(0, 1, int(points))).tolist()
    rows = zip(GOLDEN["euler_coeffs"][points], levels[:-1], levels[1:], strict=True)
    for row, sigma, next_sigma in rows:
        assert (sigma, next_sigma) == pytest.approx((row["sigma"], row["next"]), rel=1e-9)
        assert float(euler_step(Perfect(zero), one, sigma, next_sigma)) == pytest.approx(row["a_z"], rel=1e-9)
        assert float(euler_step(Perfect(one), zero, sigma, next_sigma)) == pytest.approx(row["b_D"], rel=1e-9)


@pytest.mark.parametrize("step", [euler_step, heun_step])
def test_perfect_denoiser_keeps_the_noise_of_each_level(step: Step) -> None:
    # y = 1, eps = 1: z = 4 at sigma 3 must become y + 1 eps = 2 at sigma 1. The printed sign would give 6.
    target, z = torch.ones(1, 1), torch.full((1, 1), 4.0)
    assert step(Perfect(target), z, 3.0, 1.0).item() == pytest.approx(2.0, abs=1e-6)
    assert printed_step(Perfect(target), z, 3.0, 1.0).item() == pytest.approx(6.0, abs=1e-6)


def test_a_step_to_no_noise_ends_at_the_denoiser() -> None:
    target, z = torch.tensor([[1.0, 2.0]]), torch.tensor([[50.0, -70.0]])
    assert torch.equal(euler_step(Perfect(target), z, 3.0, 0.0), target)


def test_euler_is_of_first_order() -> None:
    assert slope_of_error(euler_step) == pytest.approx(1, abs=0.1)


def test_heun_is_of_second_order() -> None:
    assert slope_of_error(heun_step) == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("step", [euler_step, heun_step])
def test_many_steps_follow_the_gaussian_flow(step: Step) -> None:
    data, z = Gaussian(0.5), torch.tensor([[30.0, -100.0]], dtype=torch.float64)
    end = integrate(data, z, np.geomspace(80, 0.002, 2001).tolist(), step)
    torch.testing.assert_close(end, data.flow(z, 80.0, 0.002), rtol=5e-3, atol=0)
    assert float(integrate(data, z, np.geomspace(80, 0.002, 2001).tolist(), printed_step).abs().max()) > 1e3


def test_solvers_are_found_by_name() -> None:
    assert (solver("euler"), solver("heun")) == (euler_step, heun_step)
    with pytest.raises(InputError, match="euler or heun"):
        solver("rk4")


# -- walks through blocks -----------------------------------------------------------------------------------------


class FiniteSetDenoiser(Denoiser):
    """Stands in for the trained chain: beliefs about three points, and a record of who was asked at which level."""

    def __init__(self) -> None:
        self.data, self.asked = FiniteSet(POINTS), list[tuple[int, float, int]]()

    def log_probs(self, z: Tensor, x: Tensor, number: int, sigma: float) -> Tensor:
        assert len(z) == len(x)
        self.asked.append((number, sigma, len(z)))
        return self.data.posterior(z, sigma).log()

    def denoised(self, log_probs: Tensor, number: int) -> Tensor:
        return log_probs.exp() @ POINTS


def walk_to_the_points(step: Step, steps: int = 24) -> tuple[Tensor, Tensor, FiniteSetDenoiser]:
    """The last beliefs and the state at sigma_min of 64 random starts, walked in batches of 48 and 16."""
    plan = plan_walk(make_partition(LogNormal(), 3, 3), steps)
    z = start_state("random", 64, 2, 80.0, seed=3).double()
    fake, states = FiniteSetDenoiser(), []

    def spy(denoise: Denoise, state: Tensor, sigma: float, next_sigma: float) -> Tensor:
        states.append(step(denoise, state, sigma, next_sigma))
        return states[-1]

    def inputs() -> Iterator[Tensor]:
        yield torch.zeros(48, 1)
        yield torch.zeros(16, 1)

    beliefs = list(walk(fake, plan, z, inputs, spy))
    assert [call for call, _ in beliefs] == list(plan)
    assert all(belief.shape == (64, 3) for _, belief in beliefs)
    # A call's belief is the one at its own level, not the one of Heun's second look.
    torch.testing.assert_close(beliefs[0][1].exp(), fake.data.posterior(z, 80.0))
    return beliefs[-1][1], torch.cat(states[-2:]), fake


@pytest.mark.parametrize("step", [euler_step, heun_step])
def test_walk_lands_on_the_points(step: Step) -> None:
    belief, state, _ = walk_to_the_points(step)
    nearest = torch.cdist(state, POINTS).min(1)
    assert float(nearest.values.max()) < 0.02
    assert set(nearest.indices.tolist()) == {0, 1, 2}
    assert torch.equal(belief.argmax(1), nearest.indices)
    # Batches are put together in the order of z, and each call of the plan is one step of its own.
    levels = LogNormal().level(np.linspace(0, 1, 25)).tolist()
    whole = integrate(FiniteSet(POINTS), start_state("random", 64, 2, 80.0, seed=3).double(), levels, step)
    torch.testing.assert_close(state, whole, rtol=0, atol=1e-6)


def test_walk_with_the_printed_sign_would_land_nowhere() -> None:
    _, state, _ = walk_to_the_points(printed_step)
    assert float(torch.cdist(state, POINTS).min()) > 1


def test_walk_asks_the_planned_block_once_a_batch() -> None:
    _, _, fake = walk_to_the_points(euler_step)
    plan = plan_walk(make_partition(LogNormal(), 3, 3), 24)
    assert fake.asked == [(call.block, call.sigma, n) for call in plan for n in (48, 16)]


def test_heuns_second_look_is_the_same_blocks() -> None:
    _, _, fake = walk_to_the_points(heun_step)
    plan = plan_walk(make_partition(LogNormal(), 3, 3), 24)
    expected = [(call.block, level, n) for call in plan for n in (48, 16) for level in (call.sigma, call.next_sigma)]
    assert fake.asked == expected


# -- starts -------------------------------------------------------------------------------------------------------


def test_zero_start_is_the_centre() -> None:
    assert torch.equal(start_state("zero", 3, 2, 80.0, seed=0), torch.zeros(3, 2))


def test_random_start_is_seeded_and_numbered() -> None:
    first = start_state("random", 2000, 4, 80.0, seed=0)
    assert torch.equal(first, start_state("random", 2000, 4, 80.0, seed=0))
    assert not torch.equal(first, start_state("random", 2000, 4, 80.0, seed=0, number=1))
    assert not torch.equal(first, start_state("random", 2000, 4, 80.0, seed=1))
    # sigma_max * eps: rms 80, to within five standard errors of 8,000 numbers.
    assert float(first.square().mean().sqrt()) == pytest.approx(80, rel=5 / math.sqrt(2 * 8000))


@pytest.mark.parametrize("few", [1, 3, 5, 8, 17, 100])
def test_random_start_of_an_example_does_not_depend_on_how_many_there_are(few: int) -> None:
    many = start_state("random", 200, 9, 80.0, seed=0)
    assert torch.equal(start_state("random", few, 9, 80.0, seed=0), many[:few])


def test_random_start_leaves_the_global_generator_alone() -> None:
    state = torch.random.get_rng_state()
    start_state("random", 10, 4, 80.0, seed=0)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_unknown_starts_are_refused() -> None:
    with pytest.raises(InputError, match=" or ".join(STARTS)):
        start_state("ones", 1, 1, 80.0, seed=0)
