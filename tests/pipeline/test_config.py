"""params.yaml: what is wrong is said with its full key, its value and the nearest name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from pipeline import config, rewards
from pipeline.errors import ConfigError
from pipeline.rewards import Reward

EPOCHS = "epochs: {e001: {prev: e000}, e002: {prev: e001, update: {lr: 1e-5}, sampler: {steps: 3}}}\n"


def load(tmp_path: Path, text: str, *overrides: str) -> config.Params:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    return config.load(path, overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1", "unknown key 'lr'; did you mean 'update.lr'"),
        ("rolout: {}", "unknown key 'rolout'; did you mean 'rollout'"),
        ("update: {lrr: 1}", "unknown key 'update.lrr'; did you mean 'lr'"),
        ("update: {old_decay: {maxx: 1}}", "unknown key 'update.old_decay.maxx'; did you mean 'max'"),
        ("update: {lr: '1'}", 'update.lr is "1"'),
        ("update: {lr: .nan}", "update.lr is NaN"),
        ("rollout: {candidates: 1}", "rollout.candidates is 1: input should be greater than or equal to 2"),
        ("rollout: {candidates: 8.5}", "rollout.candidates is 8.5"),
        ("seed: true", "seed is true"),
        ("sampler: 5", "sampler is 5"),
        ("target: {n_min: 3}", "target.n_min is 3, above n_max = 2"),
        ("advantage: {best_of_n: 3}", "advantage.best_of_n is 3"),
        ("update: {steps: 4}", "update.steps differs from sampler.steps = 5"),
        ("a: [1", "is not valid YAML"),
        ("- 1", "must hold `key: value` lines"),
        ("epochs: {e001: {}}", "write the epoch it starts from"),
        ("epochs: {e1: {prev: e000}}", "epochs.e1"),
        ("epochs: {e000: {prev: e000}}", "e000 is the base"),
        ("epochs: {e001: {prev: e007}}", "'e007', which is no epoch here"),
        ("epochs: {e001: {prev: e002}, e002: {prev: e001}}", "must be an earlier epoch"),
        ("epochs: {e001: {prev: e000, update: {lrr: 1}}}", "unknown key 'epochs.e001.update.lrr'"),
        ("epochs: {e001: {prev: e000, seed: 3}}", "epochs.e001.seed cannot differ"),
        ("rewards: {acton: {}}", "unknown key 'rewards.acton'; did you mean 'action'"),
        ("rewards: {action: {prest: per_frame}}", "unknown key 'rewards.action.prest'; did you mean 'preset'"),
        ("rewards: {action: 5}", "rewards.action is 5"),
        ("rewards: {quality: {tau: 1}}", "unknown key 'rewards.quality.tau'"),
        ("advantage: {weights: {action_fin: 1}}", "unknown reward 'action_fin'; did you mean 'action_fine'"),
        ("advantage: {best_of_n: 10}", "advantage.best_of_n is 10, above rollout.candidates = 8"),
        ("score: {scorers: [pose, critc]}", "score.scorers: unknown scorer 'critc'; did you mean 'critic'"),
        ("score: {scorers: [pose]}", "advantage.weights.quality_drift needs the scorer 'critic'"),
        ("pretrain: {stepz: 5}", "unknown key 'pretrain.stepz'; did you mean 'steps'"),
        ("pretrain: {dim: 130}", "pretrain: dim is 130, not a multiple of heads = 4"),
        ("pretrain: {clip_shares: []}", "pretrain: clip_shares is []"),
        ("pretrain: {hold: [3, 2]}", "pretrain: hold is [3, 2]"),
        (
            "pretrain: {noise: {compound_first_only: 0.7, compound_second_only: 0.6}}",
            "pretrain.noise: compound_first_only + compound_second_only is 1.3",
        ),
        ("epochs: {e001: {prev: e000, rollout: {candidates: 2}}}", "epochs.e001.advantage.best_of_n is 4"),
        (
            "epochs: {e001: {prev: e000, rewards: {action: {taus: []}}}}",
            "epochs.e001.rewards.action.taus is []",
        ),
        ("compare: {before: e000, after: e002}\n" + EPOCHS.replace("e002", "e003"), "compare.after is 'e002'"),
        ("compare: {before: e00, after: e002}\n" + EPOCHS, "compare.before is 'e00', which is no epoch here"),
    ],
)
def test_each_mistake_is_one_line_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert "params.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_epochs_override_and_the_update_follows_the_sampler(tmp_path: Path) -> None:
    params = load(tmp_path, EPOCHS)
    assert (params.for_epoch("e001").update.lr, params.for_epoch("e002").update.lr) == (2e-4, 1e-5)
    assert (params.for_epoch("e001").update.steps, params.for_epoch("e002").update.steps) == (5, 3)
    assert params.previous("e002") == "e001"
    with pytest.raises(ConfigError, match=r"epochs\.e003: no such epoch"):
        params.for_epoch("e003")


def test_overrides_from_the_command_line(tmp_path: Path) -> None:
    params = load(tmp_path, EPOCHS, "update.lr=3e-5", "target.n_max=3", "words.hold=[2, 4]")
    assert (params.update.lr, params.target.n_max, params.words.hold) == (3e-5, 3, (2, 4))
    with pytest.raises(ConfigError, match=r"write key\.path=value"):
        load(tmp_path, "", "seed")
    with pytest.raises(ConfigError, match="unknown key 'update.rl'"):
        load(tmp_path, EPOCHS, "update.rl=1")


def test_numbers_are_read_as_dvc_reads_them(tmp_path: Path) -> None:
    assert load(tmp_path, EPOCHS + "update: {lr: 1e-5}").update.lr == 1e-5  # a string in YAML 1.1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read .*--params"):
        config.load(tmp_path / "none.yaml")


def test_epoch_chain_keeps_what_is_written() -> None:
    chain = config.epoch_chain(3, {"e002": {"prev": "e001", "update": {"lr": 1}}})
    assert list(chain) == ["e001", "e002", "e003"]
    assert chain["e002"] == {"prev": "e001", "update": {"lr": 1}}
    assert chain["e003"] == {"prev": "e002"}


@given(st.integers(1, 5000))
def test_epoch_names_and_numbers(number: int) -> None:
    assert config.epoch_number(f"e{number:03d}") == number


def test_a_shorter_chain_does_not_mind_what_is_compared(tmp_path: Path) -> None:
    params = load(tmp_path, EPOCHS + "compare: {before: e000, after: e002}")
    data = params.written() | {"epochs": config.epoch_chain(1, params.epochs)}
    assert list(config.Params.model_validate_strict(data).epochs) == ["e001"]
    assert load(tmp_path, EPOCHS).compare.after == "e008"  # a file without the section is not for `dvc repro`


def test_a_reward_of_ones_own_is_known_once_it_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "advantage: {weights: {steady: 1.0}}\nrewards: {steady: {share: 0.5}}"
    with pytest.raises(ConfigError, match="unknown key 'rewards.steady'"):
        load(tmp_path, text)
    monkeypatch.setattr(rewards, "REWARDS", dict(rewards.REWARDS))

    class SteadyConfig(BaseModel):
        model_config = ConfigDict(extra="forbid")
        share: float = 1.0

    rewards.register(Reward("steady", ("pose",), lambda raw, context, config: None, "steady", SteadyConfig))
    assert load(tmp_path, text).rewards == {"steady": {"share": 0.5}}
    with pytest.raises(ConfigError, match=r"unknown key 'rewards\.steady\.shar'; did you mean 'share'"):
        load(tmp_path, text.replace("share", "shar"))


def test_no_two_epochs_share_a_prompt(tmp_path: Path) -> None:
    text = """
prefix: {groups: 4, first_prompt: 100}
epochs: {e001: {prev: e000}, e002: {prev: e001, prefix: {groups: 10}}, e003: {prev: e001}, e005: {prev: e003}}
"""
    params = load(tmp_path, text)
    taken: list[int] = []
    for epoch in params.epochs:
        first = params.first_prompt(epoch)
        taken += range(first, first + params.for_epoch(epoch).prefix.groups)
    assert params.first_prompt("e002") == 104
    assert len(taken) == len(set(taken))


@pytest.mark.parametrize("module", ["torch", "zarr"])
def test_reading_parameters_needs_nothing_heavy(tmp_path: Path, module: str) -> None:
    (tmp_path / "params.yaml").write_text(EPOCHS)
    code = (
        "import sys; from pathlib import Path; from pipeline import config; "
        f"config.load(Path(sys.argv[1])); sys.exit({module!r} in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "params.yaml")]
    assert subprocess.run(command, cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_the_files_of_the_repository_are_valid() -> None:
    root = Path(__file__).parents[2]
    assert config.load(root / "params.yaml").compare.after in config.load(root / "params.yaml").epochs
    config.load(root / "experiments" / "long.yaml")
