"""params.yaml, read strictly: every number that a person may change, and a clear line when one is wrong.

WHY strict: a misspelt key that is silently ignored costs days of GPU time. Each component owns its configuration class
(`advantages.AdvantageConfig`, `updates.config.UpdateConfig`, `words.TrainingMix`); this file only joins them, resolves
what an epoch overrides, and turns pydantic's reports into one line with the key's full path and the nearest name.

The file is read as YAML 1.2 (ruamel.yaml), as DVC reads it: `1e-5` is a number there and a string in YAML 1.1.
Nothing here imports torch: stages that do not need it start quickly.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline.advantages import AdvantageConfig
from pipeline.benchmark.config import AccuracyConfig, CycleBenchConfig
from pipeline.cycle_config import CycleConfig
from pipeline.errors import ConfigError
from pipeline.sampler import SamplerConfig, fill
from pipeline.updates.config import UpdateConfig
from pipeline.words import TrainingMix
from pipeline.worlds.mini.config import PretrainConfig

Model = TypeVar("Model", bound=BaseModel)
EPOCH = re.compile(r"e(\d{3,})")
BASE_EPOCH = "e000"


class Section(BaseModel):
    """Base of the small sections that belong to no component of their own."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StepConfig(Section):
    """How far one action goes in the prompts of a published world; the defaults are WorldCompass's."""

    translation: float = Field(
        0.1, gt=0, description="units of the world a translation key (WorldPlay: 0.08)"
    )
    rotation_deg: float = Field(2.0, gt=0, description="degrees a rotation key (WorldPlay: 3)")


class WorldConfig(Section):
    """Which world model is trained and where its base comes from (stage `base`)."""

    name: Literal["mini", "worldplay-5b", "worldplay-8b"] = Field("mini", description="world model")
    base: Literal["shipped", "pretrain", "imported"] = Field(
        "shipped",
        description="shipped: copy `weights`; pretrain: train it here with the section `pretrain`; "
        "imported: take `weights`, made by `wcpipe import`",
    )
    weights: str = Field(
        "weights/mini", description="folder of the shipped or imported base, relative to the working folder"
    )
    scenes: str = Field("", description="store of encoded scenes (`wcpipe encode`); published worlds only")
    step: StepConfig = Field(StepConfig(), description="how far one action goes; published worlds only")


class TargetConfig(Section):
    """Which clip of the video is trained: it moves on by one each epoch (`rollout.target_clip`)."""

    n_min: int = Field(
        1, ge=1, description="first target clip; 1 holds the conditioning latent and 3 actions"
    )
    n_max: int = Field(2, ge=1, description="last target clip; then the schedule starts again at n_min")

    @model_validator(mode="after")
    def _ordered(self) -> TargetConfig:
        if self.n_min > self.n_max:
            raise ValueError(f"target.n_min is {self.n_min}, above n_max = {self.n_max}: swap them")
        return self


class PrefixConfig(Section):
    """Prompts and the clips before the target."""

    groups: int = Field(16, ge=1, description="prompts an epoch; each makes one group")
    first_prompt: int = Field(0, ge=0, description="number of the first prompt of the first epoch")


class RolloutConfig(Section):
    """Candidates of a group."""

    mode: Literal["clip", "cycle"] = Field(
        "clip",
        description="clip: candidates share the prefix and differ in the target clip; "
        "cycle: each is a whole video, of which the last clip is trained",
    )
    candidates: int = Field(8, ge=2, description="candidates a group, sampled in one batch")


class ScoreConfig(Section):
    """What is measured of the candidates, and how much may be missing."""

    scorers: list[str] = Field(
        ["pose", "critic"],
        description="what is measured: pose, critic (quality), tracks; rewards.*.scorer says by which engine",
    )
    weights: str = Field("weights/mini", description="folder with the embedded engines' weights")
    workers: dict[str, Any] = Field({}, description="settings of the real scorers, by name")
    missing_share: float = Field(
        0.1, ge=0, le=1, description="largest share of missing scores before the epoch stops"
    )


class CompareConfig(Section):
    """Which policies `dvc repro` evaluates and puts side by side at its end."""

    before: str = Field("e000", description="epoch that is compared against; e000 is the base")
    after: str = Field("e008", description="epoch that is compared")


