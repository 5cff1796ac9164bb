"""Where the candidates of a stored group really are: the oracle on a group of the mini world's rollouts.

For benchmarks of rewards; never a reward. The shared past is tracked once, and each candidate goes on from its end.
"""

import numpy as np
from numpy.typing import NDArray

from pipeline.plan import candidate_frames
from pipeline.stores import GroupStore
from pipeline.worlds.mini import oracle
from pipeline.worlds.mini.renderer import MiniScene


def within(a_PG: NDArray[np.float64], b_PG: NDArray[np.float64]) -> float:
    """Correlation of the deviations from the group means: what a group-normalised advantage can see."""
    a, b = (x - x.mean(1, keepdims=True) for x in (a_PG, b_PG))
    scale = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / scale if scale else float("nan")


def track_group(
    prefixes: GroupStore, rollouts: GroupStore, index: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Fitted camera-to-world poses of every frame of a group's videos in the room's frame, (G, F, 4, 4), and which
    frames are off the manifold, (G, F). One frame a latent, as in the mini world.
    """
    record, labels_T = prefixes.record(index), prefixes.read(index, "labels")
    start_44, c2w_T44 = np.array(record["start"]), prefixes.read(index, "c2w")
    scene, commanded_T44 = MiniScene.make(int(record["scene_seed"])), start_44 @ c2w_T44
    new, begin = rollouts.read(index, "frames"), candidate_frames(record).start
    G = len(new)
    if not begin:  # each candidate is a whole video
        found = oracle.track(
            [scene] * G,
            new,
            np.stack([start_44] * G),
            np.tile(labels_T, (G, 1)),
            commanded_BF44=np.stack([commanded_T44] * G),
        )
        return found.c2w_BF44, found.failed_BF
    past = oracle.track(
        [scene],
        prefixes.read(index, "frames")[None, :begin],
        start_44[None],
        labels_T[None, :begin],
        commanded_BF44=commanded_T44[None, :begin],
    )
    last = begin - 1
    videos = np.concatenate(
        [np.broadcast_to(prefixes.read(index, "frames")[last], (G, 1, *new.shape[2:])), new], axis=1
    )
    rest = slice(last, last + videos.shape[1])
    found = oracle.track(
        [scene] * G,
        videos,
        np.stack([past.c2w_BF44[0, last]] * G),
        np.tile(labels_T[rest], (G, 1)),
        commanded_BF44=np.stack([commanded_T44[rest]] * G),
    )
    poses = [np.broadcast_to(past.c2w_BF44, (G, *past.c2w_BF44.shape[1:])), found.c2w_BF44[:, 1:]]
    failed = [np.broadcast_to(past.failed_BF, (G, begin)), found.failed_BF[:, 1:]]
    return np.concatenate(poses, axis=1), np.concatenate(failed, axis=1)
