"""Block-coordinate AdamW (BAdam; Luo, Yu and Li, NeurIPS 2024): the whole network, one block's gradients and states.

All weights are in memory and every update runs all layers forward, but only the block whose turn it is has gradients
and optimizer states; backpropagation ends below it. Each turn starts with fresh states and lasts `VISIT` updates.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor, nn

from diffusionblocks.baselines import end_to_end
from diffusionblocks.families.base import Family
from diffusionblocks.train import Job, TrainSettings

VISIT = 50


def jobs(family: Family, batches: Callable[[int], Callable[[int], object]], settings: TrainSettings) -> list[Job]:
    """One job: the end-to-end network, whose blocks take turns. Short runs have shorter turns: each block has one."""
    (job,) = end_to_end.jobs(family, batches, settings)
    blocks = family.partition.blocks
    visit = max(1, min(VISIT, settings.updates // blocks))
    return [
        replace(
            job,
            turn=lambda update: update // visit % blocks,
            active=lambda network, turn: block_parameters(network, family.partition.layers[turn]),
        )
    ]


def block_parameters(network: nn.Module, layers: tuple[int, ...]) -> Iterator[nn.Parameter]:
    """The parameters of some layers; the first layer brings what stands before the stack, the last what follows it."""
    stack = network.get_submodule("stack.layers")
    assert isinstance(stack, nn.ModuleDict)
    numbers = [int(number) for number in stack]
    owners = {parameter: int(number) for number, layer in stack.items() for parameter in layer.parameters()}
    owner = numbers[0]
    for parameter in network.parameters():
        # In order of registration: stem, layers, read-out. So what isn't a layer's belongs to the layer before it.
        owner = owners.get(parameter, numbers[-1] if owner == numbers[-1] else numbers[0])
        if owner in layers:
            yield parameter


def log_probs(networks: Sequence[nn.Module], x: Tensor) -> Float[Tensor, "n classes"]:
    """log p(y | x) of the only network."""
    return end_to_end.log_probs(networks, x)