class Params(Section):
    """All of params.yaml. One instance describes one epoch once `for_epoch` has applied its overrides."""

    seed: int = Field(0, ge=0, description="seed of everything random")
    world: WorldConfig = WorldConfig()
    words: TrainingMix = Field(TrainingMix(), description="words that the policy practises")
    cycle: CycleConfig = Field(CycleConfig(), description="words that close, instead of `words`")
    target: TargetConfig = TargetConfig()
    sampler: SamplerConfig = SamplerConfig()
    prefix: PrefixConfig = PrefixConfig()
    rollout: RolloutConfig = RolloutConfig()
    score: ScoreConfig = ScoreConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    update: UpdateConfig = UpdateConfig()
    rewards: dict[str, Any] = Field({}, description="parameters of the rewards, by name")
    evaluate: AccuracyConfig = AccuracyConfig()
    cyclebench: CycleBenchConfig = CycleBenchConfig()
    compare: CompareConfig = CompareConfig()
    pretrain: PretrainConfig = PretrainConfig()
    epochs: dict[str, dict[str, Any]] = Field({}, description="epochs: {e001: {prev: e000, <overrides>}}")

    def dump(self, *sections: str) -> dict[str, Any]:
        """JSON form of some sections (all but `epochs` by default): what an artifact keeps as its parameters."""
        names = sections or tuple(name for name in type(self).model_fields if name != "epochs")
        return {name: value for name, value in self.model_dump(mode="json").items() if name in names}

    def for_epoch(self, epoch: str) -> Params:
        """These parameters with the overrides of `epochs.<epoch>` applied. Raises ConfigError for an unknown epoch."""
        return self.model_validate_strict(merge(self.written(), self._overrides(epoch)))

    def written(self) -> dict[str, Any]:
        """What a params.yaml with these values would hold: without the update's copies of the sampler's numbers."""
        data = self.model_dump(mode="json")
        for key in ("steps", "shift"):
            del data["update"][key]
        return data | {"sampler": self.sampler.written()}

    def first_prompt(self, epoch: str) -> int:
        """Number of an epoch's first prompt: `prefix.first_prompt` and the groups of all epochs with a smaller number.

        Call it on the file's parameters: an epoch that overrides `prefix.groups` then moves its successors on, and no
        two epochs share a prompt.
        """
        own = self.for_epoch(epoch).prefix.first_prompt
        for number in range(1, epoch_number(epoch)):
            overrides = self.epochs.get(f"e{number:03d}", {}).get("prefix", {})
            own += int(overrides.get("groups", self.prefix.groups))
        return own

    def progress(self, epoch: str) -> float:
        """Share of the run's optimizer updates that come before an epoch, 0..1, were every group trained.

        Call it on the file's parameters: like `first_prompt`, it counts the epochs with a smaller number.
        """
        updates = {}
        for name in self.epochs:
            own = self.for_epoch(name) if self._overrides(name) else self
            updates[name] = own.update.optimizer_steps(own.prefix.groups * own.advantage.best_of_n)
        before = sum(count for name, count in updates.items() if epoch_number(name) < epoch_number(epoch))
        return before / max(1, sum(updates.values()))

    def previous(self, epoch: str) -> str:
        """The epoch whose policy this one starts from."""
        return str(self._entry(epoch)["prev"])

    def _entry(self, epoch: str) -> dict[str, Any]:
        if epoch not in self.epochs:
            raise ConfigError(f"epochs.{epoch}: no such epoch in params.yaml; {nearest(epoch, self.epochs)}")
        return self.epochs[epoch]

    def _overrides(self, epoch: str) -> dict[str, Any]:
        return {key: value for key, value in self._entry(epoch).items() if key != "prev"}

    @classmethod
    def model_validate_strict(cls, data: Mapping[str, Any], source: str = "params.yaml") -> Params:
        """Validate sections, the names in them, and epochs. Raises ConfigError."""
        # the checks look into the registries, and those read configuration classes: imported late, there is no cycle
        from pipeline.config_checks import check

        params = validate(cls, one_sampler(data, source), source)
        check(params, source)
        for epoch, entry in params.epochs.items():
            if not EPOCH.fullmatch(epoch) or epoch == BASE_EPOCH:
                raise ConfigError(
                    f"{source}: epochs.{epoch}: epochs are named e001, e002, … (e000 is the base)"
                )
            if "prev" not in entry:
                raise ConfigError(
                    f"{source}: epochs.{epoch}: write the epoch it starts from, as in {{prev: e000}}"
                )
            if entry["prev"] != BASE_EPOCH and entry["prev"] not in params.epochs:
                raise ConfigError(
                    f"{source}: epochs.{epoch}.prev is {entry['prev']!r}, which is no epoch here"
                )
            if epoch_number(str(entry["prev"])) >= epoch_number(epoch):
                raise ConfigError(
                    f"{source}: epochs.{epoch}.prev is {entry['prev']!r}: it must be an earlier epoch"
                )
            overrides = {key: value for key, value in entry.items() if key != "prev"}
            if forbidden := {"epochs", "seed", "world"} & overrides.keys():
                raise ConfigError(f"{source}: epochs.{epoch}.{min(forbidden)} cannot differ between epochs")
            if overrides:
                base = {key: value for key, value in data.items() if key != "epochs"}
                at = f"epochs.{epoch}."
                check(validate(cls, one_sampler(merge(base, overrides), source), source, at=at), source, at)
        return params


