from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meristem.data import ByteTokenizer, Index, TokenData, TokenStream, prepare, verify
from meristem.errors import InputError, RunError

from .helpers import TEXTS, write_jsonl


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    paths = [write_jsonl(tmp_path / "a.jsonl", TEXTS)]
    prepare(paths, tmp_path / "out", tokenizer=ByteTokenizer(), held_out=0.2, shard_tokens=500)
    return tmp_path / "out"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_windows_equal_the_concatenation(sizes: list[int], data: st.DataObject) -> None:
    whole = np.arange(sum(sizes), dtype=np.uint16)
    stream = TokenStream(np.split(whole, np.cumsum(sizes)[:-1]))
    length = data.draw(st.integers(0, len(whole)))
    starts = data.draw(st.lists(st.integers(0, len(whole) - length), max_size=5))
    rows = stream.windows(np.array(starts, dtype=np.int64), length)
    assert rows.dtype == np.int64
    assert rows.tolist() == [whole[s : s + length].tolist() for s in starts]
    assert stream.window(0, len(whole)).tolist() == whole.tolist()


def test_windows_stay_inside() -> None:
    stream = TokenStream([np.arange(10, dtype=np.uint16)])
    for start in (-1, 6):
        with pytest.raises(InputError, match="windows of 5 inside 10 tokens"):
            stream.window(start, 5)


def test_open_maps_all_shards(folder: Path) -> None:
    data = TokenData.open(folder)
    train = data.split("train")
    assert len(data.index.train.shards) > 3
    assert len(train) == data.index.train.tokens
    content = b"".join((folder / shard.file).read_bytes() for shard in data.index.train.shards)
    assert train.window(0, len(train)).tolist() == np.frombuffer(content, dtype="<u2").tolist()
    with pytest.raises(InputError, match="held_out"):
        data.split("test")  # type: ignore[arg-type]


def test_index_round_trip(folder: Path, tmp_path: Path) -> None:
    index = Index.load(folder)
    index.save(tmp_path)
    assert Index.load(tmp_path) == index
    assert (tmp_path / "index.json").read_bytes() == (folder / "index.json").read_bytes()


def test_a_flipped_byte_is_found(folder: Path) -> None:
    verify(folder)
    for name in ("train-00002.bin", "held-out-00000.bin"):
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(bytes([good[0] ^ 1]) + good[1:])
        TokenData.open(folder)
        with pytest.raises(RunError, match=name):
            verify(folder)
        (folder / name).write_bytes(good)
    verify(folder)


def test_another_tokenizer_is_found(folder: Path) -> None:
    content = json.loads((folder / "index.json").read_text())
    content["tokenizer"]["digest"] = "0" * 64
    (folder / "index.json").write_text(json.dumps(content))
    with pytest.raises(RunError, match=r"tokenizer\.json"):
        verify(folder)


def test_a_cut_or_missing_shard_is_found_at_open(folder: Path) -> None:
    path = folder / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(RunError, match=r"train-00001\.bin: has 998 bytes, the index says 1000"):
        TokenData.open(folder)
    path.unlink()
    with pytest.raises(RunError, match=r"train-00001\.bin: cannot be read"):
        TokenData.open(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "other/1"}, "other/1"),
        ({"dtype": "float32"}, "float32"),
        ({"tokenizer": {"kind": "bytes"}}, "digest"),
        ({"splits": {}}, "train"),
    ],
)
def test_a_bad_index_is_named(folder: Path, change: dict[str, object], reason: str) -> None:
    content = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(RunError, match=rf"index\.json.*{reason}"):
        Index.load(folder)


def test_shards_outside_the_folder_are_refused(folder: Path) -> None:
    text = (folder / "index.json").read_text()
    (folder / "index.json").write_text(text.replace("train-00000.bin", "../train-00000.bin"))
    with pytest.raises(RunError, match="plain file name"):
        TokenData.open(folder)
