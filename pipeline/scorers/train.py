"""Training of the two embedded scorers, from any source of rendered frames.

The renderer is an argument, so that these loops know no world. Everything of step i is drawn from
generators keyed by (seed, i): a run that is killed and resumed from its checkpoint ends with the same bits
as one that was not.

The pose network sees clean labels but spoiled frames (noise, blur, blocks, a codec): it will read generated
frames, and a network trained on perfect renders fails on the codec's artifacts first. The critic sees pairs
whose order is known: the same frame degraded once and once more, or two frames with the same kind of damage
of clearly different severity."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from pipeline import files
from pipeline.camera import StepSize
from pipeline.errors import CheckpointError, NumericsError
from pipeline.scorers.critic import Critic, preference_loss
from pipeline.scorers.degrade import DEGRADATIONS, Degradation, by_reconstruction, degrade
from pipeline.scorers.pose_net import PoseNet, motion_of_relative

Progress = Callable[[int, int, dict[str, float]], None]
# (generator, batch) -> uint8 videos (B, F, H, W, 3) and their true relative c2w poses (B, F-1, 4, 4)
RenderVideos = Callable[[np.random.Generator, int], tuple[NDArray[np.uint8], NDArray[np.float64]]]
# (generator, batch) -> uint8 frames (B, H, W, 3), each of another view
RenderFrames = Callable[[np.random.Generator, int], NDArray[np.uint8]]
Reconstruct = Callable[[torch.Tensor], torch.Tensor]
Net = TypeVar("Net", bound=nn.Module)


@dataclass(frozen=True)
class TrainOptions:
    """Length, speed and safety of a scorer's training. `bf16` runs convolutions and matmuls in bfloat16
    autocast."""

    steps: int
    batch: int = 64
    seed: int = 0
    lr: float = 2e-3
    weight_decay: float = 1e-4
    warmup: int = 50
    bf16: bool = False
    checkpoint: Path | None = None  # one safetensors file, written atomically; resumed from if it exists
    checkpoint_every: int = 500

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then half a cosine to a hundredth."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.01 + 0.99 * 0.5 * (1 + float(np.cos(np.pi * progress))))

    def precision(self) -> torch.autocast:
        """For the network alone: degradations and losses stay in float32."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)


def _generators(seed: int, step: int) -> tuple[np.random.Generator, torch.Generator]:
    numpy = np.random.default_rng([seed, step])
    return numpy, torch.Generator().manual_seed(int(numpy.integers(2**62)))


