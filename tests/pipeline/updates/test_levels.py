"""Which noise levels and which noise a sample trains: keyed draws, shared in a group or not."""

import torch

from pipeline.updates.loop import Levels
from tests.pipeline.updates.test_loop import config, make_groups, run


def test_levels_are_distinct_never_zero_and_keyed():
    levels = Levels(config(steps=6, timesteps=4), seed=1, epoch=2)
    drawn = [levels.draw("g", c) for c in range(50)]
    assert all(len(set(d)) == 4 for d in drawn)
    assert {i for d in drawn for i in d} == set(range(6))
    assert levels.sigmas_S.min() > 0
    assert len(set(map(tuple, drawn))) > 20
    assert Levels(config(steps=6, timesteps=4), 1, 2).draw("g", 3) == drawn[3]
    assert Levels(config(steps=6, timesteps=4), 1, 3).draw("g", 3) != drawn[3] or drawn[4] != levels.draw(
        "h", 4
    )
    a, b = levels.noise((2, 3), "g", 1, 0), levels.noise((2, 3), "g", 1, 1)
    assert not torch.equal(a, b)


def test_only_levels_from_sigma_min_on_are_trained():
    levels = Levels(config(steps=5, timesteps=2, sigma_min=0.8), seed=1, epoch=2)
    drawn = {i for c in range(50) for i in levels.draw("g", c)}
    assert drawn == {0, 1, 2}  # 1, 0.92 and 0.82; not 0.67 and 0.43
    assert levels.sigmas_S[[0, 1, 2]].min() >= 0.8 > levels.sigmas_S[[3, 4]].max()
    _, _, metrics = run(make_groups(), config(sigma_min=0.8, timesteps=None, timestep_fraction=1.0))
    assert metrics["live_forwards"] == 3 * 4 * 3


def test_candidates_of_a_group_may_share_levels_and_noise_and_groups_never_do():
    shared, own = (
        Levels(config(steps=6, timesteps=4, noise=noise), seed=1, epoch=2) for noise in ("group", "candidate")
    )
    assert len({tuple(shared.draw("g", c)) for c in range(20)}) == 1
    assert len({tuple(own.draw("g", c)) for c in range(20)}) > 10
    assert len({tuple(shared.draw(f"g{i}", 3)) for i in range(20)}) > 10
    a, b = (shared.noise((2, 3), "g", c, 0) for c in (1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, shared.noise((2, 3), "h", 1, 0))
    assert not torch.equal(own.noise((2, 3), "g", 1, 0), own.noise((2, 3), "g", 2, 0))
