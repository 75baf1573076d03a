"""4. Objectives: one loss per example, one weight per example, and the one place where they are reduced.

The published code multiplies losses of shape [N] by weights of shape [N, 1]; broadcasting turns the weighted mean into
mean(loss) * mean(weight). `reduce` refuses that.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diffusionblocks.errors import InputError
from diffusionblocks.noise import Preconditioning

WEIGHTS = ("none", "edm", "edm_clamped")


def cross_entropy(logits: Float[Tensor, "n classes"], target: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """-log p(target) of each example, in nats, in float32 whatever the network's precision."""
    return F.cross_entropy(logits.float(), target, reduction="none")


def chunked_cross_entropy(
    h: Float[Tensor, "n tokens width"],
    weight: Float[Tensor, "vocabulary width"],
    target: Int[Tensor, "n tokens"],
    chunk: int,
) -> Float[Tensor, " n"]:
    """-log p(target) under the logits h @ weight.T: each example's mean over its tokens, in nats, in float32.

    With a large vocabulary the logits are the largest tensor of a step. Of no more than `chunk` tokens (of all
    examples together) they exist at a time; the backward pass computes them again. chunk = 0: all at once, kept.
    """
    flat, wanted = h.flatten(0, 1), target.flatten()
    if chunk == 0:
        losses = _token_losses(flat, weight, wanted)
    else:
        pieces = zip(flat.split(chunk), wanted.split(chunk), strict=True)
        losses = torch.cat(
            [
                checkpoint(_token_losses, part, weight, aim, use_reentrant=False, preserve_rng_state=False)
                for part, aim in pieces
            ]
        )
    return losses.view(target.shape).mean(1)


def _token_losses(h: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(F.linear(h, weight), target)


def squared_error(denoised: Float[Tensor, "n *shape"], target: Float[Tensor, "n *shape"]) -> Float[Tensor, " n"]:
    """Mean squared error of each example over its coordinates."""
    return (denoised.float() - target).square().flatten(1).mean(1)


def weights(kind: str, sigma: Float[Tensor, " n"], preconditioning: Preconditioning) -> Float[Tensor, " n"]:
    """The weight of each example's loss.

    "none": 1, the default for cross-entropy, whose weighting by w(sigma) has no derivation and spans 62,500x.
    "edm": w(sigma), right for squared error. "edm_clamped": w(sigma) with its signal-to-noise ratio clamped.
    """
    if kind == "none":
        return torch.ones_like(sigma)
    if kind == "edm":
        return preconditioning.weight(sigma)
    if kind == "edm_clamped":
        return preconditioning.clamped_weight(sigma)
    raise InputError(f"unknown weight '{kind}': choose {', '.join(WEIGHTS)}")


def reduce(losses: Float[Tensor, "..."], weight: Float[Tensor, "..."] | None = None) -> Float[Tensor, ""]:
    """mean(loss_i * w_i) over the batch.

    Raises:
        ValueError: losses and weights not both of shape [n].
    """
    if losses.ndim != 1 or (weight is not None and weight.shape != losses.shape):
        shapes = f"{tuple(losses.shape)} and {None if weight is None else tuple(weight.shape)}"
        raise ValueError(f"losses and weights must both have shape [n], one per example; got {shapes}")
    return (losses if weight is None else losses * weight).mean()
