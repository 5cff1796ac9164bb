"""The policy: three sets of the trained weights and everything that a faithful resume needs.

Three names, never mixed (DESIGN 6.1): `live` is what the optimizer moves; `old` is the behaviour policy that rolls out
and anchors the loss; `ema` is the average that evaluations use. Only trained parameters (requires_grad) are held, so
the same class serves full fine-tuning and LoRA.

How the module runs under another set: LoRA's `old` is an adapter of its own, and `base` is no adapter. Otherwise the
parameters are pointed at that set's tensors, which copies nothing; sharded parameters (FSDP) cannot be pointed
elsewhere, so their shards trade contents with the set's. Sets hold this rank's shards and checkpoints whole tensors: a
checkpoint is the same for any number of ranks, and any number can read it.

Trained weights must be float32: a moving average in bfloat16 loses most updates. Autocast gives the speed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipeline.digests import digest_tensors
from pipeline.errors import CheckpointError, NumericsError
from pipeline.updates.checkpoint import (
    STATE,
    Tensors,
    check_fit,
    each_tensor,
    read_shapes,
    read_state,
    read_tensors,
    verified,
    write_checkpoint,
)
from pipeline.updates.config import UpdateConfig
from pipeline.updates.ranks import Ranks, as_sharded, local_of, part_of, whole
from pipeline.updates.trained import (
    OLD,
    POLICY,
    old_parameters,
    prepare_params,
    trained_parameters,
    use_adapter,
)

__all__ = ["SETS", "Policy", "SetName", "load_weights", "prepare_params"]

SetName = Literal["live", "old", "ema"]
SETS: tuple[SetName, ...] = ("live", "old", "ema")
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Policy:
    """A module's live, old and ema weights, its optimizer, counters and generator.

    The module must be on its device already, and sharded if it is to be (`ranks.distribute`). `epoch` counts finished
    epochs, `step` optimizer steps. `rng` seeds whatever randomness is inside the model; the noise of rollout and update
    is keyed and needs no state. With several ranks every method is called by all of them.
    """

    def __init__(
        self, model: nn.Module, config: UpdateConfig, seed: int = 0, ranks: Ranks | None = None
    ) -> None:
        self.model, self.config, self.ranks = model, config, ranks or Ranks()
        self.params = trained_parameters(model)
        self._adapters = old_parameters(model)
        old: Mapping[str, torch.Tensor] = self._adapters or {
            name: local_of(p).clone() for name, p in self.params.items()
        }
        self.sets: dict[str, dict[str, torch.Tensor]] = {
            "live": {name: local_of(p) for name, p in self.params.items()},
            "old": {name: local_of(old[name]) for name in self.params},
            "ema": {name: local_of(p).clone() for name, p in self.params.items()},
        }
        self.active: SetName | Literal["base"] = "live"
        self._resident: SetName = "live"  # the set whose values are in the trained parameters
        self.optimizer = torch.optim.AdamW(
            self.params.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        self.rng = torch.Generator().manual_seed(seed)
        self.epoch = 0
        self.step = 0

    @contextmanager
    def swap(self, name: SetName | Literal["base"]) -> Iterator[nn.Module]:
        """Run the module under another set of weights; the one before comes back whatever happens inside.

        `base` is the network without its adapters, for LoRA alone. Only for inference: a graph that was recorded under
        one set must not be back-propagated under another.
        """
        known = (*SETS, "base") if self._adapters else SETS
        if name not in known:
            raise ValueError(f"no weight set {name!r}: there are {', '.join(known)}")
        before = self.active
        try:
            self._activate(name)
            yield self.model
        finally:
            self._activate(before)

    def _activate(self, name: SetName | Literal["base"]) -> None:
        if self._adapters:
            use_adapter(self.model, None if name == "base" else OLD if name == "old" else POLICY)
        resident: SetName = "live" if name == "base" or (self._adapters and name == "old") else name
        if resident != self._resident:
            self._bring_in(resident)
        self.active = name

    @torch.no_grad()
    def _bring_in(self, name: SetName) -> None:
        coming, leaving = self.sets[name], self.sets[self._resident]
        for key, parameter in self.params.items():
            if not isinstance(parameter.data, DTensor):
                parameter.data = coming[key]
                continue
            shard, other = leaving[key], coming[key]  # FSDP keeps hold of the memory that `shard` is
            values = shard.clone()
            shard.copy_(other)
            other.copy_(values)
            coming[key], leaving[key] = shard, other
        self._resident = name

    def _require_live(self, what: str) -> None:
        if self.active != "live":
            raise RuntimeError(
                f"{what} while the {self.active} weights are swapped in would train the wrong set"
            )

    @torch.no_grad()
    def update_old(self, decay: float) -> None:
        """old <- decay * old + (1 - decay) * live."""
        self._follow("old", decay)

    @torch.no_grad()
    def update_ema(self) -> None:
        """ema <- ema_decay * ema + (1 - ema_decay) * live."""
        self._follow("ema", self.config.ema_decay)

    def _follow(self, name: SetName, decay: float) -> None:
        for key, follower in self.sets[name].items():
            follower.lerp_(self.sets["live"][key], 1 - decay)

    @property
    def old_decay(self) -> float:
        """The decay of the epoch in progress (epochs count from 1)."""
        return self.config.old_decay.at(self.epoch + 1)

    def optimizer_step(self) -> float:
        """Clip, step, clear the gradients, let ema (and old, if `old_update: step`) follow; returns the gradient's
        norm.

        Raises NumericsError, before any weight changes, if the gradient is not finite.
        """
        self._require_live("an optimizer step")
        norm = torch.nn.utils.clip_grad_norm_(self.params.values(), self.config.grad_clip)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if not bool(torch.isfinite(norm)):
            raise NumericsError(
                f"the gradient's norm is {norm.item()} in epoch {self.epoch + 1}, optimizer step {self.step}: "
                f"lower update.lr ({self.config.lr}) or update.grad_clip ({self.config.grad_clip})"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_at(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.update_ema()
        if self.config.old_update == "step":
            self.update_old(self.old_decay)
        return float(norm)

    def finish_epoch(self) -> None:
        """Count the epoch, and let old follow if `old_update: epoch`."""
        self._require_live("the end of an epoch")
        if self.config.old_update == "epoch":
            self.update_old(self.old_decay)
        self.epoch += 1

    def digest(self) -> str:
        """sha256 over the old weights: the identity of what rolls out (the frozen base has its own digest)."""
        old = self._whole(self.sets["old"])
        return self.ranks.gather(digest_tensors(old) if self.ranks.is_first else "")[0]

    def _whole(self, shards: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Full tensors by name, on rank 0 alone, one gathered at a time. Names may go on behind a parameter's (`/`)."""
        out = {}
        for name, shard in shards.items():
            full = shard if name.endswith("/step") else whole(self.params[name.split("/")[0]], shard)
            if self.ranks.is_first:
                out[name] = full.cpu() if self.ranks.size > 1 else full
        return out

    def _content(self) -> Iterator[tuple[str, Tensors]]:
        for name in SETS:
            yield name, self._whole(self.sets[name])
        moments = {
            f"{name}/{key}": local_of(self.optimizer.state[p][key])
            for name, p in self.params.items()
            if p in self.optimizer.state
            for key in _MOMENTS
        }
        yield "optimizer", self._whole(moments)
        yield "rng", {"generator": self.rng.get_state()}

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write the folder atomically (rank 0); `extra` (JSON) is kept with it, e.g. the resolved parameters.

        Raises StorageError when the disk is full, with the previous folder untouched.
        """
        self._require_live("saving")
        state = {
            "epoch": self.epoch,
            "step": self.step,
            "scheduler": {"next_step": self.step, "lr": self.config.lr_at(self.step)},
            "digest": self.digest(),
            "extra": dict(extra or {}),
        }
        if self.ranks.is_first:
            write_checkpoint(folder, self._content(), state)
        else:
            for _ in self._content():
                pass  # takes part in gathering

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore everything, bit-equal, and return `extra`; nothing changes unless all of it fits.

        Raises CheckpointError naming the file or key that is missing, truncated, changed or of another shape.
        """
        self._require_live("loading")
        content = self._read(folder)
        with self.ranks.agreed():
            paths = {
                name: verified(folder, name, content, hashed=self.ranks.is_first)
                for name in (*SETS, "optimizer", "rng")
            }
            for name in SETS:
                check_fit(paths[name], read_shapes(paths[name]), self.params)
            scalar = torch.zeros(())
            need = {
                f"{n}/{k}": scalar if k == "step" else p for n, p in self.params.items() for k in _MOMENTS
            }
            kept = read_shapes(paths["optimizer"])
            check_fit(paths["optimizer"], kept, need, partial=True)
            rng = dict(each_tensor(paths["rng"]))
            check_fit(paths["rng"], rng, {"generator": self.rng.get_state()})
            state = content["state"]
            try:
                epoch, step, extra = int(state["epoch"]), int(state["step"]), dict(state["extra"])
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{folder / STATE}: its state is not complete ({error})") from error

        with torch.no_grad():
            for name in SETS:
                for key, tensor in each_tensor(paths[name]):
                    self.sets[name][key].copy_(part_of(self.params[key], tensor))
        self._restore_moments(paths["optimizer"])
        self.rng.set_state(rng["generator"].clone())
        self.epoch, self.step = epoch, step
        return extra

    def _read(self, folder: Path) -> dict[str, Any]:
        """state.json as rank 0 reads it: reading may finish a swap, which is one process's work."""
        content: dict[str, Any] = {}
        with self.ranks.agreed():
            if self.ranks.is_first:
                content = read_state(folder)
        return self.ranks.gather(content)[0]

    def _restore_moments(self, path: Path) -> None:
        self.optimizer.state.clear()
        for name, tensor in each_tensor(path):
            key, moment = name.rsplit("/", 1)
            parameter = self.params[key]
            if moment == "step":
                value = tensor.clone()  # a copy of its own: the file may go
            else:
                value = as_sharded(
                    parameter, part_of(parameter, tensor).to(local_of(parameter).device, copy=True)
                )
            self.optimizer.state[parameter][moment] = value


def load_weights(model: nn.Module, folder: Path, name: SetName) -> str:
    """Put one set of a saved policy into the model, for inference; returns the digest of its *old* weights.

    Reads that one file only. Raises CheckpointError as `Policy.load`.
    """
    content = read_state(folder)
    tensors, params = read_tensors(folder, name, content), trained_parameters(model)
    check_fit(folder / f"{name}.safetensors", tensors, {key: p.data for key, p in params.items()})
    with torch.no_grad():
        for key, parameter in params.items():
            parameter.copy_(tensors[key])
    return str(content["state"]["digest"])
