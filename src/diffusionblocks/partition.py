"""2. The partition: L layers and one noise law cut into B parts, and the one rule for which block owns a level.

    edges: sigma_max = e_0 > e_1 > ... > e_B = sigma_min; block b owns (e_{b+1}, e_b], block 0 the highest noise and
    the first layers (DiffusionBlocks section 3.3). Training widens a block's range by the overlap; ownership doesn't.

A block's number is drawn, or planned by index, and travels with its levels (`Draw`, `Call`). It is never guessed back
from sampled levels: with overlapping ranges that trains the neighbour now and then (docs/deviations.md).
"""

import bisect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from diffusionblocks.errors import InputError
from diffusionblocks.noise import Float64s, NoiseLaw

# Stored in every checkpoint; raised whenever the same settings would give another map from levels to blocks.
NOISE_MAP_VERSION = 1
CUTS = ("equal_mass", "uniform")
GRIDS = ("mass", "karras")


class Draw(NamedTuple):
    """A block and the noise levels it is trained at: they belong together.

    A tuple, not a dataclass: Fabric rebuilds what it passes to a module in another precision.
    """

    block: int
    sigma: Float[Tensor, " n"]


@dataclass(frozen=True)
class Call:
    """One network call of a walk: `block` takes z from `sigma` to `next_sigma`."""

    index: int
    block: int
    sigma: float
    next_sigma: float


@dataclass(frozen=True)
class Partition:
    """B blocks, each with its consecutive layers (global numbers) and its range of noise levels."""

    law: NoiseLaw
    layers: tuple[tuple[int, ...], ...]
    edges: tuple[float, ...]
    overlap: float = 0.05

    @property
    def blocks(self) -> int:
        return len(self.layers)

    def owner(self, sigma: float) -> int:
        """The block that owns a level: its upper edge belongs to it, in float64; sigma_min to the last block."""
        if not self.edges[-1] <= sigma <= self.edges[0]:
            raise InputError(f"noise level {sigma} lies outside [{self.edges[-1]}, {self.edges[0]}]")
        # Inner edges at or above sigma; negated, because bisect wants them ascending.
        return bisect.bisect_right([-edge for edge in self.edges[1:-1]], -sigma)

    def range(self, block: int) -> tuple[float, float]:
        """(lowest, highest) level that the block owns."""
        self._check(block)
        return self.edges[block + 1], self.edges[block]

    def training_range(self, block: int) -> tuple[float, float]:
        """(lowest, highest) level that the block trains on: its own range, widened by the overlap."""
        return self.law.widen(*self.range(block), self.overlap)

    def mass(self, block: int) -> float:
        """The law's share in the block's own range; the shares of all blocks sum to 1."""
        low, high = self.law.mass(self.range(block))
        return float(low - high)

    def draw(self, block: int, n: int, generator: torch.Generator) -> Draw:
        """n levels from the law restricted to the block's training range, by the inverse cdf."""
        low, high = self.training_range(block)
        at_low, at_high = self.law.mass((low, high))
        uniform = torch.rand(n, dtype=torch.float64, generator=generator).numpy()
        # Clipped: a lower tail beyond 1e-15 of the law is lost in shares near 1 (a "uniform" block may lie there).
        sigma = self.law.level(at_high + (at_low - at_high) * uniform).clip(low, high)
        return Draw(block, torch.from_numpy(sigma).float())

    def _check(self, block: int) -> None:
        if not 0 <= block < self.blocks:
            raise InputError(f"block {block} doesn't exist: this partition has blocks 0 to {self.blocks - 1}")


