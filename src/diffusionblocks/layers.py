"""Building blocks of a transformer: attention, MLP, rotary positions, patches. They know nothing of noise."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention of tokens h; with a context they attend that too, and the context only itself.

    Two calls of the fused kernel instead of a mask: no [tokens, tokens] tensor exists.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self,
        h: Float[Tensor, "n tokens width"],
        context: Float[Tensor, "n others width"] | None = None,
        last: bool = False,
    ) -> tuple[Float[Tensor, "n tokens width"], Float[Tensor, "n others width"] | None]:
        """What h reads, and what the context reads: None without one, and with `last`, where nobody asks for it."""
        q, k, v = self._split(self.qkv(h))
        found = None
        if context is not None:
            if last:
                width = h.shape[2]
                context_k, context_v = self._split(F.linear(context, self.qkv.weight[width:], self.qkv.bias[width:]))
            else:
                context_q, context_k, context_v = self._split(self.qkv(context))
                found = self._join(F.scaled_dot_product_attention(context_q, context_k, context_v))
            k, v = torch.cat([context_k, k], dim=2), torch.cat([context_v, v], dim=2)
        return self._join(F.scaled_dot_product_attention(q, k, v)), found

    def _split(self, x: Float[Tensor, "n tokens wide"]) -> tuple[Tensor, ...]:
        """Queries, keys and values, or the last two, by head."""
        n, tokens, _ = x.shape
        return x.view(n, tokens, -1, self.heads, self.out.in_features // self.heads).permute(2, 0, 3, 1, 4).unbind()

    def _join(self, x: Float[Tensor, "n heads tokens dim"]) -> Float[Tensor, "n tokens width"]:
        return self.out(x.transpose(1, 2).flatten(2))


class MLP(nn.Sequential):
    """Linear, GELU, Linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def rms_norm(width: int) -> nn.RMSNorm:
    """Llama's norm. Its eps is Llama's too: torch's default, the precision's own, is 0.008 in bf16."""
    return nn.RMSNorm(width, eps=1e-5)


def scaled_norm(
    norm: nn.Module, h: Float[Tensor, "n tokens width"], scale: Float[Tensor, " width"], shift: Float[Tensor, " width"]
) -> Float[Tensor, "n tokens width"]:
    """norm(h) * (1 + scale) + shift, folded into the norm's own weights: no pass over the tokens, nothing more kept."""
    if isinstance(norm, nn.LayerNorm):
        weight, bias = norm.weight * (1 + scale), norm.bias * (1 + scale) + shift
        return F.layer_norm(h, norm.normalized_shape, weight, bias, norm.eps)
    assert isinstance(norm, nn.RMSNorm)  # which has no bias to take the shift
    return F.rms_norm(h, norm.normalized_shape, norm.weight * (1 + scale), norm.eps) + shift


