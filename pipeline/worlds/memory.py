"""Which past latents a clip may look at: a pure function of the poses, so rollout and update always agree.

While the history fits into the budget it is kept whole. After that: the first latents (sink), the last ones (recent)
and, in between, whole clips whose cameras saw most of what the new clip will see (spec worldplay 2, worldcompass 2.5).

How much two cameras share is a Monte-Carlo estimate over a ball of points around the new camera. The reference draws it
from the global generator, which changes every other draw; here it is keyed by (seed, clip). The ball is drawn in the
camera's own axes, where one draw serves all query frames.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.camera import invert
from pipeline.worlds.base import MemoryRule

CLIP = 4
# The frames of a past clip that stand for it.
PROBES = (0, 2)


def select(c2w_T44: ArrayLike, clip_start: int, rule: MemoryRule, seed: int = 0) -> list[int]:
    """Sorted indices of the history latents for the clip of latents clip_start .. clip_start + 3.

    `c2w_T44` are camera-to-world poses of history and clip, one a latent, in units of the world. At most `rule.budget`
    indices. Raises ValueError when clip_start is no multiple of 4 or the poses end before the clip begins.
    """
    c2w = np.asarray(c2w_T44, dtype=np.float64)
    if clip_start < 0 or clip_start % CLIP:
        raise ValueError(f"clips start at multiples of {CLIP}, got {clip_start}")
    if clip_start <= rule.budget:
        return list(range(clip_start))
    query = c2w[clip_start : clip_start + CLIP]
    if not len(query):
        raise ValueError(f"{len(c2w)} poses end before the clip that starts at latent {clip_start}")
    starts = np.arange(rule.sink, clip_start - rule.recent, CLIP)
    probes = c2w[starts[:, None] + np.array(PROBES)]
    score = overlap(query, probes.reshape(-1, 4, 4), rule, seed, clip_start).reshape(
        len(query), len(starts), -1
    )
    wanted = (rule.budget - rule.sink - rule.recent) // CLIP
    best = starts[np.argsort(-score.mean((0, 2)), kind="stable")[:wanted]]
    retrieved = [int(start) + offset for start in best for offset in range(CLIP)]
    return sorted([*range(rule.sink), *retrieved, *range(clip_start - rule.recent, clip_start)])


def overlap(
    query_Q44: NDArray[np.float64],
    history_N44: NDArray[np.float64],
    rule: MemoryRule,
    seed: int,
    clip_start: int,
) -> NDArray[np.float64]:
    """[Q, N]: share of the points seen by a query camera that a history camera sees too, within the same distance."""
    rng = np.random.default_rng([seed, clip_start])
    points = rng.uniform(-1, 1, (2 * rule.points, 3))  # about half of a cube's points lie in its ball
    points = points[(points**2).sum(1) <= 1] * rule.radius
    points = points[_seen(points, rule)]
    shared = np.zeros((len(query_Q44), len(history_N44)))
    if not len(points):
        return shared
    to_history_QN44 = invert(history_N44)[None] @ query_Q44[:, None]
    for q, transforms_N44 in enumerate(to_history_QN44):
        local = points @ transforms_N44[:, :3, :3].transpose(0, 2, 1) + transforms_N44[:, None, :3, 3]
        shared[q] = _seen(local, rule).mean(-1)
    return shared


def _seen(points_3: NDArray[np.float64], rule: MemoryRule) -> NDArray[np.bool_]:
    """Whether points in a camera's axes lie in its view cone and radius."""
    x, y, z = points_3[..., 0], points_3[..., 1], points_3[..., 2]
    wide = np.abs(x) <= z * math.tan(math.radians(rule.half_width_deg))
    high = np.abs(y) <= z * math.tan(math.radians(rule.half_height_deg))
    return wide & high & (z > 0) & (x * x + y * y + z * z <= rule.radius**2)
