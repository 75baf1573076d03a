"""The contract of a family.

A network is a stack of layers in a *shell*: what stands before the stack (stem, positions, the noisy target's way in,
the noise embedding) and after it (read-out). A `Block` is a shell and some of the layers, and a denoiser by itself:

    prediction = block(z, x, draw)          z noisy target, x condition, draw = (block, sigma of each example)
    losses = block(z, x, draw, y)            one number an example

A `Family` is a frozen description that owns no weights: it builds blocks, noises targets, scores predictions. Its
`losses(block, batch, draw, generator)` works in anybody's training loop.
"""

import abc
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusionblocks import objective, seeds
from diffusionblocks.block import LayerStack
from diffusionblocks.errors import InputError
from diffusionblocks.noise import Preconditioning
from diffusionblocks.partition import Draw, Partition

SHELLS = ("per_block", "joint")
Module = TypeVar("Module", bound=nn.Module)


class Shell(nn.Module, abc.ABC):
    """What stands outside the residual stack."""

    @abc.abstractmethod
    def enter(
        self, z: Tensor, x: Tensor, sigma: Float[Tensor, " n"]
    ) -> tuple[Float[Tensor, "n tokens width"], Float[Tensor, "n c"], Float[Tensor, "n others width"] | None]:
        """The stack's arguments: its tokens, the layers' condition, and the tokens of the isolated context.

        Those see neither z nor sigma; None where all tokens see each other.
        """

    @abc.abstractmethod
    def read(self, h: Float[Tensor, "n tokens width"], z: Tensor, sigma: Float[Tensor, " n"]) -> Tensor:
        """The prediction from the stack's output."""

    def losses(
        self, h: Float[Tensor, "n tokens width"], z: Tensor, sigma: Float[Tensor, " n"], y: Tensor
    ) -> Float[Tensor, " n"]:
        """Each example's loss from the stack's output; a large head never makes its whole prediction here."""
        return objective.cross_entropy(self.read(h, z, sigma), y)

    @abc.abstractmethod
    def codes(self) -> Tensor:
        """The one table of target codes that noising and inference share."""


class Block(nn.Module):
    """One block: layers in a shell. The shell's key carries the block's number, so all blocks' files can be joined."""

    def __init__(self, number: int, shell: Shell, stack: LayerStack, shell_name: str) -> None:
        super().__init__()
        self.number = number
        self.shells = nn.ModuleDict({shell_name: shell})
        self.stack = stack

    @property
    def shell(self) -> Shell:
        (shell,) = self.shells.values()
        assert isinstance(shell, Shell)
        return shell

    def forward(self, z: Tensor, x: Tensor, draw: Draw, y: Tensor | None = None) -> Tensor:
        """The prediction, or with the target y each example's loss [n]."""
        if draw.block != self.number:
            raise ValueError(f"levels drawn for block {draw.block} were given to block {self.number}")
        shell = self.shell
        h = self.stack(*shell.enter(z, x, draw.sigma))
        return shell.read(h, z, draw.sigma) if y is None else shell.losses(h, z, draw.sigma, y)


class Blocks(nn.Module):
    """All blocks around one shell: the published `joint` policy, in which every block updates the common parts."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    @property
    def shell(self) -> Shell:
        first = self.blocks[0]
        assert isinstance(first, Block)
        return first.shell

    def forward(self, z: Tensor, x: Tensor, draw: Draw, y: Tensor | None = None) -> Tensor:
        prediction: Tensor = self.blocks[draw.block](z, x, draw, y)
        return prediction


class Family(abc.ABC):
    """Builds and scores the blocks of one kind of network.

    Args:
        partition: which layers and noise levels each block owns.
        seed: the run's seed; weights come from (seed, block, "init").
        shell: "per_block", a shell for every block (independent blocks), or "joint", one for all.
    """

    preconditioning: Preconditioning
    #: Width of the head's output: classes, or entries of the vocabulary.
    read_out: int

    def __init__(self, partition: Partition, seed: int, shell: str = "per_block") -> None:
        if shell not in SHELLS:
            raise InputError(f"unknown shell '{shell}': choose {' or '.join(SHELLS)}")
        self.partition, self.seed, self.shell = partition, seed, shell

    @abc.abstractmethod
    def make_shell(self) -> Shell: ...

    @abc.abstractmethod
    def make_layer(self) -> nn.Module: ...

    @abc.abstractmethod
    def make_plain(self, layers: tuple[int, ...]) -> nn.Module:
        """The same network without noise, on some of its layers: what end-to-end training trains."""

    @abc.abstractmethod
    def batch_like(self, n: int) -> Any:
        """A batch of n examples of zeros: what a batch of the data looks like, for planning memory."""

    @abc.abstractmethod
    def losses(
        self, block: nn.Module, batch: Any, draw: Draw, generator: torch.Generator | None
    ) -> Float[Tensor, " n"]:
        """The weighted loss of each example when `block` denoises the batch's targets at the drawn levels."""

    @abc.abstractmethod
    def plain_losses(self, network: nn.Module, batch: Any) -> Float[Tensor, " n"]:
        """The loss of each example of the end-to-end network."""

    def step_losses(self, module: nn.Module, batch: Any, block: int, step: int) -> Float[Tensor, " n"]:
        """`losses` at levels and noise that derive from (seed, block, step), on the module's device."""
        device = next(module.parameters()).device
        draw = self.partition.draw(block, len(batch.y), seeds.generator(self.seed, block, "sigma", step))
        noise = seeds.generator(self.seed, block, "noise", step)
        return self.losses(module, batch.to(device), Draw(block, draw.sigma.to(device)), noise)

    def build_block(self, number: int) -> Block:
        """Block `number` with a shell of its own; its weights depend on nothing but (seed, number)."""
        layers = self.partition.layers[number]
        return self.seeded(number, lambda: Block(number, self.make_shell(), self._stack(layers), str(number)))

    def build_joint(self) -> Blocks:
        """All blocks around one shell."""
        shell = self.seeded(seeds.NO_BLOCK, self.make_shell)
        stacks = [
            self.seeded(number, partial(self._stack, layers)) for number, layers in enumerate(self.partition.layers)
        ]
        return Blocks([Block(number, shell, stack, "joint") for number, stack in enumerate(stacks)])

    def seeded(self, block: int, build: Callable[[], Module]) -> Module:
        """Runs `build` with torch's global generator seeded by (seed, block, "init"), and puts its state back."""
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which would seed accelerators too, whose state isn't put back.
            torch.default_generator.manual_seed(seeds.derive(self.seed, block, "init"))
            return build()

    def _stack(self, layers: tuple[int, ...]) -> LayerStack:
        return LayerStack({number: self.make_layer() for number in layers})

    def noised(self, y: Tensor, draw: Draw, generator: torch.Generator | None) -> Tensor:
        """z = y + sigma eps, with eps drawn on the CPU."""
        eps = torch.randn(y.shape, generator=generator).to(y.device)
        return y + draw.sigma.reshape(-1, *[1] * (y.ndim - 1)) * eps
