"""Pretraining of the mini world: flow matching on rendered clips, in exactly the form that inference uses.

The context pass and the velocity pass are the two calls of a rollout (clean context at timestep 14, RoPE re-indexed),
here with gradients; a packed chunk-causal pass would train other numbers than sampling reads (spec worldplay 1b).
Each context is shared by several noised copies of its target clip, which costs less than drawing new clips.
Everything random is keyed by (seed, step): a run that was killed goes on bit-identically from its last checkpoint.
"""

import json
import math
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from pipeline import files
from pipeline.allocator import keep_freed_memory
from pipeline.errors import CheckpointError, DataError, NumericsError
from pipeline.words import FAMILIES, TrainingMix
from pipeline.worlds.mini.clips import INTRINSICS_33, ClipBatch, sample_clips
from pipeline.worlds.mini.codec import PatchCodec
from pipeline.worlds.mini.config import PretrainConfig
from pipeline.worlds.mini.renderer import SPLITS, MiniScene, render, start_poses
from pipeline.worlds.mini.text import TEXT_DIM
from pipeline.worlds.wan import WorldPlayWan


def pretraining_mix(config: PretrainConfig) -> TrainingMix:
    """The words of pretraining: mostly single keys, so that compounds stay out of distribution as in real bases."""
    single, compound = 1 - config.compound_weight, config.compound_weight
    shares = {
        "translation": 0.5 * single,
        "yaw": 0.35 * single,
        "pitch": 0.15 * single,
        "two_translations": 0.15 * compound,
        "yaw_and_pitch": 0.1 * compound,
        "translation_and_yaw": 0.6 * compound,
        "translation_and_pitch": 0.15 * compound,
    }
    return TrainingMix(
        hold=config.hold, **{name: share / len(FAMILIES[name]) for name, share in shares.items()}
    )


def fit_codec(channels: int, seed: int) -> PatchCodec:
    """Fit the patch codec on frames of pretraining rooms."""
    frames = []
    for scene_seed in range(SPLITS["pretrain"][0], SPLITS["pretrain"][0] + 600):
        scene = MiniScene.make(scene_seed)
        poses = start_poses(scene, np.random.default_rng([seed, scene_seed]), 64)
        frames.append(render(scene, poses[scene.clear(poses[:, :3, 3])][:4]))
    return PatchCodec.fit(np.concatenate(frames), channels)


def build_model(config: PretrainConfig) -> WorldPlayWan:
    """A freshly initialised mini transformer, deterministic for the seed."""
    torch.manual_seed(config.seed)
    return WorldPlayWan(
        patch_size=(1, 1, 1),
        num_attention_heads=config.heads,
        attention_head_dim=config.dim // config.heads,
        in_channels=config.channels,
        out_channels=config.channels,
        text_dim=TEXT_DIM,
        freq_dim=64,
        ffn_dim=config.ffn,
        num_layers=config.layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        eps=1e-6,
        rope_max_seq_len=64,
    )


def make_optimizers(model: torch.nn.Module, config: PretrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices (about twice the progress a step of AdamW here), AdamW for all the rest."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if name.startswith("blocks.") and parameter.ndim == 2 else rest).append(parameter)
    muon = torch.optim.Muon(matrices, lr=config.lr_matrix, weight_decay=0.01, momentum=0.95)
    adam = torch.optim.AdamW(rest, lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0)
    return [muon, adam]


def lr_factor(step: int, config: PretrainConfig) -> float:
    """Linear warm-up, then a cosine to a hundredth; the last `anneal` steps fall linearly to 0 on top of it."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, (config.horizon or config.steps) - config.warmup)
    end = min(1.0, (config.steps - step) / config.anneal) if config.anneal else 1.0
    return end * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def draw_batch(config: PretrainConfig, step: int) -> ClipBatch:
    """The clips of one step: a pure function of the parameters and the step."""
    rng = np.random.default_rng([config.seed, step, 0xC11F])
    clip_index = int(
        rng.choice(len(config.clip_shares), p=np.array(config.clip_shares) / sum(config.clip_shares))
    )
    return sample_clips(rng, config.batch, clip_index, pretraining_mix(config), config.noise)


def _start_worker(parent: int) -> None:
    """One thread for rendering, and an end when the training is killed: kill -9 tells a pool's workers nothing."""
    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def batches(config: PretrainConfig, start: int, workers: int) -> Iterator[ClipBatch]:
    """The batches from step `start` on; `workers` processes render ahead (0: render in this process)."""
    if not workers:
        yield from (draw_batch(config, step) for step in range(start, config.steps))
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, initializer=_start_worker, initargs=(os.getpid(),)) as pool:
        ahead = deque(
            pool.submit(draw_batch, config, step)
            for step in range(start, min(start + workers + 2, config.steps))
        )
        for step in range(start + len(ahead), config.steps + len(ahead)):
            yield ahead.popleft().result()
            if step < config.steps:
                ahead.append(pool.submit(draw_batch, config, step))