def one_sampler(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`data` with the sampler's steps and shift copied to the update, which draws its noise levels from them.

    Writing them twice could only make them differ. Raises ConfigError when they do.
    """
    sampler, update = data.get("sampler", {}), data.get("update", {})
    if not isinstance(sampler, dict) or not isinstance(update, dict):
        return dict(data)
    filled = fill(sampler)
    shared = {key: filled.get(key, SamplerConfig.model_fields[key].default) for key in ("steps", "shift")}
    for key, value in shared.items():
        if update.get(key, value) != value:
            raise ConfigError(
                f"{source}: update.{key} differs from sampler.{key} = {value}: set sampler.{key} only"
            )
    return {**data, "update": {**update, **shared}}


def epoch_number(epoch: str) -> int:
    """`e012` -> 12. Raises ConfigError for anything else."""
    match = EPOCH.fullmatch(epoch)
    if match is None:
        raise ConfigError(f"{epoch!r} is not an epoch: write e001, e002, …")
    return int(match.group(1))


def epoch_chain(count: int, written: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """`{e001: {prev: e000}, ...}` for `wcpipe run --epochs N`; overrides already written for an epoch are kept."""
    chain = {}
    for number in range(1, count + 1):
        epoch, prev = f"e{number:03d}", f"e{number - 1:03d}"
        chain[epoch] = {"prev": prev, **written.get(epoch, {})}
    return chain


def load(path: Path, overrides: Iterable[str] = ()) -> Params:
    """Read params.yaml and apply `key.path=value` overrides (values are YAML). Raises ConfigError."""
    data = read_yaml(path)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {override}: write key.path=value, for example --set update.lr=1e-4")
        merge_into(data, key.split("."), _parse(text, f"--set {override}"))
    from pipeline.config_checks import check_file

    params = Params.model_validate_strict(data, str(path))
    check_file(params, str(path))
    for key, epoch in params.compare.model_dump().items():
        # only where the file says it: a file without the section is not for `dvc repro`, which is what reads it
        if "compare" in data and epoch not in (BASE_EPOCH, *params.epochs):
            hint = nearest(epoch, [BASE_EPOCH, *params.epochs])
            raise ConfigError(f"{path}: compare.{key} is {epoch!r}, which is no epoch here; {hint}")
    return params


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML 1.2 mapping of plain Python values. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give the file with --params"
        ) from error
    data = _parse(text, str(path)) or {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines, found {type(data).__name__}")
    return data


def _parse(text: str, source: str) -> Any:
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        line = str(error).replace("\n", " ")
        raise ConfigError(f"{source}: is not valid YAML ({re.sub(' +', ' ', line)[:160]})") from error


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with nested values of `overrides` put over it; lists are replaced whole."""
    result = copy.deepcopy(dict(base))
    for key, value in overrides.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, Mapping)
        result[key] = merge(old, value) if both and old is not None else copy.deepcopy(value)
    return result


def merge_into(data: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set `data[k0][k1]... = value`, making mappings on the way."""
    for key in keys[:-1]:
        inner = data.get(key)
        if not isinstance(inner, dict):
            inner = data[key] = {}
        data = inner
    data[keys[-1]] = value


def validate(model: type[Model], data: Mapping[str, Any], source: str, at: str = "") -> Model:
    """`data` as a `model`; the first problem becomes a ConfigError with the full key, the value and the remedy.

    Validated in JSON mode and strictly: lists may stand for tuples, but "5" is not 5 and 1 is not true.
    """
    try:
        return model.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(model, error, at)}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source}: {at.rstrip('.') or 'parameters'}: {error}") from error


def _explain(model: type[BaseModel], error: ValidationError, at: str) -> str:
    problem = error.errors(include_url=False)[0]
    keys = [str(part) for part in problem["loc"]]
    key = (at + ".".join(keys)).rstrip(".")
    if problem["type"] == "extra_forbidden":
        owner = _class_at(model, keys[:-1])
        siblings = list(owner.model_fields) if owner is not None else []
        return f"unknown key {key!r}; {nearest(keys[-1], siblings, list(_paths(model)))}"
    if problem["type"] == "value_error":  # a component's own check says key, value and remedy itself
        text = str(problem["ctx"]["error"]) if "ctx" in problem else problem["msg"]
        return text if not key or text.startswith(key.split(".")[0]) else f"{key}: {text}"
    shown = json.dumps(problem["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "…"
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{key} is {shown}: {message}"


def _class_at(model: type[BaseModel], keys: list[str]) -> type[BaseModel] | None:
    current: type[BaseModel] | None = model
    for key in keys:
        field = current.model_fields.get(key) if current is not None else None
        current = _model_of(field.annotation) if field is not None else None
    return current


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_of(part)) is not None), None)


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a model, to say that `lr` is to be written as `update.lr`."""
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = _model_of(field.annotation)
        if inner is not None:
            yield from _paths(inner, f"{prefix}{name}.")


def nearest(name: str, siblings: Iterable[str], everywhere: Iterable[str] = ()) -> str:
    """`did you mean 'x'?` for a misspelt name, or what there is."""
    siblings = list(siblings)
    exact = [path for path in everywhere if path.rsplit(".", 1)[-1] == name]
    close = exact or difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known here: {', '.join(siblings[:12])}{'…' if len(siblings) > 12 else ''}"
