"""7. Evaluation that tells the truth: a walk over all samples of a data set, and what every part of it contributes."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusionblocks import metrics, seeds
from diffusionblocks.data import Batch, ImageData, evaluation_batches
from diffusionblocks.families.base import Block
from diffusionblocks.families.vit import ViT
from diffusionblocks.model import Denoiser
from diffusionblocks.noise import log_posterior_from_z
from diffusionblocks.partition import Call, Draw, plan_walk
from diffusionblocks.sample import SOLVERS, start_state, walk

BATCH = 256
SIGMAS_PER_BLOCK = 4


def labels_of(data: ImageData, split: str) -> Tensor:
    return torch.from_numpy(getattr(data, split).labels)


def walk_beliefs(
    denoiser: Denoiser,
    data: ImageData,
    plan: Sequence[Call],
    split: str = "test",
    start: str = "zero",
    starts: int = 1,
    solver: str = "euler",
    seed: int = 0,
) -> Float[Tensor, "calls n classes"]:
    """log p(y | x) of every example after each call of the walk; the mean over `starts` starts where there are more.

    Uses every example of the split. Random starts derive from (seed, number of the start), so a second evaluation
    gives the same figures.
    """
    n, dim = len(getattr(data, split)), family_of(denoiser).table.shape[1]
    runs = []
    for number in range(starts):
        z = start_state(start, n, dim, plan[0].sigma, seed, number)
        steps = walk(denoiser, plan, z, lambda: (b.x for b in evaluation_batches(data, split, BATCH)), SOLVERS[solver])
        runs.append(torch.stack([beliefs for _, beliefs in steps]))
    return torch.stack([metrics.mixture(torch.stack([run[call] for run in runs])) for call in range(len(plan))])


def family_of(denoiser: Denoiser) -> ViT:
    assert isinstance(denoiser.family, ViT)
    return denoiser.family


def answer(beliefs: Float[Tensor, "calls n classes"], kind: str) -> Float[Tensor, "n classes"]:
    """One prediction from the calls' beliefs: the "last" one, or the "average" of their log-probabilities."""
    return beliefs[-1] if kind == "last" else metrics.combine(beliefs)


def figures_of(log_probs: Float[Tensor, "n classes"], labels: Tensor) -> dict[str, float]:
    return {
        "accuracy": metrics.accuracy(log_probs, labels),
        "cross_entropy": metrics.cross_entropy(log_probs, labels),
        "calibration_error": metrics.calibration_error(log_probs, labels),
    }


def chain_report(
    denoiser: Denoiser, data: ImageData, plan: Sequence[Call], answered: str, split: str = "test", **start: Any
) -> dict[str, Any]:
    """The walk's figures: of its answer, and after each call."""
    labels = labels_of(data, split)
    beliefs = walk_beliefs(denoiser, data, plan, split, **start)
    return {
        **figures_of(answer(beliefs, answered), labels),
        "calls": [
            {"call": call.index, "block": call.block, "sigma": call.sigma, **figures_of(belief, labels)}
            for call, belief in zip(plan, beliefs, strict=True)
        ],
    }


def step_sweep(denoiser: Denoiser, data: ImageData, grid: str, seed: int, split: str = "test") -> list[dict[str, Any]]:
    """Accuracy by number of steps, start and answer. All of them: none is chosen by the split it is shown on."""
    labels, blocks = labels_of(data, split), denoiser.family.partition.blocks
    rows = []
    for steps in sorted({1, blocks, 2 * blocks, 4 * blocks}):
        calls = plan_walk(denoiser.family.partition, steps, grid) if steps >= blocks else one_call(denoiser)
        for start, starts in (("zero", 1), ("random", 1), ("random", 8)):
            beliefs = walk_beliefs(denoiser, data, calls, split, start, starts, seed=seed)
            row = {kind: metrics.accuracy(answer(beliefs, kind), labels) for kind in ("last", "average")}
            rows.append({"steps": steps, "start": start, "starts": starts, **row})
    return rows


def one_call(denoiser: Denoiser) -> tuple[Call, ...]:
    """The walk of one step: block 0, once, at sigma_max."""
    edges = denoiser.family.partition.edges
    return (Call(0, 0, edges[0], edges[-1]),)


def contributions(
    denoiser: Denoiser, data: ImageData, plan: Sequence[Call], answered: str, split: str = "test"
) -> list[dict[str, Any]]:
    """For each block: the walk without it, and the block asked alone from the zero start."""
    labels, rows = labels_of(data, split), []
    for block in range(denoiser.family.partition.blocks):
        own = [call for call in plan if call.block == block]
        rest = [call for call in plan if call.block != block]
        alone = walk_beliefs(denoiser, data, own, split) if own else None
        without = walk_beliefs(denoiser, data, rest, split) if rest else None
        rows.append(
            {
                "block": block,
                "alone": None if alone is None else metrics.accuracy(answer(alone, answered), labels),
                "left_out": None if without is None else metrics.accuracy(answer(without, answered), labels),
            }
        )
    return rows


