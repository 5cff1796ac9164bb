"""Intervals that respect how the numbers were made: cases are resampled, frames inside a case are not independent.

Arms of a comparison share cases and noise seeds, so differences are paired; with several training seeds the seeds are
resampled first, then cases (spec worldcycle 6.3).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Interval:
    """A mean and its bootstrap interval."""

    mean: float
    low: float
    high: float

    def shown(self, scale: float = 1.0, digits: int = 1) -> str:
        """`23.4 [21.0, 25.9]`."""
        return (
            f"{self.mean * scale:.{digits}f} [{self.low * scale:.{digits}f}, {self.high * scale:.{digits}f}]"
        )


def bootstrap(
    values_N: NDArray[np.float64], level: float = 0.95, draws: int = 2000, seed: int = 0
) -> Interval:
    """Mean over cases [N] and its percentile interval; NaN cases (undefined there) are left out.

    Raises ValueError when no case is left.
    """
    values = np.asarray(values_N, np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        raise ValueError("no case has a value: nothing to average")
    rng = np.random.default_rng(seed)
    means = values[rng.integers(len(values), size=(draws, len(values)))].mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(values.mean()), float(low), float(high))


def paired(
    after_SN: NDArray[np.float64],
    before_SN: NDArray[np.float64],
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """Mean difference after - before over S training seeds and the same N cases; hierarchical bootstrap seed -> case.

    `before_SN` may be [N] (one base for all seeds). One seed: cases alone are resampled, and the interval says so
    little about other seeds.
    """
    difference = np.atleast_2d(np.asarray(after_SN, np.float64)) - np.asarray(before_SN, np.float64)
    difference = difference[:, np.isfinite(difference).all(0)]
    S, N = difference.shape
    if not N:
        raise ValueError("no case has a value in both arms: nothing to compare")
    rng = np.random.default_rng(seed)
    means = np.empty(draws)
    for draw in range(draws):
        seeds = rng.integers(S, size=(S,))
        means[draw] = np.mean([difference[s, rng.integers(N, size=N)].mean() for s in seeds])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(difference.mean()), float(low), float(high))
