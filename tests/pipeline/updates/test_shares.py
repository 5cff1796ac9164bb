"""Cutting an epoch's samples into steps and shares: every sample once, in order, evenly, for any number of ranks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.updates.shares import plan, spread, straddlers

SIZES = st.lists(st.integers(0, 9), max_size=12)


def samples_of(share):
    return [(piece.group, row) for piece in share for row in piece.rows]


def test_spread_keeps_every_sample():
    assert spread(6, 4) == [3, 3]
    assert spread(7, 3) == [3, 2, 2]
    assert spread(4, 16) == [4]
    assert spread(0, 4) == []


@settings(deadline=None)
@given(SIZES, st.integers(1, 20), st.integers(1, 9))
def test_every_sample_once_in_order_and_evenly(sizes, per_step, ranks):
    steps = plan(sizes, per_step, ranks)
    everything = [(group, row) for group, size in enumerate(sizes) for row in range(size)]
    assert [sample for shares in steps for share in shares for sample in samples_of(share)] == everything
    for shares in steps:
        counts = [len(samples_of(share)) for share in shares]
        assert len(counts) == ranks
        assert max(counts) - min(counts) <= 1
        assert 0 < sum(counts) <= per_step
        for share in shares:
            assert all(len(piece.rows) for piece in share)
            assert len({piece.group for piece in share}) == len(share)


@settings(deadline=None)
@given(SIZES, st.integers(1, 20), st.integers(2, 9))
def test_steps_do_not_depend_on_the_number_of_ranks(sizes, per_step, ranks):
    alone, shared = plan(sizes, per_step, 1), plan(sizes, per_step, ranks)
    assert [samples_of(shares[0]) for shares in alone] == [
        [sample for share in shares for sample in samples_of(share)] for shares in shared
    ]


@settings(deadline=None)
@given(SIZES, st.integers(1, 20), st.integers(1, 9))
def test_a_straddler_is_begun_by_others_and_gone_on_with_here(sizes, per_step, ranks):
    steps = plan(sizes, per_step, ranks)
    for rank in range(ranks):
        found = straddlers(steps, rank)
        mine = {}
        for step, shares in enumerate(steps):
            for piece in shares[rank]:
                mine.setdefault(piece.group, step)
        begins = {}
        for step, shares in enumerate(steps):
            for share in shares:
                for piece in share:
                    begins.setdefault(piece.group, step)
        late = {group: begins[group] for group, step in mine.items() if step > begins[group]}
        assert {group: step for step, group in found.items()} == late
        if ranks == 1:
            assert not found
