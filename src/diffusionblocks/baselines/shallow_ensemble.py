"""The control: B plain networks of L/B layers each, trained alone without any noise, their log-probabilities averaged.

It has the blocks' memory, the blocks' work and no diffusion. A chain that doesn't beat it isn't earning its keep.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusionblocks.baselines.end_to_end import plain_job
from diffusionblocks.families.base import Family
from diffusionblocks.train import Job, TrainSettings


def jobs(family: Family, batches: Callable[[int], Callable[[int], object]], settings: TrainSettings) -> list[Job]:
    """One job for each block's layers, with that block's draws."""
    groups = enumerate(family.partition.layers)
    return [plain_job(family, f"network-{block}", layers, block, batches) for block, layers in groups]


def log_probs(networks: Sequence[nn.Module], x: Tensor) -> Float[Tensor, "n classes"]:
    """The mean of the networks' log-probabilities, normalised: the same read-out as the blocks' average."""
    each = torch.stack([network(x).float().log_softmax(1) for network in networks])
    return each.mean(0).log_softmax(1)
