"""Videos that no policy made: what closure metrics and rewards say of a perfect world, and of ways to cheat them.

Without these rows a closure table cannot be read (spec/worldcycle.md 2.4): a static video has perfect closure, and so
has one that plays its past backwards.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pipeline.benchmark.cyclebench import CycleCase
from pipeline.cycles import ClosedWord

Frames = NDArray[np.uint8]
BLUR = 2.0  # standard deviation in pixels


def render_case(case: CycleCase, share: float = 1.0) -> Frames:
    """The true views along the commanded poses; with `share` below 1 every step is that much shorter."""
    from pipeline.worlds.mini.renderer import MiniScene, render

    poses = case.prompt.c2w_T44
    if share != 1:
        from pipeline.camera import StepSize

        step = case.prompt.step
        poses = case.word.build(StepSize(step.translation * share, step.rotation_deg * share)).c2w_T44
    start = np.asarray(case.prompt.about["start"])
    return render(MiniScene.make(int(case.prompt.about["scene_seed"])), start @ poses)


def blurred(video_FHW3: Frames) -> Frames:
    """All frames but the given first one, blurred."""
    from pipeline.scorers.tracker import opencv

    cv2 = opencv()
    soft = [cv2.GaussianBlur(frame, (0, 0), BLUR) for frame in video_FHW3[1:]]
    return np.stack([video_FHW3[0], *soft]).astype(np.uint8)


def palindrome(video_FHW3: Frames) -> Frames:
    """The first half, then its own frames backwards: a model that copies its past instead of knowing the place."""
    half = (len(video_FHW3) - 1) // 2
    back = video_FHW3[: half + 1][::-1]
    out = np.concatenate([video_FHW3[: half + 1], back[1:]])
    return np.concatenate([out, np.repeat(out[-1:], len(video_FHW3) - len(out), axis=0)])


def copied_back(video_FHW3: Frames, closed: ClosedWord) -> Frames:
    """The second half of every cycle is the first half backwards: true for a cycle that retraces, false for a loop."""
    out = video_FHW3.copy()
    for cycle in closed.cycles:
        half = cycle.actions // 2
        for back in range(1, cycle.actions - half + 1):
            out[cycle.start + half + back] = out[cycle.start + max(0, half - back)]
    return out


def swapped(video_FHW3: Frames, other_FHW3: Frames) -> Frames:
    """Another room from the middle on."""
    half = (len(video_FHW3) - 1) // 2
    return np.concatenate([video_FHW3[: half + 1], other_FHW3[half + 1 :]])


def static(video_FHW3: Frames) -> Frames:
    """The first frame, again and again."""
    return np.repeat(video_FHW3[:1], len(video_FHW3), axis=0)


# The rows of `wcpipe evaluate --suite cyclebench --control NAME`; all are made from true renders. `random` compares the
# frames of a true render with those of another room: the level of frames that have nothing to do with each other.
CYCLE_CONTROLS: dict[str, Callable[[CycleCase], Frames]] = {
    "render": render_case,
    "static": lambda case: static(render_case(case)),
    "slow": lambda case: render_case(case, 0.5),
    "blurred": lambda case: blurred(render_case(case)),
    "palindrome": lambda case: copied_back(render_case(case), case.closed),
    "random": render_case,
}


def other_room(cases: list[CycleCase]) -> Callable[[CycleCase], Frames]:
    """For the control `random`: the true render of the next case of the same length in another room."""

    def of(case: CycleCase) -> Frames:
        own, length = cases.index(case), len(case.closed.labels_T)
        order = [*cases[own + 1 :], *cases[:own]]
        elsewhere = [c for c in order if c.prompt.about["scene_seed"] != case.prompt.about["scene_seed"]]
        return render_case(next(c for c in elsewhere if len(c.closed.labels_T) == length))

    return of
