"""What could the best of all pose scorers do? `wcpipe` with the oracle in the pose scorer's place.

A diagnosis and never a result: the oracle knows the room, so the policy is trained on the very thing that judges it.
If a run with it gains much more than one with the pose scorer, the reward is what limits; if not, the policy's own
candidates or the update are. Judge it on rooms of the rl split. Takes the arguments of `wcpipe`:

    python benchmarks/oracle_reward.py run --params experiments/long.yaml --epochs 24 --root runs/oracle --keep last:1
    wcpipe evaluate --params experiments/long.yaml --set evaluate.split=rl --epoch e024 --root runs/oracle
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.actions import parse_word
from pipeline.camera import relative_poses
from pipeline.scorers import registry
from pipeline.stores import ArraySpec
from pipeline.worlds.mini import oracle
from pipeline.worlds.mini.renderer import MiniScene

# The motion of a frame that is off the manifold: so far from any command that it earns nothing.
ASTRAY = np.diag([-1.0, 1.0, -1.0, 1.0])
ASTRAY[:3, 3] = 50.0


def motions(track: oracle.OracleTrack) -> NDArray[np.float64]:
    """Relative motions (B, F-1, 4, 4) of fitted videos."""
    found = np.stack([relative_poses(path) for path in track.c2w_BF44])
    found[track.failed_BF[:, 1:] | track.failed_BF[:, :-1]] = ASTRAY
    return found


class OracleEngine:
    """As `registry.PoseEngine`, by the oracle; `record` is that of the group in `prefixes.zarr`."""

    name = "pose"

    def __init__(self, record: Mapping[str, Any] | None = None) -> None:
        self.record = record or {}

    def for_group(self, record: Mapping[str, Any]) -> OracleEngine:
        """The engine for the group of this record."""
        return OracleEngine(record)

    def arrays(self, candidates: int, frames: int, past_frames: int) -> list[ArraySpec]:
        """Those of the pose scorer."""
        return registry.PoseEngine.arrays(self, candidates, frames, past_frames)  # type: ignore[arg-type]

    def measure(self, frames_GFHW3: NDArray[np.uint8], past_FHW3: NDArray[np.uint8]) -> registry.Arrays:
        """The past is fitted once; every candidate goes on from where it ends."""
        G, F = frames_GFHW3.shape[:2]
        past = self._past(past_FHW3)
        labels_F = np.concatenate([[0], self._labels()[-(F - 1) :]])
        last = past.c2w_BF44[0, -1]
        found = oracle.track(
            [self._scene()] * G, frames_GFHW3, np.stack([last] * G), np.tile(labels_F, (G, 1))
        )
        return {"relative": motions(found)}

    def measure_past(self, past_FHW3: NDArray[np.uint8]) -> registry.Arrays:
        """The motions of the prefix."""
        return {"past_relative": motions(self._past(past_FHW3))[0]} if len(past_FHW3) > 1 else {}

    def _scene(self) -> MiniScene:
        return MiniScene.make(int(self.record["scene_seed"]))

    def _labels(self) -> NDArray[np.int64]:
        return np.concatenate([[0], parse_word(self.record["word"])]).astype(np.int64)

    def _past(self, past_FHW3: NDArray[np.uint8]) -> oracle.OracleTrack:
        start_44, count = np.array(self.record["start"]), len(past_FHW3)
        return oracle.track([self._scene()], past_FHW3[None], start_44[None], self._labels()[None, :count])


def load(folder: Path) -> registry.Engine:
    """It has no weights."""
    return OracleEngine()


if __name__ == "__main__":
    from stages.cli import main

    registry.ENGINES["pose"] = registry.EngineKind(load, version=-1)  # a version of its own: another identity
    main()