class SwiGLU(nn.Module):
    """down(silu(gate(h)) * up(h)), without biases (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, h: Float[Tensor, "n tokens width"]) -> Float[Tensor, "n tokens width"]:
        return self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(
    x: Float[Tensor, "*n tokens dim"], positions: Int[Tensor, " tokens"], base: float = 10000.0
) -> Float[Tensor, "*n tokens dim"]:
    """Rotary positions: the pair (i, i + dim/2) is turned by position * base^(-2i/dim) (Su et al. 2021, section 3.4.2).

    Dot products of rotated vectors depend on the difference of their positions alone. Pairs are half a vector apart, as
    in Hugging Face's Llama.
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, device=x.device) / half)
    angle = positions[:, None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    # In float32: bf16 knows a cosine to 1/256 only. Of the products nothing but cos and sin is kept for the backward.
    one, two = x.float().chunk(2, dim=-1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1).to(x.dtype)


class CausalAttention(nn.Module):
    """Causal self-attention of a language model (Llama): rotary positions, shared keys and values, no biases.

    Alone, token i of h attends tokens j <= i. With a context, both are streams over the same slots: clean token i of
    the context attends clean j <= i, noisy token i of h attends clean j < i and itself.

    No mask exists: both streams are plain causal calls of the fused kernel, on T queries and T keys. In the noisy one
    the keys are the clean ones moved on by a slot behind one that stands for "myself"; a query's score with it is its
    score with its own noisy key, carried in an extra coordinate.

    Args:
        kv_heads: heads of keys and values; each serves heads / kv_heads consecutive heads of queries.
    """

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads, self.grouped, self.dim = kv_heads, kv_heads < heads, width // heads
        # Not one projection: attention keeps v for the backward, and a view of it would keep q and k alive too.
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.v = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self,
        h: Float[Tensor, "n tokens width"],
        context: Float[Tensor, "n clean width"] | None = None,
        last: bool = False,
    ) -> tuple[Float[Tensor, "n tokens width"], Float[Tensor, "n clean width"] | None]:
        """What h reads, and what the context reads: None without one, and with `last`, where nobody asks for it."""
        if context is not None and context.shape != h.shape:
            raise ValueError(f"{context.shape[1]} clean tokens can't be the context of {h.shape[1]} noisy ones")
        slots = torch.arange(h.shape[1], device=h.device)
        q, k, v = rotate(self._heads(self.q, h), slots), rotate(self._heads(self.k, h), slots), self._heads(self.v, h)
        if context is None:
            return self._join(self._attend(q, k, v)), None
        # Both calls read one copy of the clean keys and values.
        clean_k = _behind_myself(rotate(self._heads(self.k, context), slots))
        clean_v = _behind_myself(self._heads(self.v, context))
        score = (self._by_group(q) * k[:, :, None]).sum(-1, keepdim=True).flatten(1, 2)
        q = torch.cat([q, F.pad(score.to(q.dtype), (0, EXTRA - 1))], dim=-1)
        found = self._attend(q, clean_k[:, :, :-1], clean_v[:, :, :-1])
        others, share, _ = found.split([self.dim, 1, EXTRA - 1], dim=-1)
        noisy = self._join(others + (self._by_group(share) * v[:, :, None]).flatten(1, 2))
        if last:
            return noisy, None
        clean_q = rotate(self._heads(self.q, context), slots)
        clean = self._attend(clean_q, clean_k[:, :, 1:, : self.dim], clean_v[:, :, 1:, : self.dim])
        return noisy, self._join(clean)

    def _heads(self, part: nn.Linear, h: Float[Tensor, "n tokens width"]) -> Float[Tensor, "n heads tokens dim"]:
        return part(h).unflatten(2, (-1, self.dim)).transpose(1, 2)

    def _join(self, x: Float[Tensor, "n heads tokens dim"]) -> Float[Tensor, "n tokens width"]:
        return self.out(x.transpose(1, 2).flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = self.dim**-0.5  # not of q's last axis, which may be longer
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=self.grouped)

    def _by_group(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.kv_heads, -1))


# Coordinates beside a head's own. One is used; fused kernels want rows of whole 16 bytes.
EXTRA = 8


def _behind_myself(x: Float[Tensor, "n heads tokens dim"]) -> Float[Tensor, "n heads tokens+1 dim+8"]:
    """Keys or values behind one that is 1 in the first extra coordinate and 0 elsewhere."""
    padded = F.pad(x, (0, EXTRA, 1, 0))
    padded[:, :, 0, x.shape[-1]] = 1
    return padded


class Patches(nn.Module):
    """An image cut into square patches, each projected to the network's width; learned positions are added."""

    def __init__(self, image_size: int, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.project = nn.Linear(channels * patch * patch, width)
        # As large as the projected patches: with ViT's 0.02 the end-to-end run on digits stops at 90 %, not 98 %.
        self.positions = nn.Parameter(torch.randn(1, (image_size // patch) ** 2, width) * 0.5)

    def forward(self, x: Float[Tensor, "n channels size size"]) -> Float[Tensor, "n tokens width"]:
        n, channels, size, _ = x.shape
        side = size // self.patch
        x = x.view(n, channels, side, self.patch, side, self.patch).permute(0, 2, 4, 1, 3, 5)
        return self.project(x.reshape(n, side * side, -1)) + self.positions


def unit_norm(vectors: Float[Tensor, "*n dim"]) -> Float[Tensor, "*n dim"]:
    """Each vector scaled to length 1, in float32 inside: zero and tiny ones stay finite in fp16 and bf16 too."""
    wide = vectors.float()
    # Scaled by the largest entry first, or the squares of tiny entries would underflow. Zero keeps a finite gradient.
    largest = wide.detach().abs().amax(-1, keepdim=True)
    wide = wide / torch.where(largest > 0, largest, 1)
    return (wide / wide.norm(dim=-1, keepdim=True).clamp(min=0.5)).to(vectors.dtype)


def simplex_codes(classes: int) -> Float[Tensor, "classes dim"]:
    """The regular simplex: unit vectors in classes - 1 dimensions, every two of them at the same distance."""
    centred = torch.eye(classes, dtype=torch.float64) - 1 / classes
    # Its last singular value is 0 (the rows sum to zero): the other axes carry the whole simplex.
    axes = torch.linalg.svd(centred).Vh[: classes - 1]
    return unit_norm((centred @ axes.T).float())


def random_codes(classes: int, dim: int, generator: torch.Generator) -> Float[Tensor, "classes dim"]:
    """Random unit vectors."""
    return unit_norm(torch.randn(classes, dim, generator=generator))