def probe_levels(family: ViT, block: int) -> list[float]:
    """Fixed levels at which a block is examined: sigma_max, then its training range from the top, in equal masses."""
    at_low, at_high = family.partition.law.mass(family.partition.training_range(block))
    shares = [at_high + (at_low - at_high) * part / SIGMAS_PER_BLOCK for part in range(SIGMAS_PER_BLOCK)]
    levels = [float(family.partition.law.level(share)) for share in shares]
    return levels if levels[0] == family.partition.edges[0] else [family.partition.edges[0], *levels]


@torch.no_grad()
def probe(
    family: ViT, module: nn.Module, block: int, data: ImageData, sigma: float, split: str, scrambled: bool = False
) -> dict[str, float]:
    """A block's loss on noised true targets at one level, beside what z alone reveals there.

    The noise is fixed: it derives from (seed, block, "probe"). `scrambled` gives every target another example's x.
    """
    device = next(module.parameters()).device
    assert isinstance(module, Block)
    codes = module.shell.codes().detach()
    noise = seeds.generator(family.seed, block, "probe")
    order = torch.randperm(len(getattr(data, split)), generator=seeds.generator(family.seed, block, "scramble"))
    inputs = torch.cat([batch.x for batch in evaluation_batches(data, split, BATCH)])
    labels = labels_of(data, split)
    inputs = inputs[order] if scrambled else inputs
    beliefs, floors = [], []
    for x, y in zip(inputs.split(BATCH), labels.split(BATCH), strict=True):
        draw = Draw(block, torch.full((len(y),), sigma, device=device))
        batch = Batch(x, y).to(device)
        z = family.noised(codes[batch.y], draw, noise)
        beliefs.append(module(z, batch.x, draw).float().log_softmax(1).cpu())
        floors.append(log_posterior_from_z(z.cpu(), sigma, codes.cpu(), family.frequencies))
    mine, floor = torch.cat(beliefs), torch.cat(floors)
    return {
        "cross_entropy": metrics.cross_entropy(mine, labels),
        "accuracy": metrics.accuracy(mine, labels),
        "z_alone_cross_entropy": metrics.cross_entropy(floor, labels),
        "z_alone_accuracy": metrics.accuracy(floor, labels),
    }


def block_validation(family: ViT, module: nn.Module, block: int, data: ImageData) -> dict[str, float]:
    """Early validation of one block. The headline is its loss at sigma_max, where z says nothing.

    A loss at low noise says little: there the target can be read off z. So each level's gain over z alone stands
    beside it; a block whose gain is 0 has learned nothing.
    """
    figures = {}
    for index, sigma in enumerate(probe_levels(family, block)):
        found = probe(family, module, block, data, sigma, "validation")
        if index == 0:
            figures["loss_at_sigma_max"] = found["cross_entropy"]
            figures["accuracy_at_sigma_max"] = found["accuracy"]
        figures[f"loss_at_{sigma:.4g}"] = found["cross_entropy"]
        figures[f"gain_over_z_at_{sigma:.4g}"] = found["z_alone_cross_entropy"] - found["cross_entropy"]
    return figures


def block_report(denoiser: Denoiser, data: ImageData, split: str = "test") -> list[dict[str, Any]]:
    """For each block and level: loss with its own x, with another example's x, and the floor of z alone."""
    family, rows = family_of(denoiser), []
    for block in range(family.partition.blocks):
        for sigma in probe_levels(family, block):
            # No name for the block: it would keep it alive beside the next one.
            matched = probe(family, denoiser.block(block), block, data, sigma, split)
            scrambled = probe(family, denoiser.block(block), block, data, sigma, split, scrambled=True)
            rows.append(
                {
                    "block": block,
                    "sigma": sigma,
                    **matched,
                    "scrambled_cross_entropy": scrambled["cross_entropy"],
                    "scrambled_accuracy": scrambled["accuracy"],
                }
            )
    return rows


@torch.no_grad()
def baseline_beliefs(module: Any, networks: Sequence[nn.Module], data: ImageData, split: str = "test") -> Tensor:
    """log p(y | x) of a baseline on every example, [n, classes]; `module` is the baseline's own."""
    return torch.cat([module.log_probs(networks, batch.x) for batch in evaluation_batches(data, split, BATCH)])