def training_loss(
    model: WorldPlayWan, codec: PatchCodec, config: PretrainConfig, batch: ClipBatch, step: int
) -> torch.Tensor:
    """Flow-matching loss of one step's batch (mean over copies, latents with loss, channels and cells)."""
    generator = torch.Generator().manual_seed(
        int(np.random.default_rng([config.seed, step, 0x401]).integers(2**62))
    )
    B, M = config.batch, config.copies
    K_33 = torch.from_numpy(INTRINSICS_33).float()

    def encode(frames_BTHW3: torch.Tensor) -> torch.Tensor:
        flat = codec.encode_float(frames_BTHW3.flatten(0, 1))
        return flat.reshape(flat.shape[0], B, -1, *flat.shape[2:]).transpose(0, 1)

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat_interleave(M, 0)

    x0 = repeat(encode(batch.frames_BTHW3))
    # Stratified uniform draws lower the loss's variance at no cost; the shift moves them to high noise as in sampling.
    uniform = (torch.arange(B * M) + torch.rand(B * M, generator=generator))[
        torch.randperm(B * M, generator=generator)
    ] / (B * M)
    sigma = config.shift * uniform / (1 + (config.shift - 1) * uniform)
    noise = torch.randn(x0.shape, generator=generator)
    sigma_BT = sigma[:, None].repeat(1, 4)
    context_x0 = None if batch.context_frames_BTHW3 is None else encode(batch.context_frames_BTHW3)
    with torch.autocast("cpu", torch.bfloat16):
        context = None
        if batch.context_frames_BTHW3 is not None:
            assert batch.context_labels_BT is not None
            assert batch.context_w2c_BT44 is not None
            c = batch.context_labels_BT.shape[1]
            context = model(
                "context",
                latents_BCTHW=context_x0,
                timestep_BT=torch.full((B, c), 14.0),
                labels_BT=batch.context_labels_BT,
                w2c_BT44=batch.context_w2c_BT44,
                K_BT33=K_33.expand(B, c, 3, 3),
                text_BLD=batch.text_BLD,
            )
            context = replace(
                context,
                layers=[(repeat(k), repeat(v)) for k, v in context.layers],
                w2c_BT44=repeat(context.w2c_BT44),
                K_BT33=repeat(context.K_BT33),
            )
        else:
            sigma_BT[:, 0] = 0.0  # the conditioning latent is clean, at the context's timestep
        x_sigma = x0 + sigma_BT[:, None, :, None, None] * (noise - x0)
        timestep = torch.where(sigma_BT > 0, sigma_BT * 1000, torch.full_like(sigma_BT, 14.0))
        v = model(
            "velocity",
            latents_BCTHW=x_sigma,
            timestep_BT=timestep,
            labels_BT=repeat(batch.labels_BT),
            w2c_BT44=repeat(batch.w2c_BT44),
            K_BT33=K_33.expand(B * M, 4, 3, 3),
            text_BLD=repeat(batch.text_BLD),
            rope_start=0 if context is None else context.frames,
            context=context,
        )
    first = 1 if context is None else 0
    return (v.float() - (noise - x0))[:, :, first:].square().mean()


SCHEDULE = ("steps", "horizon", "anneal", "save_every")  # what a training that goes on may change


def is_finished(config: PretrainConfig, folder: Path) -> bool:
    """Whether `folder` holds the base that these parameters end with; the state of its training may be gone.

    Raises CheckpointError when it holds a base of other parameters, which training would overwrite.
    """
    path = folder / "pretrain.json"
    parts = (folder / "transformer" / "config.json", folder / "codec.safetensors", path)
    if not all(part.exists() for part in parts) or not any(folder.glob("transformer/*.safetensors")):
        return False
    try:
        about = files.read_json(path, "delete the folder to train again")
    except DataError as error:
        raise CheckpointError(str(error)) from error
    if about.get("config") != json.loads(config.model_dump_json()):
        raise CheckpointError(
            f"{path}: the base was made with other pretrain parameters; choose another folder or restore them"
        )
    return bool(about.get("step") == config.steps)


