"""Denoisers in closed form: an independent truth for the walks, without a network.

Written from the definition D(z, sigma) = E[y | y + sigma eps = z], not from the library's own formulas.
"""

import math

import torch
from torch import Tensor


class FiniteSet:
    """Data on a few points: D is their mean, weighted by prior times exp(-|z - point|^2 / (2 sigma^2))."""

    def __init__(self, points: Tensor, prior: Tensor | None = None) -> None:
        self.points = points
        self.prior = torch.full((len(points),), 1 / len(points), dtype=points.dtype) if prior is None else prior

    def posterior(self, z: Tensor, sigma: float) -> Tensor:
        """p(point | z), by Bayes' rule over the points one after the other."""
        scores = [
            math.log(float(prior)) - (z - point).square().sum(1) / (2 * sigma**2)
            for point, prior in zip(self.points, self.prior, strict=True)
        ]
        return torch.stack(scores, dim=1).softmax(1)

    def __call__(self, z: Tensor, sigma: float) -> Tensor:
        return self.posterior(z, sigma) @ self.points


class Gaussian:
    """Data N(0, rms^2): D = rms^2 / (rms^2 + sigma^2) z, and the probability flow that it gives rise to."""

    def __init__(self, rms: float) -> None:
        self.rms = rms

    def __call__(self, z: Tensor, sigma: float) -> Tensor:
        return self.rms**2 / (self.rms**2 + sigma**2) * z

    def flow(self, z: Tensor, sigma: float, next_sigma: float) -> Tensor:
        """Where dz/ds = (z - D)/s takes z from `sigma` to `next_sigma`: z keeps its quantile of N(0, rms^2 + s^2)."""
        return z * math.sqrt((self.rms**2 + next_sigma**2) / (self.rms**2 + sigma**2))


class Perfect:
    """Knows the target: D is y whatever z is."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def __call__(self, z: Tensor, sigma: float) -> Tensor:
        return self.target.expand_as(z)
