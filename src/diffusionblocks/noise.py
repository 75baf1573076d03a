"""1. Noise laws: how often a noise level is trained, as a two-way map between a level and its mass.

The forward process is z = y + sigma * eps. A law on [sigma_min, sigma_max] is used only through

    mass(sigma)  in [0, 1]: the share of the law ABOVE sigma, so mass(sigma_max) = 0 and mass(sigma_min) = 1,
    level(mass)  its inverse,

because blocks are counted from the highest noise down: block b of B equal ones owns the masses [b/B, (b+1)/B].

- `LogNormal`: log sigma ~ N(P_mean, P_std^2), truncated (DiffusionBlocks section 3; EDM, Karras et al. 2022, table 1).
- `EqualInformation`: equal shares of the bits that z alone reveals about a discrete target (ours, docs/method.md).

Below them: EDM's preconditioning and loss weight (Karras et al. 2022, table 1 and appendix B.6).
"""

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from scipy.special import log_ndtr, log_softmax, ndtr, ndtri_exp
from torch import Tensor

from diffusionblocks.errors import InputError

Float64s = NDArray[np.float64]
# numpy's own ArrayLike can't be checked at run time: beartype refuses floats and tuples of them.
ArrayLike = float | Sequence[float] | Float64s


class NoiseLaw(abc.ABC):
    """A law of noise levels on [sigma_min, sigma_max], both ends pinned exactly.

    Raises `InputError` where 0 < sigma_min < sigma_max < inf doesn't hold.
    """

    sigma_min: float
    sigma_max: float

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < self.sigma_max < math.inf:
            raise InputError(
                f"sigma_min {self.sigma_min} and sigma_max {self.sigma_max} don't make a range: "
                "choose 0 < sigma_min < sigma_max, both finite"
            )

    def mass(self, sigma: ArrayLike) -> Float64s:
        """The law's share above `sigma`: 0 at sigma_max, 1 at sigma_min. Levels outside the range are clamped."""
        levels = np.clip(np.asarray(sigma, dtype=np.float64), self.sigma_min, self.sigma_max)
        mass = np.clip(self._mass(np.atleast_1d(levels)).reshape(levels.shape), 0.0, 1.0)
        return np.where(levels == self.sigma_max, 0.0, np.where(levels == self.sigma_min, 1.0, mass))

    def level(self, mass: ArrayLike) -> Float64s:
        """The level with the share `mass` of the law above it (the inverse of `mass`), in float64."""
        shares = np.asarray(mass, dtype=np.float64)
        if not ((shares >= 0) & (shares <= 1)).all():
            raise InputError("a mass is a share of the noise law: it lies between 0 and 1")
        levels = np.clip(self._level(np.atleast_1d(shares)).reshape(shares.shape), self.sigma_min, self.sigma_max)
        return np.where(shares == 0, self.sigma_max, np.where(shares == 1, self.sigma_min, levels))

    def widen(self, low: float, high: float, overlap: float) -> tuple[float, float]:
        """[low, high] widened by alpha = (high/low)^overlap on both sides, clamped to the law's range (section 3.3)."""
        alpha = (high / low) ** overlap
        return max(low / alpha, self.sigma_min), min(high * alpha, self.sigma_max)

    @abc.abstractmethod
    def _mass(self, levels: Float64s) -> Float64s: ...

    @abc.abstractmethod
    def _level(self, shares: Float64s) -> Float64s: ...


@dataclass(frozen=True)
class LogNormal(NoiseLaw):
    """log sigma ~ N(p_mean, p_std^2), truncated to [sigma_min, sigma_max].

    Everything is computed in the logarithm of the nearer tail: cdf and ppf saturate in the upper one (80 comes back as
    79.9999999998, and 1e5 as inf).
    """

    p_mean: float = -1.2
    p_std: float = 1.2
    sigma_min: float = 0.002
    sigma_max: float = 80.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.p_mean) and 0 < self.p_std < math.inf):
            raise InputError(f"p_mean {self.p_mean} must be finite and p_std {self.p_std} positive and finite")

    def cdf(self, sigma: ArrayLike) -> Float64s:
        """The normal law's P(level <= sigma), before truncation."""
        return np.asarray(ndtr(self._standard(np.atleast_1d(sigma)))).reshape(np.shape(sigma))

    def _standard(self, levels: Float64s) -> Float64s:
        return (np.log(levels) - self.p_mean) / self.p_std

    @cached_property
    def _ends(self) -> tuple[float, float]:
        low, high = self._standard(np.array([self.sigma_min, self.sigma_max]))
        return float(low), float(high)

    def _mass(self, levels: Float64s) -> Float64s:
        low, high = self._ends
        above = _log_normal_interval(self._standard(levels), np.full_like(levels, high))
        return np.exp(above - _log_normal_interval(np.array(low), np.array(high)))

    def _level(self, shares: Float64s) -> Float64s:
        low, high = self._ends
        with np.errstate(divide="ignore"):  # log 0 = -inf at the pinned ends is meant
            log_share, log_rest = np.log(shares), np.log1p(-shares)
        log_cdf = np.logaddexp(log_rest + log_ndtr(high), log_share + log_ndtr(low))
        log_sf = np.logaddexp(log_rest + log_ndtr(-high), log_share + log_ndtr(-low))
        standard = np.where(log_sf < log_cdf, -ndtri_exp(np.minimum(log_sf, 0)), ndtri_exp(np.minimum(log_cdf, 0)))
        return np.exp(self.p_mean + self.p_std * standard)


