"""Which convention is wrong? A pose scorer measures a rendered path that is known exactly, and the mistake gets a name.

A world-to-camera matrix taken for camera-to-world, OpenGL axes, swapped axes, a mirrored image or frames in reverse
order make a good scorer look bad: accuracies fall, and nothing crashes. Here each mistake is a hypothesis. The
estimated path is put through each of them and compared with the true one; the hypothesis that explains it *clearly*
best is named. A scorer that fits none of them is not given a name: its poses are too far off for that.

The path turns and moves in all directions and is not its own mirror image or reverse, so no two hypotheses agree on it.
Scale is left free (one factor a path, above 0), since scorers need not know units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.camera import PoseArray, anchor, invert, poses_from_labels, relative_poses

WORD = "w-2, right+w-2, d-1, up+a-1, left-2, s+right-2, down-2, w+d-2, left+s-1, up+w-1"
RIGHT = "right"

Repair = Callable[[PoseArray], PoseArray]


def _axes(matrix_33: NDArray[np.float64]) -> Repair:
    """Write poses in other axes: A c2w A^-1."""
    change = np.eye(4)
    change[:3, :3] = matrix_33
    return lambda c2w_F44: change @ c2w_F44 @ np.linalg.inv(change)


def _swap(i: int, j: int) -> NDArray[np.float64]:
    matrix = np.eye(3)
    matrix[[i, j]] = matrix[[j, i]]
    return matrix


def _reverse(c2w_F44: PoseArray) -> PoseArray:
    return anchor(c2w_F44[::-1])


# name -> what turns an estimate with this mistake into a right one
MISTAKES: dict[str, Repair] = {
    RIGHT: lambda c2w_F44: c2w_F44,
    "world-to-camera where camera-to-world is expected": invert,
    "OpenGL axes (y up, z backwards) where OpenCV's are expected": _axes(np.diag([1.0, -1.0, -1.0])),
    "x and y swapped": _axes(_swap(0, 1)),
    "x and z swapped": _axes(_swap(0, 2)),
    "y and z swapped": _axes(_swap(1, 2)),
    "x mirrored": _axes(np.diag([-1.0, 1.0, 1.0])),
    "y mirrored": _axes(np.diag([1.0, -1.0, 1.0])),
    "frames in reverse order": _reverse,
    "world-to-camera, and frames in reverse order": lambda c2w_F44: invert(_reverse(c2w_F44)),
}


@dataclass(frozen=True)
class Verdict:
    """What the path says: the mistake's name (`RIGHT` for none), or None where no hypothesis is clearly the best.

    `errors` of each hypothesis: 0 is perfect, about 1 is no better than standing still.
    """

    name: str | None
    errors: dict[str, float]

    def __str__(self) -> str:
        best = min(self.errors, key=lambda name: self.errors[name])
        error = self.errors[best]
        if self.name is None:
            return f"no convention fits: the nearest is {best!r} with an error of {error:.2f} (below 0.5 is needed)"
        return f"conventions: {self.name} (error {error:.2f})"


def known_path() -> tuple[NDArray[np.uint8], PoseArray]:
    """(frames uint8 (F, 40, 64, 3), their true camera-to-world poses (F, 4, 4)): a fixed path through a mini room."""
    from pipeline.actions import parse_word
    from pipeline.worlds.mini.clips import STEP
    from pipeline.worlds.mini.renderer import MiniScene, place_path, render

    relative = poses_from_labels(parse_word(WORD), STEP)
    for seed in range(1000):
        scene = MiniScene.make(5_000_000 + seed)  # no seed that anything is trained on
        start = place_path(scene, np.random.default_rng(seed), relative)
        if start is not None:
            return render(scene, start @ relative), relative
    raise AssertionError("no room of 1000 has room for the path")


def error(estimated_F44: PoseArray, true_F44: PoseArray) -> float:
    """Mean of the relative errors of turning and moving between neighbouring frames, at the best scale above 0.

    NaN poses give infinity. About 1 for a camera that stands still.
    """
    if not np.isfinite(estimated_F44).all():
        return float("inf")
    seen, true = relative_poses(anchor(estimated_F44)), relative_poses(true_F44)
    moved, wanted = seen[:, :3, 3], true[:, :3, 3]
    own = float((moved * moved).sum())
    scale = max(float((moved * wanted).sum()) / own, 0.0) if own > 0 else 0.0
    moving = np.linalg.norm(scale * moved - wanted, axis=1).sum() / np.linalg.norm(wanted, axis=1).sum()
    turning = (
        _angles(np.swapaxes(seen[:, :3, :3], 1, 2) @ true[:, :3, :3]).sum() / _angles(true[:, :3, :3]).sum()
    )
    return float((moving + turning) / 2)


def _angles(rotation_N33: NDArray[np.float64]) -> NDArray[np.float64]:
    """Angles of rotations in radians; of anything else (a mirrored estimate) the nearest that the trace allows."""
    return np.asarray(np.arccos(np.clip((np.trace(rotation_N33, axis1=1, axis2=2) - 1) / 2, -1, 1)))


def judge(estimated_F44: PoseArray, true_F44: PoseArray, limit: float = 0.5, margin: float = 0.8) -> Verdict:
    """Name the convention of an estimated path: the best hypothesis if its error is below `limit` and below `margin`
    times that of every other one.
    """
    errors = {name: error(repair(estimated_F44), true_F44) for name, repair in MISTAKES.items()}
    first, second = sorted(errors, key=lambda name: errors[name])[:2]
    clear = errors[first] < limit and errors[first] < margin * errors[second]
    return Verdict(first if clear else None, errors)
