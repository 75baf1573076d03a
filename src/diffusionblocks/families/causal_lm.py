"""Family 4: an autoregressive language model (Llama's shape).

The target y_i of slot i is the code of the *next* token (a fixed random unit vector), x_i the token in the slot:

    tokens   t_0 t_1 ... t_T        x_i = t_i,   y_i = t_(i+1),   i = 0 .. T-1
    two streams over the slots: clean i sees clean j <= i; noisy i sees clean j < i and itself

A noisy slot starts as the ordinary stream, embed(x_i), plus a projection of the noisy code that starts at 0: an
untrained block computes what the plain network on its layers computes (the paper feeds the noisy code alone:
docs/deviations.md). The clean stream depends neither on z nor on sigma: its keys and values serve every step of a walk
and every new token.

One noise level a sequence. Cross-entropy, mean over the slots, in nats a token.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from diffusionblocks import objective, seeds
from diffusionblocks.block import LayerStack, LlamaLayer, NoiseEmbedding
from diffusionblocks.errors import InputError
from diffusionblocks.families.base import Family, Shell
from diffusionblocks.layers import random_codes, rms_norm
from diffusionblocks.noise import Preconditioning
from diffusionblocks.partition import Draw, Partition


@dataclass(frozen=True)
class CausalLMSettings:
    """The network.

    Attributes:
        kv_heads: heads of keys and values; it must divide heads.
        mlp: hidden width of each layer's SwiGLU.
        vocabulary: how many tokens there are; token numbers lie below it.
        tokens: slots of a training sequence.
        condition_width: width of the noise condition; costs 6 width (condition_width + 1) parameters a layer.
        gates: what the residual gates start at; 1 starts as the plain network, 0 as the identity (adaLN-zero).
        code_dim: dimensions of the codes. In 64 the nearest of 100,000 random unit vectors is at a cosine of about 0.6
            (sqrt(2 ln(vocabulary) / code_dim)), and z stays small beside the stream of the layers.
        chunk: tokens whose logits exist at a time in training; 0 keeps all of them for the backward pass.
    """

    layers: int = 6
    width: int = 128
    heads: int = 4
    kv_heads: int = 4
    mlp: int = 384
    vocabulary: int = 256
    tokens: int = 128
    condition_width: int = 16
    gates: float = 1.0
    code_dim: int = 64
    code_norm: float = 1.0
    chunk: int = 1024

    def __post_init__(self) -> None:
        positive = ("layers", "width", "heads", "kv_heads", "mlp", "tokens", "condition_width", "code_dim", "code_norm")
        for name in positive:
            if getattr(self, name) <= 0:
                raise InputError(f"{name} {getattr(self, name)} is out of range: choose a number above 0")
        if self.vocabulary < 2:
            raise InputError(f"vocabulary {self.vocabulary} is out of range: choose 2 or more")
        if self.chunk < 0:
            raise InputError(f"chunk {self.chunk} is out of range: choose a number of tokens, or 0 for all at once")
        if self.width % (2 * self.heads):
            raise InputError(
                f"width {self.width} isn't an even multiple of heads {self.heads}: "
                "choose heads of an even width, which rotary positions turn in pairs"
            )
        if self.heads % self.kv_heads:
            raise InputError(
                f"heads {self.heads} isn't a multiple of kv_heads {self.kv_heads}: choose kv_heads that divide it"
            )


@dataclass(frozen=True)
class TokenBatch:
    """Sequences of T + 1 tokens: T to read, and the T that follow them one slot later."""

    tokens: Int[Tensor, "n slots_and_one"]

    @property
    def x(self) -> Int[Tensor, "n tokens"]:
        return self.tokens[:, :-1]

    @property
    def y(self) -> Int[Tensor, "n tokens"]:
        return self.tokens[:, 1:]

    def to(self, device: torch.device | str) -> "TokenBatch":
        return TokenBatch(self.tokens.to(device))


class Head(nn.Module):
    """The final norm and the map to logits. It starts at 0: all tokens are believed alike, ln(vocabulary) nats."""

    def __init__(self, settings: CausalLMSettings) -> None:
        super().__init__()
        self.chunk = settings.chunk
        self.norm = rms_norm(settings.width)
        self.logits = nn.Linear(settings.width, settings.vocabulary, bias=False)
        nn.init.zeros_(self.logits.weight)

    def forward(self, h: Float[Tensor, "n tokens width"]) -> Float[Tensor, "n tokens vocabulary"]:
        return self.logits(self.norm(h))

    def losses(self, h: Float[Tensor, "n tokens width"], y: Int[Tensor, "n tokens"]) -> Float[Tensor, " n"]:
        return objective.chunked_cross_entropy(self.norm(h), self.logits.weight, y, self.chunk)


class CausalLMShell(Shell):
    """Embedding, the noisy codes' way in, and the head."""

    def __init__(
        self, settings: CausalLMSettings, codes: Float[Tensor, "vocabulary dim"], preconditioning: Preconditioning
    ) -> None:
        super().__init__()
        self.scalings = preconditioning
        self.embedding = nn.Embedding(settings.vocabulary, settings.width)
        self.z_in = nn.Linear(settings.code_dim, settings.width, bias=False)
        nn.init.zeros_(self.z_in.weight)
        self.noise = NoiseEmbedding(settings.condition_width)
        self.head = Head(settings)
        self.table: Tensor
        # Not part of a block's file: the table is common, written once beside the blocks.
        self.register_buffer("table", codes, persistent=False)

    def codes(self) -> Float[Tensor, "vocabulary dim"]:
        return self.table

    def enter(
        self, z: Float[Tensor, "n tokens dim"], x: Int[Tensor, "n tokens"], sigma: Float[Tensor, " n"]
    ) -> tuple[Float[Tensor, "n tokens width"], Float[Tensor, "n c"], Float[Tensor, "n tokens width"]]:
        clean = self.embedding(x)
        noisy = clean + self.z_in(self.scalings.c_in(sigma)[:, None, None] * z)
        return noisy, self.noise(self.scalings.c_noise(sigma)), clean

    def read(
        self, h: Float[Tensor, "n tokens width"], z: Float[Tensor, "n tokens dim"], sigma: Float[Tensor, " n"]
    ) -> Float[Tensor, "n tokens vocabulary"]:
        return self.head(h)

    def losses(
        self,
        h: Float[Tensor, "n tokens width"],
        z: Float[Tensor, "n tokens dim"],
        sigma: Float[Tensor, " n"],
        y: Int[Tensor, "n tokens"],
    ) -> Float[Tensor, " n"]:
        return self.head.losses(h, y)