def _log_normal_interval(low: Float64s, high: Float64s) -> Float64s:
    """log(Phi(high) - Phi(low)) for low <= high, without cancellation in either tail."""
    # An interval in the upper tail is mirrored into the lower one; only then may the two logarithms be subtracted.
    mirrored = low > 0
    low, high = np.where(mirrored, -high, low), np.where(mirrored, -low, high)
    with np.errstate(divide="ignore"):  # an empty interval has log 0 = -inf
        one_tail = log_ndtr(high) + np.log1p(-np.exp(np.minimum(log_ndtr(low) - log_ndtr(high), 0)))
        across = np.log1p(-np.minimum(ndtr(low) + ndtr(-high), 1))
    return np.where(high > 0, across, one_tail)


@dataclass(frozen=True, eq=False)
class EqualInformation(NoiseLaw):
    """Equal shares of bits(sigma) = I(y; y + sigma eps): what z alone reveals about a discrete target, in bits.

    Estimated by Monte Carlo over the code table, with the same draws at every level; no network and no data but the
    class frequencies. So no training is spent where z gives the answer away, nor where it says nothing yet.

    Args:
        codes: one row a class, [classes, dim].
        frequencies: the classes' shares, [classes]; positive, normalised here.
    """

    codes: Float64s
    frequencies: Float64s
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    grid: int = 257

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.codes) != len(self.frequencies) or len(self.codes) < 2 or not (self.frequencies > 0).all():
            raise InputError("the equal-information law needs two or more codes and one positive frequency for each")

    @cached_property
    def _table(self) -> tuple[Float64s, Float64s]:
        """Strictly increasing shares of the bits, and the log levels (falling) at which they are reached."""
        log_levels = np.linspace(math.log(self.sigma_max), math.log(self.sigma_min), self.grid)
        bits = np.array([self.bits(sigma) for sigma in np.exp(log_levels)])
        shares = np.maximum.accumulate(bits - bits[0])
        keep = np.concatenate([[True], np.diff(shares) > 0])
        # On the plateau where z tells all, there is nothing to share out: its first level stands for it.
        return shares[keep] / shares[-1], log_levels[keep]

    @cached_property
    def _draws(self) -> tuple[Int[np.ndarray, " n"], Float64s, Float64s]:
        """Targets, and the products of noise and codes (antithetic pairs). Fixed: the law is part of the recipe."""
        rng = np.random.default_rng(0)
        # 2^21 numbers at most, 16 MiB (2,000 codes: 5 s on one core): a large vocabulary gets fewer draws, each of
        # which averages over more classes.
        pairs = max(64, min(4096, 2**20 // len(self.codes)))
        shares = np.cumsum(self.frequencies / self.frequencies.sum())
        targets = np.searchsorted(shares, (np.arange(pairs) + 0.5) / pairs).clip(max=len(shares) - 1)
        noise = rng.standard_normal((pairs, self.codes.shape[1])) @ self.codes.T
        return np.concatenate([targets, targets]), np.concatenate([noise, -noise]), self.codes @ self.codes.T

    def bits(self, sigma: float) -> float:
        """I(y; y + sigma eps) in bits (Monte Carlo estimate, at least 0)."""
        targets, noise, gram = self._draws
        log_prior = np.log(self.frequencies / self.frequencies.sum())
        products = gram[targets] + sigma * noise
        log_posterior = log_softmax((products - np.diag(gram) / 2) / sigma**2 + log_prior, axis=1)
        gain = log_posterior[np.arange(len(targets)), targets] - log_prior[targets]
        return max(float(gain.mean()) / math.log(2), 0.0)

    def _mass(self, levels: Float64s) -> Float64s:
        shares, log_levels = self._table
        return np.interp(np.log(levels), log_levels[::-1], shares[::-1])

    def _level(self, shares: Float64s) -> Float64s:
        table_shares, log_levels = self._table
        return np.exp(np.interp(shares, table_shares, log_levels))


def log_posterior_from_z(
    z: Float[Tensor, "n dim"],
    sigma: float | Float[Tensor, " n"],
    codes: Float[Tensor, "classes dim"],
    frequencies: Float[Tensor, " classes"],
) -> Float[Tensor, "n classes"]:
    """log p(y | z): the belief that z alone supports, without the input x. Bayes' rule for Gaussian noise."""
    variance = torch.as_tensor(sigma, dtype=z.dtype).square().reshape(-1, 1)
    scores = (z @ codes.T - codes.square().sum(1) / 2) / variance
    return (scores + frequencies.log()).log_softmax(1)


@dataclass(frozen=True)
class Preconditioning:
    """EDM's scalings: D(z, sigma) = c_skip z + c_out F(c_in z, c_noise), for a target of rms sigma_data.

    All of them take and return sigma's shape.
    """

    sigma_data: float = 0.5

    def c_skip(self, sigma: Tensor) -> Tensor:
        return self.sigma_data**2 / (sigma**2 + self.sigma_data**2)

    def c_out(self, sigma: Tensor) -> Tensor:
        return sigma * self.sigma_data * (sigma**2 + self.sigma_data**2).rsqrt()

    def c_in(self, sigma: Tensor) -> Tensor:
        return (sigma**2 + self.sigma_data**2).rsqrt()

    def c_noise(self, sigma: Tensor) -> Tensor:
        return sigma.log() / 4

    def weight(self, sigma: Tensor) -> Tensor:
        """w(sigma) = (sigma^2 + sigma_data^2) / (sigma sigma_data)^2: unit weight for F's own squared error."""
        return (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2

    def clamped_weight(self, sigma: Tensor, gamma: float = 5.0) -> Tensor:
        """w(sigma) with its signal-to-noise ratio clamped at gamma: w = (1 + SNR) / sigma_data^2, SNR = (sd/sigma)^2.

        gamma = 5 is min-SNR's (Hang et al. 2023, section 3.4).
        """
        return (1 + (self.sigma_data / sigma).square().clamp(max=gamma)) / self.sigma_data**2
