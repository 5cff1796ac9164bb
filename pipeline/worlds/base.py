"""What a world model is to the rest of the pipeline: one protocol and the small records that go through it.

The sampler and the training loss meet in `velocity`, the only function that runs the denoiser; everything else
prepares its arguments. Facts that hold for all worlds (spec worldplay 2, 6): a clip is 4 latents; the first clip holds
the conditioning latent and 3 actions; poses are relative to frame 0; context is clean and shown at one small timestep.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from pipeline.errors import ConfigError


@dataclass
class Scene:
    """What a video starts from: the clean first latent and the text, without batch axes. `key` names it in digests.

    `extras` are further embeddings by name, as their world reads them (8B: text_mask, byt5, byt5_mask, vision).
    `negative` is the same scene under the text that guidance leads away from; None where nothing is guided.
    """

    first_latent_CHW: torch.Tensor
    text_LD: torch.Tensor
    key: str
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    negative: "Scene | None" = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Text and extras by the names that stores give them; `from_tensors` is the inverse."""
        own = {"text": self.text_LD} | {f"extra.{name}": value for name, value in self.extras.items()}
        if self.negative is None:
            return own
        return own | {f"negative.{name}": value for name, value in self.negative.tensors().items()}

    @staticmethod
    def from_tensors(
        tensors: Mapping[str, torch.Tensor], first_latent_CHW: torch.Tensor, key: str
    ) -> "Scene":
        """A scene from `tensors()` and its first latent, which a negative shares. Other names are passed over."""

        def of(prefix: str) -> "Scene":
            extra = f"{prefix}extra."
            return Scene(
                first_latent_CHW,
                tensors[f"{prefix}text"],
                key,
                {name[len(extra) :]: value for name, value in tensors.items() if name.startswith(extra)},
            )

        scene = of("")
        if "negative.text" in tensors:
            scene.negative = of("negative.")
        return scene


@dataclass
class ClipCondition:
    """Actions and cameras of some latents: labels int64 [T], w2c fp32 [T, 4, 4], normalised K fp32 [T, 3, 3].

    A batched form has one more leading axis on all three. w2c is relative to frame 0, in units of the world.
    """

    labels_T: torch.Tensor
    w2c_T44: torch.Tensor
    K_T33: torch.Tensor

    def batched(self) -> "ClipCondition":
        """The same with a batch axis (of 1 if there was none); batch 1 is shared by all candidates."""
        if self.labels_T.ndim == 2:
            return self
        return ClipCondition(self.labels_T[None], self.w2c_T44[None], self.K_T33[None])

    def select(self, latents: slice | Sequence[int]) -> "ClipCondition":
        """The part that belongs to these latents, in their order (time is the axis after the batch axis, if any)."""
        at: Any = latents if isinstance(latents, slice) else torch.as_tensor(list(latents), dtype=torch.long)
        if self.labels_T.ndim == 2:
            return ClipCondition(self.labels_T[:, at], self.w2c_T44[:, at], self.K_T33[:, at])
        return ClipCondition(self.labels_T[at], self.w2c_T44[at], self.K_T33[at])

    def to(self, device: torch.device | str) -> "ClipCondition":
        return ClipCondition(self.labels_T.to(device), self.w2c_T44.to(device), self.K_T33.to(device))

    @staticmethod
    def of(labels: np.ndarray, c2w: np.ndarray, K: np.ndarray) -> "ClipCondition":
        """From numpy labels [..., T], camera-to-world poses [..., T, 4, 4] and K [3, 3] or [..., T, 3, 3]."""
        w2c = torch.from_numpy(np.linalg.inv(np.asarray(c2w, dtype=np.float64))).float()
        intrinsics = torch.as_tensor(np.asarray(K), dtype=torch.float32).expand(*w2c.shape[:-2], 3, 3)
        return ClipCondition(torch.as_tensor(np.asarray(labels), dtype=torch.int64), w2c, intrinsics)


@dataclass
class ContextCache:
    """Keys and values of the context latents, one pair a layer, and how many latents they are.

    The layout within a layer belongs to the model that built it; the first axis is the batch, 1 where the context is
    shared by all candidates. Built once for a group and used by all its candidates and timesteps.
    """

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    frames: int

    def expand(self, batch: int) -> "ContextCache":
        """The same context for `batch` samples, sharing memory."""
        return replace(
            self,
            layers=[(k.expand(batch, *k.shape[1:]), v.expand(batch, *v.shape[1:])) for k, v in self.layers],
        )

    def detach(self) -> "ContextCache":
        return replace(self, layers=[(k.detach(), v.detach()) for k, v in self.layers])

    def to(self, *args: Any, **kwargs: Any) -> "ContextCache":
        """As `torch.Tensor.to`, for every tensor."""
        return replace(self, layers=[(k.to(*args, **kwargs), v.to(*args, **kwargs)) for k, v in self.layers])


