"""6. Walks: from noise at sigma_max down to sigma_min, one block after the other.

    Euler:  z_next = (s_next/s) z + (1 - s_next/s) D(z, s)            dz/ds = (z - D)/s, the probability-flow ODE

The paper prints Eq. 3-5 with the opposite sign, which moves away from D; at s_next -> 0 the step must end at D.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from diffusionblocks import seeds
from diffusionblocks.errors import InputError
from diffusionblocks.model import Denoiser
from diffusionblocks.partition import Call

STARTS = ("zero", "random")
Denoise = Callable[[Tensor, float], Tensor]
Step = Callable[[Denoise, Tensor, float, float], Tensor]


def euler_step(denoise: Denoise, z: Tensor, sigma: float, next_sigma: float) -> Tensor:
    """First order: one call."""
    ratio = next_sigma / sigma
    return ratio * z + (1 - ratio) * denoise(z, sigma)


def heun_step(denoise: Denoise, z: Tensor, sigma: float, next_sigma: float) -> Tensor:
    """Second order: the slopes at both ends of the Euler step, averaged (Karras et al. 2022, algorithm 1)."""
    slope = (z - denoise(z, sigma)) / sigma
    ahead = z + (next_sigma - sigma) * slope
    next_slope = (ahead - denoise(ahead, next_sigma)) / next_sigma
    return z + (next_sigma - sigma) * (slope + next_slope) / 2


SOLVERS: dict[str, Step] = {"euler": euler_step, "heun": heun_step}


def solver(name: str) -> Step:
    if name not in SOLVERS:
        raise InputError(f"unknown solver '{name}': choose {' or '.join(SOLVERS)}")
    return SOLVERS[name]


def integrate(denoise: Denoise, z: Tensor, levels: Sequence[float], step: Step = euler_step) -> Tensor:
    """Takes z from the first level to the last; any denoiser, no blocks."""
    for sigma, next_sigma in pairwise(levels):
        z = step(denoise, z, sigma, next_sigma)
    return z


def start_state(kind: str, n: int, dim: int, sigma_max: float, seed: int, number: int = 0) -> Float[Tensor, "n dim"]:
    """z at sigma_max: "zero", the law's centre, for prediction; or "random", sigma_max * eps, for sampling.

    The random start `number` of an example depends on the seed and the example's index alone.
    """
    if kind == "zero":
        return torch.zeros(n, dim)
    if kind == "random":
        # Whole sixteens a row: torch draws a tensor's last, incomplete sixteen anew, so an example's would depend on n.
        rows = torch.randn(n, -(-dim // 16) * 16, generator=seeds.generator(seed, seeds.NO_BLOCK, "start", number))
        return sigma_max * rows[:, :dim]
    raise InputError(f"unknown start '{kind}': choose {' or '.join(STARTS)}")


@torch.no_grad()
def walk(
    denoiser: Denoiser,
    plan: Sequence[Call],
    z: Float[Tensor, "n dim"],
    inputs: Callable[[], Iterable[Tensor]],
    step: Step = euler_step,
) -> Iterator[tuple[Call, Float[Tensor, "n classes"]]]:
    """Walks all examples down together, so that each block is loaded once per stretch of its calls.

    Args:
        z: the state at the plan's first level, [n, dim].
        inputs: gives the examples' conditions x in batches, in the order of z; called once for each call of the plan.

    Yields:
        each call and log p(y | z, x) of all examples at it.
    """
    for call in plan:
        beliefs, states, done = [], [], 0
        for x in inputs():
            belief, state = _one_call(denoiser, call, z[done : done + len(x)], x, step)
            beliefs.append(belief)
            states.append(state)
            done += len(x)
        z = torch.cat(states)
        yield call, torch.cat(beliefs)


def _one_call(denoiser: Denoiser, call: Call, z: Tensor, x: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """The belief at the call's level, and the state at its next one."""
    seen: list[Tensor] = []

    def denoise(state: Tensor, sigma: float) -> Tensor:
        # Heun's second look, at the lower edge, is still this block's: only one block is in memory.
        seen.append(denoiser.log_probs(state, x, call.block, sigma))
        return denoiser.denoised(seen[-1], call.block)

    state = step(denoise, z, call.sigma, call.next_sigma)
    return seen[0], state
