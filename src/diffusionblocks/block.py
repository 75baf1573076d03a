"""3. The conditioned block: layers that know the noise level, and are the plain network until they learn to use it.

A pre-norm transformer layer h + f(norm(h)) becomes

    h + (gates + g(c)) * f(norm(h) * (1 + a(c)) + b(c)),      c = embedding of c_noise = ln(sigma)/4,

with a, b, g one linear map from a narrow c, zero at the start (adaLN; Peebles & Xie 2023, whose gates start at 0). With
gates = 1 the block starts as the network it was. A full-width c would cost 6 width^2 a layer, half of the layer again;
a narrow one costs 6 width (condition_width + 1).
"""

import abc
import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffusionblocks.layers import MLP, Attention, CausalAttention, SwiGLU, rms_norm, scaled_norm

Streams = tuple[Tensor, Tensor | None]  # the tokens, and those of the isolated context
Values = tuple[Tensor, ...] | None  # scale, shift and gate of attention and of MLP; None where nothing is modulated


class NoiseEmbedding(nn.Module):
    """c_noise to the layers' condition: Fourier features, a linear map, SiLU.

    c_noise spans only [-1.55, 1.1] for sigma in [0.002, 80]: a sinusoid table made for t in 0..1000 would hardly
    change over it. Half a period to 16 periods over that span.
    """

    def __init__(self, width: int, features: int = 32) -> None:
        super().__init__()
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.logspace(-2.4, 2.6, features // 2, base=2), persistent=False)
        self.project = nn.Linear(features, width)

    def forward(self, c_noise: Float[Tensor, " n"]) -> Float[Tensor, "n width"]:
        phase = 2 * math.pi * c_noise[:, None] * self.frequencies
        features = torch.cat([phase.cos(), phase.sin()], dim=1)
        return nn.functional.silu(self.project(features))


class AdaptiveLayer(nn.Module, abc.ABC):
    """A pre-norm transformer layer with adaptive norms; condition_width = 0 leaves it a plain one.

    Tokens of an isolated context see only each other and get the fixed condition 0, so what they compute depends
    neither on z nor on sigma.
    """

    def __init__(
        self,
        width: int,
        norm: Callable[[int], nn.Module],
        attention: nn.Module,
        mlp: nn.Module,
        condition_width: int,
        gates: float,
    ) -> None:
        super().__init__()
        self.norm1, self.attention = norm(width), attention
        self.norm2, self.mlp = norm(width), mlp
        self.gates = gates
        self.modulation = nn.Linear(condition_width, 6 * width) if condition_width else None
        if self.modulation is not None:
            nn.init.zeros_(self.modulation.weight)
            nn.init.zeros_(self.modulation.bias)

    def forward(
        self,
        h: Float[Tensor, "n tokens width"],
        condition: Float[Tensor, "n c"] | None = None,
        context: Float[Tensor, "n others width"] | None = None,
        last: bool = False,
    ) -> Streams:
        """The tokens and the context after this layer.

        Args:
            last: nobody reads the context any more: only its keys and values are computed, and None returned for it.
        """
        own, fixed = None, None
        if self.modulation is not None and condition is not None:
            own, fixed = self.modulation(condition)[:, None].chunk(6, dim=-1), self.modulation.bias.chunk(6)
        still = None if context is None else _normed(self.norm1, context, fixed, 0)
        read, context_read = self.attention(_normed(self.norm1, h, own, 0), still, last)
        h = self._feed_forward(h + self._gated(read, own, 2), own)
        if context is None or last:
            return h, None
        return h, self._feed_forward(context + self._gated(context_read, fixed, 2), fixed)

    def _feed_forward(self, h: Tensor, values: Values) -> Tensor:
        return h + self._gated(self.mlp(_normed(self.norm2, h, values, 3)), values, 5)

    def _gated(self, inner: Tensor, values: Values, gate: int) -> Tensor:
        return inner if values is None else inner * (self.gates + values[gate])


def _normed(norm: nn.Module, h: Tensor, values: Values, scale: int) -> Tensor:
    """The adaptive norm: scale and shift, one of each for all tokens [width] or for each example [n, 1, width]."""
    if values is None:
        return norm(h)
    if values[scale].ndim == 1:
        return scaled_norm(norm, h, values[scale], values[scale + 1])
    return norm(h) * (1 + values[scale]) + values[scale + 1]


class ConditionedLayer(AdaptiveLayer):
    """The vision transformer's layer: LayerNorm, attention, GELU."""

    def __init__(self, width: int, heads: int, hidden: int, condition_width: int = 0, gates: float = 1.0) -> None:
        super().__init__(width, nn.LayerNorm, Attention(width, heads), MLP(width, hidden), condition_width, gates)


class LlamaLayer(AdaptiveLayer):
    """Llama's layer: RMSNorm, causal attention with rotary positions and shared keys and values, SwiGLU."""

    def __init__(
        self, width: int, heads: int, kv_heads: int, hidden: int, condition_width: int = 0, gates: float = 1.0
    ) -> None:
        attention = CausalAttention(width, heads, kv_heads)
        super().__init__(width, rms_norm, attention, SwiGLU(width, hidden), condition_width, gates)


class LayerStack(nn.Module):
    """Consecutive layers under their global numbers, so that the files of all blocks join into one network.

    `checkpointing` is switched from outside (`train.fit`): then only each layer's input is kept for the backward pass.
    """

    def __init__(self, layers: dict[int, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): layer for number, layer in layers.items()})
        self.checkpointing = False

    def forward(
        self,
        h: Float[Tensor, "n tokens width"],
        condition: Float[Tensor, "n c"] | None = None,
        context: Float[Tensor, "n others width"] | None = None,
        wanted: int | None = None,
    ) -> Float[Tensor, "n read width"]:
        """The tokens h after all layers. What isn't read is not computed in the last one.

        Args:
            context: tokens of an isolated context; none of them is returned.
            wanted: of a plain network (no condition or context), how many tokens at the end are returned; None: all.
        """
        if wanted is not None and not (condition is None and context is None):
            raise ValueError("only a plain network's tokens can be chosen: a condition or a context was given")
        layers = list(self.layers.values())
        for layer in layers:
            last = layer is layers[-1]
            if last and wanted is not None:
                context, h = h.split([h.shape[1] - wanted, wanted], dim=1)
            if self.checkpointing and torch.is_grad_enabled():
                h, context = checkpoint(
                    layer, h, condition, context, last, use_reentrant=False, preserve_rng_state=False
                )
            else:
                h, context = layer(h, condition, context, last)
        return h


def set_checkpointing(module: nn.Module, on: bool) -> None:
    """Switches activation checkpointing in every stack of layers below `module`."""
    for stack in module.modules():
        if isinstance(stack, LayerStack):
            stack.checkpointing = on