@dataclass(frozen=True)
class MemoryRule:
    """Which history latents a clip may look at, all counted in latents (spec worldplay 2, "Memory rule").

    All history while it fits in `budget`; then the first `sink`, the last `recent`, and the best-overlapping older
    clips of 4 until the budget is full. 5B: budget 16, recent 12, sink 0. 8B: budget 20, recent 12, sink 4.
    Radius, view cone and `points` define the overlap score; lengths are in units of the world.
    """

    budget: int = 16
    recent: int = 12
    sink: int = 0
    radius: float = 8.0
    half_width_deg: float = 30.0
    half_height_deg: float = 17.5
    points: int = 5000

    def __post_init__(self) -> None:
        free = self.budget - self.sink - self.recent
        if self.recent < 0 or self.sink < 0 or free < 0 or self.recent % 4 or self.sink % 4 or free % 4:
            raise ConfigError(
                f"memory: budget {self.budget}, recent {self.recent} and sink {self.sink} must be multiples of 4 "
                "(a clip) and recent + sink fit into the budget"
            )


@dataclass(frozen=True)
class WorldSpec:
    """Constants of a world: `latent_shape` is (C, h, w), `frame_size` (height, width) in pixels.

    `stride` is frames a latent; `steps` and `shift` are the sampler's defaults. `truncate_timestep`: the model is told
    int(1000 sigma), as WorldCompass does. `condition_latent`: a scene's first latent stands beside the video and is not
    its latent 0, so it has to be kept beside the history.
    """

    latent_shape: tuple[int, int, int]
    frame_size: tuple[int, int]
    stride: int = 4
    clip_latents: int = 4
    context_timestep: float = 14.0
    truncate_timestep: bool = False
    memory: MemoryRule = MemoryRule()
    steps: int = 4
    shift: float = 8.0
    fps: int = 16
    condition_latent: bool = False


@dataclass
class Guidance:
    """Classifier-free guidance: v = v_negative + scale (v - v_negative), with the negative scene's own context."""

    scale: float
    scene: Scene
    context: ContextCache | None


@dataclass
class ForwardCounter:
    """Costs in sequences: a batch of B counts B. Context passes are counted apart from denoiser forwards."""

    denoiser: int = 0
    context: int = 0

    def reset(self) -> None:
        self.denoiser = self.context = 0


class Codec(Protocol):
    """Frames <-> latents."""

    def encode(self, frames_FHW3: np.ndarray) -> torch.Tensor:
        """uint8 frames, F = 1 + stride (T - 1) -> float32 latents [C, T, h, w], normalised to about unit variance."""

    def decode(self, latents_CTHW: torch.Tensor, state: Any = None) -> tuple[np.ndarray, Any]:
        """Latents -> uint8 frames [F, H, W, 3] and the streaming state for the next call (None: the video begins)."""


class WorldModel(Protocol):
    """What rollout and update need of a world. Latents of candidates are [B, C, T, h, w]."""

    spec: WorldSpec
    forwards: ForwardCounter

    def encode_scene(self, frame_HW3: np.ndarray, text: Any, key: str) -> Scene:
        """First frame (uint8 [H, W, 3]) and its text -> Scene.

        `text` is a caption, where the world has a text encoder, embeddings [L, D], or a mapping of embeddings: `text`
        and the world's extras. Raises ValueError when the frame is not of the world's size or text cannot be encoded.
        """

    def select_context(self, c2w_T44: np.ndarray, clip_index: int, seed: int = 0) -> list[int]:
        """Indices of the history latents that clip `clip_index` (from 0) looks at; pure; empty for clip 0.

        `c2w_T44` are the poses of at least all latents up to the end of that clip.
        """

    def build_context(
        self, scene: Scene, latents_CTHW: torch.Tensor, indices: Sequence[int], condition: ClipCondition
    ) -> ContextCache | None:
        """Cache (batch 1) of the chosen history latents, clean, without gradient, at RoPE times 0, 1, ...

        `latents_CTHW` is the history and `condition` belongs to the whole video: both are indexed by `indices`. None if
        there are none.
        """

    def velocity(
        self,
        x_BCTHW: torch.Tensor,
        sigma_B: torch.Tensor | float,
        clip: ClipCondition,
        scene: Scene,
        context: ContextCache | None,
    ) -> torch.Tensor:
        """noise - x0 predicted at noise level sigma (a number or one a sample), fp32 [B, C, T, h, w].

        Differentiable in the weights. `context` None means the first clip.
        """

    def sample_clip(
        self,
        scene: Scene,
        context: ContextCache | None,
        clip: ClipCondition,
        sigmas: torch.Tensor,
        noise_BCTHW: torch.Tensor,
        guidance: Guidance | None = None,
    ) -> torch.Tensor:
        """Denoise all candidates together along `sigmas` (from 1 to 0): x0, fp32 [B, C, T, h, w], no gradient.

        With `guidance` every step costs two forwards.
        """

    def loss_mask_T(self, clip_index: int) -> torch.Tensor:
        """bool [T]: latents that the clip generates (all but the conditioning latent of clip 0)."""

    def decode(self, latents_CTHW: torch.Tensor, state: Any = None) -> tuple[np.ndarray, Any]:
        """As `Codec.decode`."""

    def save(self, folder: Path) -> None:
        """Write the trained network as a diffusers folder, `folder`/transformer."""
