"""The same network trained by backpropagation through all of its layers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusionblocks import seeds
from diffusionblocks.families.base import Family
from diffusionblocks.train import Job, TrainSettings


def jobs(family: Family, batches: Callable[[int], Callable[[int], object]], settings: TrainSettings) -> list[Job]:
    """One job: all layers. It draws as no block does (`seeds.NO_BLOCK`)."""
    layers = tuple(layer for group in family.partition.layers for layer in group)
    return [plain_job(family, "network", layers, seeds.NO_BLOCK, batches)]


def plain_job(
    family: Family,
    part: str,
    layers: tuple[int, ...],
    block: int,
    batches: Callable[[int], Callable[[int], object]],
) -> Job:
    """A plain network of some layers, with the draws of `block`."""

    def losses(network: nn.Module, batch: Any, step: int) -> Float[Tensor, " n"]:
        return family.plain_losses(network, batch.to(next(network.parameters()).device))

    return Job(
        part=part,
        layers=len(layers),
        build=lambda: family.seeded(block, lambda: family.make_plain(layers)),
        batches=batches(block),
        losses=losses,
    )


def log_probs(networks: Sequence[nn.Module], x: Tensor) -> Float[Tensor, "n classes"]:
    """log p(y | x) of the only network."""
    (network,) = networks
    logits: Tensor = network(x)
    return torch.log_softmax(logits.float(), dim=1)
