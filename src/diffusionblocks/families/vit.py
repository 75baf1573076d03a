"""Family 1: image classification with a vision transformer.

The target y is a class's code (a fixed unit vector). Tokens: image patches, a CLS token, and a z token that carries the
noisy code. Cross-entropy on a head; D = softmax(logits) @ codes, with the same table that noised the target.

    [patches | CLS, z]      "|": with an isolated context the patches see only each other

Where we differ from the published recipe (every part a shell of its own, frozen codes, read-out from CLS, gates at 1,
no weight) and what each difference measured: docs/deviations.md.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusionblocks import objective, seeds
from diffusionblocks.block import ConditionedLayer, LayerStack, NoiseEmbedding
from diffusionblocks.data import Batch
from diffusionblocks.errors import InputError
from diffusionblocks.families.base import Family, Shell
from diffusionblocks.layers import Patches, random_codes, simplex_codes, unit_norm
from diffusionblocks.noise import Preconditioning
from diffusionblocks.partition import Draw, Partition

CONTEXTS = ("isolated", "joint")
READOUTS = ("cls", "z", "mix")
CODES = ("simplex", "random", "learned")


@dataclass(frozen=True)
class ViTSettings:
    """The network.

    Attributes:
        mlp: hidden width of each layer's MLP.
        patch: side of a patch in pixels; it must divide the image's side.
        condition_width: width of the noise condition; costs 6 width (condition_width + 1) parameters a layer.
        gates: what the residual gates start at; 1 starts as the plain network, 0 as the identity (adaLN-zero).
        context: "isolated" (patches see only each other) or "joint" (all tokens see each other, as in the paper).
        readout: the head reads "cls", the "z" token, or the preconditioned "mix" c_skip z + c_out F (as published).
        codes: "simplex" (classes - 1 dimensions), "random" unit vectors of code_dim, or "learned" ones (joint shell).
        code_dim: dimensions of random and learned codes; the simplex derives its own.
    """

    layers: int = 12
    width: int = 64
    heads: int = 4
    mlp: int = 256
    patch: int = 2
    condition_width: int = 16
    gates: float = 1.0
    context: str = "isolated"
    readout: str = "cls"
    codes: str = "simplex"
    code_dim: int | None = None
    code_norm: float = 1.0

    def __post_init__(self) -> None:
        for name, allowed in (("context", CONTEXTS), ("readout", READOUTS), ("codes", CODES)):
            if getattr(self, name) not in allowed:
                raise InputError(f"unknown {name} '{getattr(self, name)}': choose {', '.join(allowed)}")
        for name in ("layers", "width", "heads", "mlp", "patch", "condition_width", "code_norm"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} {getattr(self, name)} is out of range: choose a number above 0")
        if self.width % self.heads:
            raise InputError(f"width {self.width} isn't a multiple of heads {self.heads}: choose heads that divide it")
        if self.code_dim is not None and self.code_dim < 1:
            raise InputError(f"code_dim {self.code_dim} is out of range: choose 1 or more, or leave it out for width")
        if self.codes == "simplex" and self.code_dim is not None:
            raise InputError("code_dim has no effect on simplex codes (classes - 1 dimensions): leave it out")


@dataclass(frozen=True)
class Images:
    """What the network must know of the data: [channels, size, size] images of `classes` classes."""

    size: int
    channels: int
    frequencies: tuple[float, ...]

    @property
    def classes(self) -> int:
        return len(self.frequencies)


def make_codes(settings: ViTSettings, classes: int, seed: int) -> Float[Tensor, "classes dim"]:
    """The table of target codes, [classes, dim], of norm code_norm; frozen unless `learned`."""
    if classes < 2:
        raise InputError(f"{classes} class can't be told apart from anything: classification needs 2 or more")
    if settings.codes == "simplex":
        return settings.code_norm * simplex_codes(classes)
    dim = settings.code_dim or settings.width
    return settings.code_norm * random_codes(classes, dim, seeds.generator(seed, seeds.NO_BLOCK, "codes"))


class ViTShell(Shell):
    """Patches, CLS and z tokens on the way in; the head on the way out."""

    def __init__(self, settings: ViTSettings, images: Images, codes: Tensor, preconditioning: Preconditioning) -> None:
        super().__init__()
        width, dim = settings.width, codes.shape[1]
        self.readout, self.scalings, self.norm_of_codes = settings.readout, preconditioning, settings.code_norm
        self.patches = Patches(images.size, images.channels, settings.patch, width)
        self.isolated = settings.context == "isolated"
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.z_in = nn.Linear(dim, width)
        self.noise = NoiseEmbedding(settings.condition_width)
        self.norm = nn.LayerNorm(width)
        self.z_out = nn.Linear(width, dim) if self.readout == "mix" else None
        self.head = _zero_head(dim if self.readout == "mix" else width, images.classes)
        if settings.codes == "learned":
            self.table = nn.Parameter(codes.clone())
        else:
            # Not part of a block's file: the table is common, written once beside the blocks.
            self.register_buffer("table", codes, persistent=False)

    def codes(self) -> Float[Tensor, "classes dim"]:
        return self.norm_of_codes * unit_norm(self.table) if isinstance(self.table, nn.Parameter) else self.table

    def enter(
        self, z: Float[Tensor, "n dim"], x: Float[Tensor, "n channels size size"], sigma: Float[Tensor, " n"]
    ) -> tuple[Float[Tensor, "n tokens width"], Float[Tensor, "n c"], Float[Tensor, "n patches width"] | None]:
        z_token = self.z_in(self.scalings.c_in(sigma)[:, None] * z)[:, None]
        noisy, patches = torch.cat([self.cls.expand(len(x), -1, -1), z_token], dim=1), self.patches(x)
        condition = self.noise(self.scalings.c_noise(sigma))
        if self.isolated:
            return noisy, condition, patches
        return torch.cat([patches, noisy], dim=1), condition, None

    def read(
        self, h: Float[Tensor, "n tokens width"], z: Float[Tensor, "n dim"], sigma: Float[Tensor, " n"]
    ) -> Float[Tensor, "n classes"]:
        token = self.norm(h[:, -2 if self.readout == "cls" else -1])
        if self.z_out is None:
            return self.head(token)
        c_skip, c_out = self.scalings.c_skip(sigma)[:, None], self.scalings.c_out(sigma)[:, None]
        return self.head(c_skip * z + c_out * self.z_out(token))


class PlainViT(nn.Module):
    """The same transformer without noise: patches and CLS, all tokens see each other."""

    def __init__(self, settings: ViTSettings, images: Images, stack: LayerStack) -> None:
        super().__init__()
        self.patches = Patches(images.size, images.channels, settings.patch, settings.width)
        self.cls = nn.Parameter(torch.randn(1, 1, settings.width) * 0.02)
        self.stack = stack
        self.norm = nn.LayerNorm(settings.width)
        self.head = _zero_head(settings.width, images.classes)

    def forward(self, x: Float[Tensor, "n channels size size"]) -> Float[Tensor, "n classes"]:
        tokens = torch.cat([self.patches(x), self.cls.expand(len(x), -1, -1)], dim=1)
        return self.head(self.norm(self.stack(tokens, wanted=1)[:, 0]))


def _zero_head(width: int, classes: int) -> nn.Linear:
    """Starts at 0: an untrained classifier believes every class alike, cross-entropy ln(classes)."""
    head = nn.Linear(width, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


class ViT(Family):
    """Vision transformer classification in blocks.

    Args:
        weight: weight of each example's cross-entropy: "none", "edm" or "edm_clamped".
        sigma_data: rms of the codes' coordinates; None takes code_norm / sqrt(dim).
    """

    def __init__(
        self,
        settings: ViTSettings,
        images: Images,
        partition: Partition,
        seed: int,
        shell: str = "per_block",
        weight: str = "none",
        sigma_data: float | None = None,
    ) -> None:
        super().__init__(partition, seed, shell)
        if images.size % settings.patch:
            raise InputError(
                f"images of {images.size} pixels can't be cut into patches of {settings.patch}: "
                "choose a patch that divides them"
            )
        if weight not in objective.WEIGHTS:
            raise InputError(f"unknown weight '{weight}': choose {', '.join(objective.WEIGHTS)}")
        if settings.codes == "learned" and shell != "joint":
            raise InputError("learned codes are shared by all blocks and need shell 'joint'; else choose simplex codes")
        self.settings, self.images, self.weight = settings, images, weight
        self.read_out = images.classes
        self.table = make_codes(settings, images.classes, seed)
        self.frequencies = torch.tensor(images.frequencies)
        rms = settings.code_norm / np.sqrt(self.table.shape[1])
        if sigma_data is not None and not 0.5 <= sigma_data / rms <= 2:
            warnings.warn(
                f"sigma_data {sigma_data} is far from the codes' rms {rms:.3g}: leave it out to take theirs",
                stacklevel=2,
            )
        self.preconditioning = Preconditioning(float(rms) if sigma_data is None else sigma_data)

    def make_shell(self) -> ViTShell:
        return ViTShell(self.settings, self.images, self.table, self.preconditioning)

    def make_layer(self) -> ConditionedLayer:
        s = self.settings
        return ConditionedLayer(s.width, s.heads, s.mlp, s.condition_width, s.gates)

    def make_plain(self, layers: tuple[int, ...]) -> PlainViT:
        s = self.settings
        stack = LayerStack({number: ConditionedLayer(s.width, s.heads, s.mlp) for number in layers})
        return PlainViT(s, self.images, stack)

    def batch_like(self, n: int) -> Batch:
        images = self.images
        return Batch(torch.zeros(n, images.channels, images.size, images.size), torch.zeros(n, dtype=torch.long))

    def losses(
        self, block: nn.Module, batch: Batch, draw: Draw, generator: torch.Generator | None
    ) -> Float[Tensor, " n"]:
        assert isinstance(block.shell, ViTShell)
        z = self.noised(block.shell.codes()[batch.y], draw, generator)
        loss = objective.cross_entropy(block(z, batch.x, draw), batch.y)
        return loss * objective.weights(self.weight, draw.sigma, self.preconditioning)

    def plain_losses(self, network: nn.Module, batch: Batch) -> Float[Tensor, " n"]:
        return objective.cross_entropy(network(batch.x), batch.y)
