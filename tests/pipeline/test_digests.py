"""Digests are the identity of everything: equal values must agree, different ones must not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.digests import digest_of, digest_tensors, digest_tree, input_changes
from pipeline.errors import DataError


def test_spelling_does_not_matter_but_value_does() -> None:
    assert digest_of({"b": 1, "a": [1.0, 2]}) == digest_of({"a": (1, 2.0), "b": np.int64(1)})
    assert digest_of({"lr": 1e-5}) == digest_of({"lr": 0.00001})
    assert digest_of({"lr": 1e-5}) != digest_of({"lr": 1.1e-5})
    assert digest_of(["1"]) != digest_of([1])
    assert digest_of([True]) != digest_of([1])
    assert len(digest_of({})) == 64


def test_what_has_no_canonical_form_is_refused() -> None:
    with pytest.raises(ValueError, match="non-finite"):
        digest_of({"x": float("nan")})
    with pytest.raises(TypeError):
        digest_of({1, 2})


def test_trees_are_told_apart_by_name_and_content(tmp_path: Path) -> None:
    for folder, name, text in (("a", "x", "1"), ("b", "x", "1"), ("c", "y", "1"), ("d", "x", "2")):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "sub" / name).write_text(text)
    a, b, c, d = (digest_tree(tmp_path / name) for name in "abcd")
    assert a == b
    assert len({a, c, d}) == 3
    with pytest.raises(DataError, match="holds no file like"):
        digest_tree(tmp_path / "a", ["*.safetensors"])


def test_tensors_differ_by_dtype_shape_name_and_bits() -> None:
    x = torch.arange(6.0)
    digests = {
        digest_tensors({"x": x}),
        digest_tensors({"y": x}),
        digest_tensors({"x": x.reshape(2, 3)}),
        digest_tensors({"x": x.bfloat16()}),
        digest_tensors({"x": x + 1e-6}),
    }
    assert len(digests) == 5
    assert digest_tensors({"x": x, "y": x}) == digest_tensors({"y": x.clone(), "x": x})


def test_changes_are_named() -> None:
    old = {"params": {"rollout": {"steps": 5, "shift": 3.0}}, "policy": "a" * 64}
    new = {"params": {"rollout": {"steps": 6, "shift": 3}, "seed": 0}, "policy": "b" * 64}
    assert input_changes(old, new) == [
        "params.rollout.steps: 5 -> 6",
        "params.seed: absent -> 0",
        "policy: aaaaaaaaaaaa… -> bbbbbbbbbbbb…",
    ]