def pretrain(
    config: PretrainConfig,
    folder: Path,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    workers: int = 0,
    compiled: bool = False,
) -> None:
    """Train (or go on training) a base in `folder`: transformer/ (EMA weights), codec.safetensors, pretrain.json.

    `workers` processes render ahead; `compiled` uses torch.compile (about a sixth faster, needs a C++ compiler; equal
    within rounding, not in bits).

    Raises NumericsError when the loss is not finite and CheckpointError when the folder's base, state or codec is of
    other parameters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    keep_freed_memory()
    model = build_model(config)
    codec_path, state_path, log_path = (
        folder / "codec.safetensors",
        folder / "state.safetensors",
        folder / "loss.csv",
    )
    if not state_path.exists() and is_finished(config, folder):
        return  # with a state there, going on from it finds nothing left to do
    if not codec_path.exists():
        fit_codec(config.channels, config.seed).save(codec_path)
    codec = PatchCodec.load(codec_path)
    if codec.channels != config.channels:
        raise CheckpointError(
            f"{codec_path}: has {codec.channels} channels where pretrain.channels is {config.channels}; "
            "choose another folder, or delete the file to fit a new codec"
        )
    optimizers = make_optimizers(model, config)
    ema = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    start = 0
    legs: list[dict] = []
    if state_path.exists():
        start, legs = _resume(state_path, config, model, ema, optimizers)
    schedule = {key: getattr(config, key) for key in SCHEDULE}
    if not legs or {key: legs[-1][key] for key in SCHEDULE} != schedule:
        legs = [*legs, {"from_step": start, **schedule}]
    log = log_path.read_text().splitlines()[:start] if start else []
    if compiled:
        for block in model.blocks:
            block.compile()
    for step, batch in zip(range(start, config.steps), batches(config, start, workers), strict=False):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
                group["lr"] = group["initial_lr"] * lr_factor(step, config)
        loss = training_loss(model, codec, config, batch, step)
        if not torch.isfinite(loss):
            raise NumericsError(
                f"{folder}: loss is {loss.item()} at step {step}; "
                "lower pretrain.lr and start again from the last checkpoint"
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        decay = min(config.ema, (step + 1) / (step + 10))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                ema[name].lerp_(parameter, 1 - decay)
        log.append(f"{loss.item():.6f}")
        on_step(step, loss.item())
        if (step + 1) % config.save_every == 0 or step + 1 == config.steps:
            log_path.write_text("\n".join(log) + "\n")
            _save(folder, state_path, config, legs, model, ema, optimizers, step + 1)


def _save(
    folder: Path,
    path: Path,
    config: PretrainConfig,
    legs: list[dict],
    model: WorldPlayWan,
    ema: dict,
    optimizers: list,
    step: int,
) -> None:
    """Write the base, then the state: a kill in between repeats some steps, and no stale base looks finished."""
    live = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(ema[name])
        model.save_pretrained(folder / "transformer")
        for name, parameter in model.named_parameters():
            parameter.copy_(live[name])
    (folder / "pretrain.json").write_text(
        json.dumps({"step": step, "config": config.model_dump(), "legs": legs}, indent=1) + "\n"
    )
    tensors = {f"live.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    tensors |= {f"ema.{name}": value for name, value in ema.items()}
    for o, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{o}.{index}.{key}": value.clone() for key, value in state.items()}
    temporary = path.with_suffix(".partial")
    save_file(
        {k: v.contiguous() for k, v in tensors.items()},
        temporary,
        metadata={"step": str(step), "config": config.model_dump_json(), "legs": json.dumps(legs)},
    )
    temporary.replace(path)


def _resume(
    path: Path, config: PretrainConfig, model: WorldPlayWan, ema: dict, optimizers: list
) -> tuple[int, list[dict]]:
    """Load the state; the step it is at and the legs of its training: from which step which schedule held."""
    try:
        with safe_open(path, "pt") as handle:
            metadata = handle.metadata()
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}); delete it to start the training again"
        ) from error
    was, now = json.loads(metadata["config"]), json.loads(config.model_dump_json())
    other = sorted(key for key in now if key not in SCHEDULE and was.get(key) != now[key])
    if other:
        raise CheckpointError(
            f"{path}: was made with other pretrain parameters ({', '.join(other)}); choose another folder or "
            f"restore them (only {', '.join(SCHEDULE)} may change, to train on for longer)"
        )
    if int(metadata["step"]) > config.steps:
        raise CheckpointError(
            f"{path}: is at step {metadata['step']}, past pretrain.steps = {config.steps}; raise pretrain.steps"
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"live.{name}"])
            ema[name].copy_(tensors[f"ema.{name}"])
    for o, optimizer in enumerate(optimizers):
        state: dict[int, dict] = {}
        for key, value in tensors.items():
            if key.startswith(f"optimizer.{o}."):
                index, field = key.split(".")[2:]
                state.setdefault(int(index), {})[field] = value
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    first_leg = [{"from_step": 0, **{key: was.get(key) for key in SCHEDULE}}]
    return int(metadata["step"]), json.loads(metadata["legs"]) if "legs" in metadata else first_leg
