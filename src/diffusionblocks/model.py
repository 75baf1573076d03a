"""Blocks, partition and codes as one denoiser D(z, x, sigma) that holds one block at a time."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from diffusionblocks.families.base import Block, Family
from diffusionblocks.partition import Draw


class Denoiser:
    """The trained chain of a family with discrete targets.

    Args:
        load: gives block number b with its trained weights; called again whenever the walk comes to another block, so
            that no two blocks need to be in memory together.
    """

    def __init__(self, family: Family, load: Callable[[int], Block]) -> None:
        self.family = family
        self._load = load
        self._held: Block | None = None

    def block(self, number: int) -> Block:
        """Block `number` in evaluation mode; the one held before is let go."""
        if self._held is None or self._held.number != number:
            self._held = None
            self._held = self._load(number).eval()
        return self._held

    @torch.no_grad()
    def log_probs(self, z: Float[Tensor, "n dim"], x: Tensor, number: int, sigma: float) -> Float[Tensor, "n classes"]:
        """log p(y | z, x) as the block believes it at level sigma."""
        levels = torch.full((len(z),), sigma, device=z.device)
        logits: Tensor = self.block(number)(z, x, Draw(number, levels))
        return logits.float().log_softmax(1)

    @torch.no_grad()
    def denoised(self, log_probs: Float[Tensor, "n classes"], number: int) -> Float[Tensor, "n dim"]:
        """D = sum over classes of p(class) code(class): the belief's mean in the space of the target."""
        return log_probs.exp() @ self.block(number).shell.codes()