def split_layers(layers: int, blocks: int, sizes: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """L layers in B consecutive groups, each layer once. A remainder is spread over the first blocks.

    Args:
        sizes: layers of each block, e.g. (3, 6, 3); None for an even split.

    Raises:
        InputError: B < 1, B > L, or sizes that don't cover L layers in B blocks of one or more.
    """
    if not 1 <= blocks <= layers:
        raise InputError(f"{layers} layers can't be cut into {blocks} blocks: choose 1 to {layers} blocks")
    if sizes is None:
        sizes = [layers // blocks + (block < layers % blocks) for block in range(blocks)]
    if len(sizes) != blocks or sum(sizes) != layers or min(sizes) < 1:
        raise InputError(
            f"layer split {list(sizes)} doesn't fit: give {blocks} numbers of 1 or more that sum to {layers}"
        )
    starts = np.cumsum([0, *sizes])
    return tuple(tuple(range(int(start), int(end))) for start, end in pairwise(starts))


def make_partition(
    law: NoiseLaw,
    layers: int,
    blocks: int,
    sizes: Sequence[int] | None = None,
    cut: str = "equal_mass",
    overlap: float = 0.05,
) -> Partition:
    """Cuts layers and law into B blocks.

    Args:
        cut: "equal_mass", the same share of the law for each block (the paper's equi-probable partition), or
            "uniform", equal steps of log sigma (its ablation).
        overlap: gamma; each range is widened by (high/low)^gamma on both sides.
    """
    if not 0 <= overlap <= 1:
        raise InputError(f"overlap {overlap} is out of range: choose 0 (none) to 1; the paper uses 0.05 and 0.1")
    groups = split_layers(layers, blocks, sizes)
    if cut == "equal_mass":
        edges = law.level(np.arange(blocks + 1) / blocks)
    elif cut == "uniform":
        edges = np.geomspace(law.sigma_max, law.sigma_min, blocks + 1)
        edges[0], edges[-1] = law.sigma_max, law.sigma_min
    else:
        raise InputError(f"unknown cut '{cut}': choose {' or '.join(CUTS)}")
    if not (np.diff(edges) < 0).all():
        raise InputError(f"the noise law is too narrow for {blocks} blocks: two of their edges coincide")
    return Partition(law, groups, tuple(float(edge) for edge in edges), overlap)


def plan_walk(partition: Partition, steps: int, grid: str = "mass") -> tuple[Call, ...]:
    """T calls at T descending levels from sigma_max; sigma_min is the end point and is not called.

    On the "mass" grid, call i belongs to block floor(i B / T) by index and divides its block's mass evenly, so that
    calls are shared out to within one; on the "karras" grid (rho = 7) the owner of each level is called.
    One step is one call at sigma_max. Warns where a block is never called.
    """
    if steps < 1:
        raise InputError(f"a walk of {steps} steps goes nowhere: choose 1 or more")
    if grid == "mass":
        blocks = [call * partition.blocks // steps for call in range(steps)]
        levels = _levels_by_mass(partition, steps)
    elif grid == "karras":
        levels = karras_levels(partition.law.sigma_min, partition.law.sigma_max, steps + 1)
        blocks = [partition.owner(float(sigma)) for sigma in levels[:-1]]
    else:
        raise InputError(f"unknown grid '{grid}': choose {' or '.join(GRIDS)}")
    idle = sorted(set(range(partition.blocks)) - set(blocks))
    if idle:
        warnings.warn(f"a {steps}-step walk on the {grid} grid never calls block(s) {idle}", stacklevel=2)
    return tuple(
        Call(index, block, float(levels[index]), float(levels[index + 1])) for index, block in enumerate(blocks)
    )


def _levels_by_mass(partition: Partition, steps: int) -> Float64s:
    """steps + 1 levels; position i B / T, whose whole part is the block and whose rest a share of the block's mass."""
    whole, rest = np.divmod(np.arange(steps) * partition.blocks, steps)
    at_edges = partition.law.mass(partition.edges)
    levels = partition.law.level(at_edges[whole] + rest / steps * (at_edges[whole + 1] - at_edges[whole]))
    # A position on an edge takes the edge itself, not its image under level(mass(.)).
    levels = np.where(rest == 0, np.asarray(partition.edges)[whole], levels)
    return np.append(levels, partition.edges[-1])


def karras_levels(sigma_min: float, sigma_max: float, points: int, rho: float = 7.0) -> Float64s:
    """EDM's grid (Karras et al. 2022, Eq. 5): equal steps of sigma^(1/rho), both ends included and pinned."""
    levels = np.linspace(sigma_max ** (1 / rho), sigma_min ** (1 / rho), points) ** rho
    levels[0], levels[-1] = sigma_max, sigma_min
    return levels
