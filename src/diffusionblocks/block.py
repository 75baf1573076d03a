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

from diffusionblocks.layers import MLP, Attention, CausalAttention, SwiGLU, rms_norm


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

    The first `context` tokens see only each other and get the fixed condition 0, so what they compute depends neither
    on z nor on sigma.
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
        self, h: Float[Tensor, "n tokens width"], condition: Float[Tensor, "n c"] | None, context: int = 0
    ) -> Float[Tensor, "n tokens width"]:
        if self.modulation is None or condition is None:
            h = h + self.attention(self.norm1(h), context)
            return h + self.mlp(self.norm2(h))
        noisy = self.modulation(condition)[:, None].chunk(6, dim=-1)
        fixed = self.modulation.bias.chunk(6)
        scale1, shift1, gate1, scale2, shift2, gate2 = zip(fixed, noisy, strict=True)
        inner = self.attention(_affine(self.norm1(h), 1.0, scale1, shift1, context), context)
        h = h + _affine(inner, self.gates, gate1, None, context)
        inner = self.mlp(_affine(self.norm2(h), 1.0, scale2, shift2, context))
        return h + _affine(inner, self.gates, gate2, None, context)


Streams = tuple[Tensor, Tensor]  # the context's value [width], and the noisy tokens' one of each example [n, 1, width]


def _affine(h: Tensor, start: float, scale: Streams, shift: Streams | None, context: int) -> Tensor:
    """h * (start + scale) + shift, each stream by its own values."""
    # One split, not two slices: the gradient of a slice is a full tensor of zeros.
    parts = [h] if context == 0 else h.split([context, h.shape[1] - context], dim=1)
    streams = (1,) if context == 0 else (0, 1)
    parts = [part * (start + scale[stream]) for part, stream in zip(parts, streams, strict=True)]
    if shift is not None:
        parts = [part + shift[stream] for part, stream in zip(parts, streams, strict=True)]
    return parts[0] if context == 0 else torch.cat(parts, dim=1)


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
        self, h: Float[Tensor, "n tokens width"], condition: Float[Tensor, "n c"] | None, context: int = 0
    ) -> Float[Tensor, "n tokens width"]:
        for layer in self.layers.values():
            if self.checkpointing and torch.is_grad_enabled():
                h = checkpoint(layer, h, condition, context, use_reentrant=False, preserve_rng_state=False)
            else:
                h = layer(h, condition, context)
        return h


def set_checkpointing(module: nn.Module, on: bool) -> None:
    """Switches activation checkpointing in every stack of layers below `module`."""
    for stack in module.modules():
        if isinstance(stack, LayerStack):
            stack.checkpointing = on
