"""The groups that an epoch trains, as the stores hold them: sizes first, contents one group at a time.

A rank loads only the groups of which it trains samples. Candidates that are whole videos (`rollout.mode: cycle`) have a
past of their own, so each is a group of one; only its last clip is trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pipeline.groups import Past, read_past
from pipeline.plan import first_clip
from pipeline.rollout import clip_slice
from pipeline.updates.loop import TrainingGroup

if TYPE_CHECKING:
    from pipeline.stores import GroupStore
    from pipeline.worlds.base import WorldModel


class _Entry(NamedTuple):
    """Which candidates of which stored group are one training group; `alone` where their pasts differ."""

    group: int
    candidates: list[int]
    alone: bool


class StoredGroups:
    """The selected candidates in group order; a group without any is passed over. Reading raises DataError."""

    def __init__(
        self, world: WorldModel, prefixes: GroupStore, rollouts: GroupStore, advantages: GroupStore
    ) -> None:
        self.world, self.prefixes, self.rollouts, self.advantages = world, prefixes, rollouts, advantages
        self.entries: list[_Entry] = []
        self._last: tuple[int, Past, torch.Tensor] | None = None
        for index in range(len(advantages)):
            chosen = [int(candidate) for candidate in advantages.read(index, "order") if candidate >= 0]
            record = prefixes.record(index)
            if first_clip(record) < int(record["target_clip"]):
                self.entries += [_Entry(index, [candidate], True) for candidate in chosen]
            elif chosen:
                self.entries.append(_Entry(index, chosen, False))

    @property
    def sizes(self) -> list[int]:
        return [len(entry.candidates) for entry in self.entries]

    def __getitem__(self, number: int) -> TrainingGroup:
        entry = self.entries[number]
        past, latents = self._read(entry.group)
        at = clip_slice(self.world, past.clip)
        latents_NCTHW = latents[entry.candidates].float()
        history_CTHW, x0_NCTHW = past.latents_CTHW, latents_NCTHW
        if entry.alone:
            history_CTHW, x0_NCTHW = latents_NCTHW[0][:, : at.start], latents_NCTHW[:, :, at]
        seed = int(self.prefixes.about["inputs"]["params"]["seed"])
        return TrainingGroup(
            key=self.rollouts.keys[entry.group],
            scene=past.scene,
            history_CTHW=history_CTHW,
            context=self.world.select_context(past.c2w_T44[: at.stop], past.clip - 1, seed),
            condition=past.condition,
            clip=past.condition.select(at),
            x0_NCTHW=x0_NCTHW,
            r_N=torch.from_numpy(self.advantages.read(entry.group, "r")[entry.candidates]).float(),
            candidates=entry.candidates,
            loss_mask_T=self.world.loss_mask_T(past.clip - 1),
        )

    def _read(self, index: int) -> tuple[Past, torch.Tensor]:
        if self._last is None or self._last[0] != index:
            self._last = index, read_past(self.prefixes, index), self.rollouts.read_tensor(index, "latents")
        return self._last[1:]