def _to_float(frames: NDArray[np.uint8]) -> torch.Tensor:
    """uint8 (..., H, W, 3) -> float (..., 3, H, W) in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(frames)).movedim(-1, -3).float() / 255


def fit(
    net: Net,
    loss_of: Callable[[np.random.Generator, torch.Generator], tuple[torch.Tensor, dict[str, float]]],
    options: TrainOptions,
    on_progress: Progress | None = None,
) -> Net:
    """Minimise `loss_of` for `options.steps` steps with AdamW; resumes from the checkpoint, bit-equal.

    Raises NumericsError if the loss is not finite (nothing is written), CheckpointError for a foreign
    checkpoint."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.lr, weight_decay=options.weight_decay)
    start = _resume(net, optimizer, options.checkpoint)
    net.train()
    for step in range(start, options.steps):
        optimizer.param_groups[0]["lr"] = options.lr_at(step)
        loss, metrics = loss_of(*_generators(options.seed, step))
        if not bool(torch.isfinite(loss)):
            raise NumericsError(
                f"{type(net).__name__}: loss is {loss.item()} at step {step}: lower lr ({options.lr})"
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        done = step + 1
        if options.checkpoint and (done % options.checkpoint_every == 0 or done == options.steps):
            _save(net, optimizer, options.checkpoint, done)
        if on_progress:
            on_progress(done, options.steps, {"loss": loss.item(), **metrics})
    return net.eval()


def _save(net: nn.Module, optimizer: torch.optim.Optimizer, path: Path, step: int) -> None:
    tensors = {f"net/{key}": value.detach().clone() for key, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        tensors |= {f"optimizer/{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    files.write_bytes(path, safetensors.torch.save(tensors, {"step": str(step), "net": type(net).__name__}))


def _resume(net: nn.Module, optimizer: torch.optim.Optimizer, path: Path | None) -> int:
    if path is None or not path.exists():
        return 0
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about, tensors = file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if about.get("net") != type(net).__name__:
            raise ValueError(f"it holds a {about.get('net')}")
        net.load_state_dict({key[4:]: value for key, value in tensors.items() if key.startswith("net/")})
        for name, parameter in net.named_parameters():
            keys = ("step", "exp_avg", "exp_avg_sq")
            optimizer.state[parameter] = {key: tensors[f"optimizer/{name}/{key}"] for key in keys}
        return int(about["step"])
    except Exception as error:  # safetensors raises its own untyped error; every cause has the same remedy
        raise CheckpointError(
            f"{path}: cannot resume {type(net).__name__} from it ({error}); delete it to start again"
        ) from error


def spoil(
    frames_BF3HW: torch.Tensor, generator: torch.Generator, reconstruct: Reconstruct | None = None
) -> torch.Tensor:
    """What a generated video does to its frames: a codec's loss, blur, noise, blocks, a colour shift; half
    stay clean.

    Kind and severity are drawn per video; noise differs between its frames.
    """
    kinds = {name: DEGRADATIONS[name] for name in ("blur", "noise", "blocks", "colour")}
    b, f = frames_BF3HW.shape[:2]
    out = frames_BF3HW.flatten(0, 1)
    if reconstruct:
        through = torch.rand(b, generator=generator).lt(0.6).repeat_interleave(f)[:, None, None, None]
        out = torch.where(through, reconstruct(out).clamp(0, 1), out)
    kind = torch.randint(2 * len(kinds), (b,), generator=generator)  # the upper half: no further damage
    severity = 0.6 * torch.rand(b, generator=generator)
    out = degrade(out, kind.repeat_interleave(f), severity.repeat_interleave(f), generator, kinds)
    return out.unflatten(0, (b, f))


def train_pose_net(
    render_batch: RenderVideos,
    step: StepSize,
    options: TrainOptions,
    net: PoseNet | None = None,
    reconstruct: Reconstruct | None = None,
    on_progress: Progress | None = None,
) -> PoseNet:
    """Train a pose network on rendered videos; motions in units of `step`. Raises as `fit`."""
    torch.manual_seed(options.seed)  # the network's initial weights
    net = net or PoseNet()

    def loss_of(
        rng: np.random.Generator, generator: torch.Generator
    ) -> tuple[torch.Tensor, dict[str, float]]:
        frames, rel = render_batch(rng, options.batch)
        target = torch.from_numpy(motion_of_relative(rel, step)).float()
        seen = spoil(_to_float(frames), generator, reconstruct)
        with options.precision():
            predicted = net(seen).float()
        error = (predicted.detach() - target).abs()
        metrics = {
            "translation_error": error[..., :3].mean().item(),
            "rotation_error": error[..., 3:].mean().item(),
        }
        return F.smooth_l1_loss(predicted, target, beta=0.3), metrics

    return fit(net, loss_of, options, on_progress)


def preference_pairs(
    frames_N3HW: torch.Tensor, generator: torch.Generator, kinds: dict[str, Degradation]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(better, worse), each (N, 3, H, W), from N frames of different views.

    First half: the same frame, damaged once (or not at all) against damaged once more. Second half: the
    same kind of damage on two different frames, mild against clearly worse, so that scores compare across
    views."""
    n, half = len(frames_N3HW), len(frames_N3HW) // 2

    def draw(low: float, high: float, count: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    kind = torch.randint(len(kinds), (n,), generator=generator)
    clean = torch.rand(half, generator=generator) < 0.4
    before = torch.where(clean, torch.zeros(half), draw(0.0, 0.6, half))
    better_same = degrade(frames_N3HW[:half], kind[:half], before, generator, kinds)
    second = torch.randint(len(kinds), (half,), generator=generator)
    worse_same = degrade(better_same, second, draw(0.15, 1.0, half), generator, kinds)

    mild = draw(0.0, 0.5, n - half)
    strong = (mild + draw(0.3, 0.6, n - half)).clamp(max=1)
    better_other = degrade(frames_N3HW[half:], kind[half:], mild, generator, kinds)
    worse_other = degrade(frames_N3HW[half:].roll(1, 0), kind[half:], strong, generator, kinds)
    return torch.cat([better_same, better_other]), torch.cat([worse_same, worse_other])


def train_critic(
    render_frames: RenderFrames,
    options: TrainOptions,
    net: Critic | None = None,
    reconstruct: Reconstruct | None = None,
    on_progress: Progress | None = None,
) -> Critic:
    """Train a critic on pairs made from rendered frames. Raises as `fit`."""
    torch.manual_seed(options.seed)
    net = net or Critic()
    kinds = dict(DEGRADATIONS) | ({"codec": by_reconstruction(reconstruct)} if reconstruct else {})

    def loss_of(
        rng: np.random.Generator, generator: torch.Generator
    ) -> tuple[torch.Tensor, dict[str, float]]:
        frames = _to_float(render_frames(rng, options.batch))
        better, worse = preference_pairs(frames, generator, kinds)
        with options.precision():
            scores = net(torch.cat([better, worse])).float()
        a, b = scores.chunk(2)
        return preference_loss(a, b), {"accuracy": (a > b).float().mean().item()}

    return fit(net, loss_of, options, on_progress)
