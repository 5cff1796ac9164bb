"""What crosses the border comes back to the bit, and nothing else is accepted."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_np

from pipeline.scorers.worker import protocol
from pipeline.scorers.worker.protocol import (
    Item,
    ProtocolError,
    decode,
    encode,
    parse,
    read_request,
    write_request,
)

NUMBERS = st.one_of(
    st_np.arrays(np.float64, st_np.array_shapes(min_dims=0, max_side=9)),
    st_np.arrays(np.float32, st_np.array_shapes(min_dims=0, max_side=9)),
    st_np.arrays(np.int64, st_np.array_shapes(min_dims=0, max_side=9)),
    st_np.arrays(np.bool_, st_np.array_shapes(min_dims=0, max_side=9)),
    st_np.arrays(np.float32, (0, 2)),
)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), NUMBERS, max_size=3))
@settings(max_examples=60, deadline=None)
def test_values_come_back_to_the_bit(values: dict[str, np.ndarray]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        line = protocol.line("item", values=encode(values, Path(folder), 3))
        found = decode(parse(line)["values"], Path(folder))
        assert set(found) == set(values)
        for name, array in values.items():
            assert found[name].dtype == array.dtype
            assert found[name].shape == array.shape
            assert found[name].tobytes() == array.tobytes() or np.isnan(array).any()
            np.testing.assert_array_equal(found[name], array)


def test_a_request_comes_back_and_its_files_cannot_be_changed_through_it(tmp_path: Path) -> None:
    video = np.random.default_rng(0).integers(0, 256, (3, 4, 5, 3), dtype=np.uint8)
    item = Item(video[:, ::-1], {"queries": np.zeros((0, 3), np.float32)}, {"prompts": ["é", "{x}"]}, seed=7)
    manifest = write_request(tmp_path, [item, Item(video)])
    first, second = read_request(manifest)
    np.testing.assert_array_equal(first.video_FHW3, video[:, ::-1])
    assert first.arrays["queries"].shape == (0, 3)
    assert (first.about, first.seed) == ({"prompts": ["é", "{x}"]}, 7)
    second.video_FHW3[:] = 0  # packages may draw into what they get
    np.testing.assert_array_equal(read_request(manifest)[1].video_FHW3, video)


def test_another_version_or_damage_is_refused(tmp_path: Path) -> None:
    manifest = write_request(tmp_path, [Item(np.zeros((1, 2, 2, 3), np.uint8))])
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"protocol": 2}))
    with pytest.raises(ProtocolError, match="protocol 2, this worker speaks 1"):
        read_request(manifest)
    for damage in ("{", "[]", json.dumps(content | {"items": [{}]})):
        manifest.write_text(damage)
        with pytest.raises(ProtocolError, match="is not a request"):
            read_request(manifest)
    (tmp_path / "0.video.npy").write_bytes(b"no array")
    manifest.write_text(json.dumps(content))
    with pytest.raises(ProtocolError, match="is not a request"):
        read_request(manifest)
    for text in (b"[1]\n", b"hello\n", b'{"type": 3}\n', b""):
        with pytest.raises(ProtocolError):
            parse(text)


def test_objects_and_nan_do_not_cross(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="arrays of numbers"):
        encode({"a": np.array([None])}, tmp_path, 0)
    with pytest.raises(ValueError, match="JSON"):
        protocol.line("item", value=float("nan"))
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode({"a": {"file": "nothing.npy"}}, tmp_path)


def test_both_sides_need_numpy_alone() -> None:
    code = (
        "import sys\nimport pipeline.scorers.worker.protocol, pipeline.scorers.worker.serve\n"
        "import pipeline.scorers.worker.weights\n"
        "heavy = {'torch', 'pydantic', 'zarr', 'typer', 'scipy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