class PlainCausalLM(nn.Module):
    """The same network without noise: one stream."""

    def __init__(self, settings: CausalLMSettings, stack: LayerStack) -> None:
        super().__init__()
        self.embedding = nn.Embedding(settings.vocabulary, settings.width)
        self.stack = stack
        self.head = Head(settings)

    def forward(self, x: Int[Tensor, "n tokens"], y: Int[Tensor, "n tokens"] | None = None) -> Tensor:
        """Logits [n, tokens, vocabulary] of the token after each; with y, each example's loss [n]."""
        h = self.stack(self.embedding(x))
        return self.head(h) if y is None else self.head.losses(h, y)


class CausalLM(Family):
    """Autoregressive language modelling in blocks.

    Args:
        weight: weight of each example's cross-entropy: "none", "edm" or "edm_clamped".
    """

    def __init__(
        self,
        settings: CausalLMSettings,
        partition: Partition,
        seed: int,
        shell: str = "per_block",
        weight: str = "none",
    ) -> None:
        super().__init__(partition, seed, shell)
        if weight not in objective.WEIGHTS:
            raise InputError(f"unknown weight '{weight}': choose {', '.join(objective.WEIGHTS)}")
        self.settings, self.weight = settings, weight
        self.read_out = settings.vocabulary
        self.preconditioning = Preconditioning(settings.code_norm / settings.code_dim**0.5)

    def make_codes(self) -> Float[Tensor, "vocabulary dim"]:
        """The frozen table of target codes, of norm code_norm; the same at every call."""
        s = self.settings
        generator = seeds.generator(self.seed, seeds.NO_BLOCK, "codes")
        return s.code_norm * random_codes(s.vocabulary, s.code_dim, generator)

    def make_shell(self) -> CausalLMShell:
        # The table is made here, not in __init__: a family that only plans costs no memory.
        return CausalLMShell(self.settings, self.make_codes(), self.preconditioning)

    def make_layer(self) -> LlamaLayer:
        s = self.settings
        return LlamaLayer(s.width, s.heads, s.kv_heads, s.mlp, s.condition_width, s.gates)

    def make_plain(self, layers: tuple[int, ...]) -> PlainCausalLM:
        s = self.settings
        stack = LayerStack({number: LlamaLayer(s.width, s.heads, s.kv_heads, s.mlp) for number in layers})
        return PlainCausalLM(s, stack)

    def batch_like(self, n: int) -> TokenBatch:
        return TokenBatch(torch.zeros(n, self.settings.tokens + 1, dtype=torch.long))

    def losses(
        self, block: nn.Module, batch: TokenBatch, draw: Draw, generator: torch.Generator | None
    ) -> Float[Tensor, " n"]:
        assert isinstance(block.shell, CausalLMShell)
        z = self.noised(block.shell.codes()[batch.y], draw, generator)
        losses: Tensor = block(z, batch.x, draw, batch.y)
        return losses * objective.weights(self.weight, draw.sigma, self.preconditioning)

    def plain_losses(self, network: nn.Module, batch: TokenBatch) -> Float[Tensor, " n"]:
        return network(batch.x, batch.y)
