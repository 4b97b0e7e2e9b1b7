from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meristem.data import (
    ByteTokenizer,
    Cut,
    HfTokenizer,
    StreamDecoder,
    Tokenizer,
    load_tokenizer,
    padded_vocabulary,
)
from meristem.errors import InputError, RunError

from .helpers import SHARED, TEXTS, needs_shared, small_bpe

unicode_text = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def bpe() -> HfTokenizer:
    return small_bpe()


@given(unicode_text)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text])[0].tolist() == ids.tolist()


def test_bytes_ignore_special_and_padding_ids() -> None:
    assert ByteTokenizer().decode([72, 256, 105, 300]) == "Hi"
    assert ByteTokenizer().decode([0xE2, 0x82]) == "\ufffd"


def test_bpe_round_trip(bpe: HfTokenizer) -> None:
    for text, ids in zip(TEXTS, bpe.encode_batch(TEXTS), strict=True):
        assert bpe.decode(ids) == text
        assert bpe.encode(text).tolist() == ids.tolist()
        assert ids.dtype == np.uint16
        assert ids.max() < bpe.vocabulary == 300


def test_text_that_spells_end_of_text_stays_text(bpe: HfTokenizer) -> None:
    ids = bpe.encode("a<|endoftext|>b")
    assert bpe.end_of_text not in ids
    assert bpe.decode(ids) == "a<|endoftext|>b"
    assert bpe.decode([*bpe.encode("a"), bpe.end_of_text, *bpe.encode("b")]) == "ab"


def test_truncation_and_padding_in_the_file_are_ignored(bpe: HfTokenizer) -> None:
    definition = json.loads(bpe._definition)
    definition["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    definition["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    tokenizer = HfTokenizer(json.dumps(definition))
    assert tokenizer.encode(TEXTS[5]).tolist() == bpe.encode(TEXTS[5]).tolist()
    assert len(tokenizer.encode("a")) == 1


@pytest.mark.parametrize("kind", ["bytes", "hf"])
def test_a_folder_carries_its_tokenizer(kind: str, bpe: HfTokenizer, tmp_path: Path) -> None:
    tokenizer: Tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    tokenizer.save(tmp_path)
    for source in (tmp_path, str(tmp_path / "tokenizer.json")):
        loaded = load_tokenizer(source)
        assert loaded.kind == kind
        assert loaded.digest == tokenizer.digest
        assert loaded.end_of_text == tokenizer.end_of_text
        assert loaded.encode(TEXTS[3]).tolist() == tokenizer.encode(TEXTS[3]).tolist()


def test_end_of_text_can_be_named_and_is_kept(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(small_bpe("</s>")._definition)
    assert tokenizer.eot_token == "</s>"
    other = HfTokenizer(tokenizer._definition, eot_token="a")
    other.save(tmp_path)
    assert load_tokenizer(tmp_path).end_of_text == tokenizer.encode("a").tolist()[0]
    assert load_tokenizer(tmp_path).digest == other.digest != tokenizer.digest


def test_no_end_of_text_lists_candidates() -> None:
    with pytest.raises(InputError, match=r"end_of_text = .*<\|endoftext\|> or </s>.*name one, perhaps .*\['<stop>'\]"):
        small_bpe("<stop>")
    with pytest.raises(InputError, match=r"'<nope>'.*'</s>'"):
        HfTokenizer(small_bpe("</s>")._definition, eot_token="<nope>")


def test_bad_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_padded_vocabulary() -> None:
    assert [padded_vocabulary(n) for n in (50257, 257, 64, 65)] == [50304, 320, 64, 128]


@given(st.lists(st.integers(0, 319), max_size=60))
def test_streamed_bytes_join_to_the_whole(ids: list[int]) -> None:
    decoder = StreamDecoder(ByteTokenizer())
    assert "".join(map(decoder.feed, ids)) + decoder.flush() == ByteTokenizer().decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "hf"])
def test_streams_never_split_a_character(kind: str, bpe: HfTokenizer) -> None:
    tokenizer: Tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    text = "né 日本語 👩‍👩‍👧 \U0001f3f4 done"
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.feed(token) for token in tokenizer.encode(text).tolist()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(bool(piece) for piece in pieces) > 10
    assert decoder.flush() == ""


def test_a_stream_cut_inside_a_character_flushes() -> None:
    decoder = StreamDecoder(ByteTokenizer())
    assert [decoder.feed(b) for b in "a€".encode()[:3]] == ["a", "", ""]
    assert decoder.flush() == "\ufffd"


@needs_shared
def test_gpt2() -> None:
    tokenizer = load_tokenizer(SHARED / "tokenizers/gpt2/tokenizer.json")
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (50257, 50256)
    text = "Grüße, 世界 👋"
    decoder = StreamDecoder(tokenizer)
    assert "".join(map(decoder.feed, tokenizer.encode(text).tolist())) == text


@needs_shared
def test_bert_streams_words_with_their_spaces() -> None:
    tokenizer = load_tokenizer(SHARED / "tokenizers/bert_uncased/tokenizer.json")
    ids = tokenizer.encode("the unbelievably long journey").tolist()
    decoder = StreamDecoder(tokenizer)
    assert "".join(map(decoder.feed, ids)) + decoder.flush() == tokenizer.decode(ids)


# --- definitions that cannot be --------------------------------------------------------------------------------------


def word_level(vocabulary: dict[str, int], **changes: object) -> str:
    """A small tokenizer.json."""
    content: dict[str, object] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }  # fmt: skip
    return json.dumps({**content, **changes})


def test_vocabularies_have_a_ceiling() -> None:
    definition = word_level({"</s>": 0, "a": 4_000_000_000})
    assert len(definition) < 400
    tracemalloc.start()
    with pytest.raises(InputError, match=r"tokenizer = 4000000000: .*highest id is from 0 to 16,777,215"):
        HfTokenizer(definition)
    with pytest.raises(InputError, match=r"tokens = 4000000000: .*highest id"):
        _ = Cut("tokenizer", tokenizer=definition).fixed_vocabulary
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
    for load in (HfTokenizer, lambda text: Cut("tokenizer", tokenizer=text).fixed_vocabulary):
        with pytest.raises(InputError, match="highest id"):
            load(word_level({}))


def test_definitions_that_fail_on_a_text_are_one_line() -> None:
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": []}
    panicking = word_level({"</s>": 0, "a": 1, "<unk>": 2}, post_processor={**template, "special_tokens": {}})
    for definition in (word_level({"</s>": 0, "a": 1}), panicking):
        with pytest.raises(RunError, match=r"tokenizer\.json: cannot encode the text"):
            Cut("tokenizer", tokenizer=definition).pieces("word")
    tokenizer = HfTokenizer(word_level({"</s>": 0, "a": 1}))
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(RunError, match=r"tokenizer\.json: cannot encode the text"):
            encode("word")


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "null", "{}", "", '"\ud800"'])
def test_no_definition_is_a_traceback(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(InputError, match=r"^tokenizer = ") as caught:
        load_tokenizer(path)
    assert len(str(caught.value)) < 700
    with pytest.raises(InputError, match=r"^tokens = "):
        Cut.named(str(path)).pieces("a text")
    small_bpe().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content, encoding="utf-8", errors="surrogatepass")
    if content != "{}":
        with pytest.raises(InputError, match=r"tokenizer_config\.json"):
            load_tokenizer(tmp_path)


def test_a_pipe_is_no_tokenizer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    for source in (tmp_path, tmp_path / "tokenizer.json", Path("/dev/zero")):
        with pytest.raises(InputError, match=r"^tokenizer = .*is not a regular file"):
            load_tokenizer(source)
    with pytest.raises(InputError, match=r"^tokens = .*is not a regular file"):
        Cut.named(str(tmp_path / "tokenizer.json"))


def test_long_names_are_not_repeated() -> None:
    vocabulary = {f"<{'long' * 100}{i}>": i for i in range(30)}
    with pytest.raises(InputError) as caught:
        HfTokenizer(word_level(vocabulary))
    assert len(str(caught.value)) < 500


# --- folders and names -----------------------------------------------------------------------------------------------


def cached(home: Path, name: str, files: dict[str, str]) -> Path:
    """A model in a cache as Hugging Face's tools lay it out: blobs, and a snapshot that links to them."""
    model = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = model / "snapshots" / ("0" * 40)
    for folder in (snapshot, model / "blobs", model / "refs"):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    for number, (file, content) in enumerate(files.items()):
        (model / "blobs" / str(number)).write_text(content)
        (snapshot / file).symlink_to(model / "blobs" / str(number))
    return snapshot


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that stands in for this machine's; who asks the network fails."""

    def refuse(*call: object, **named: object) -> None:
        raise AssertionError("somebody has asked the network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    return tmp_path / "hf"


def test_a_name_is_looked_up_in_the_cache(bpe: HfTokenizer, home: Path) -> None:
    other = HfTokenizer(bpe._definition, eot_token="a")
    config = json.dumps({"eos_token": {"content": "a"}})
    cached(home, "somebody/small", {"tokenizer.json": bpe._definition, "tokenizer_config.json": config})
    cached(home, "small", {"tokenizer.json": bpe._definition})
    assert load_tokenizer("somebody/small").digest == other.digest
    assert load_tokenizer("small").digest == bpe.digest
    assert Cut.named("somebody/small").tokenizer == bpe._definition
    for name in ("nobody/small", "smal"):
        with pytest.raises(InputError, match=rf"= '{name}': must be .*no such file, nor a model of this name in .*hub"):
            load_tokenizer(name)
    with pytest.raises(InputError, match=r"tokens = 'smal': must be words, chars, kmers, a tokenizer\.json file, a"):
        Cut.named("smal")


def test_a_file_or_folder_comes_before_a_name(
    bpe: HfTokenizer, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(home, "small", {"tokenizer.json": "not this one"})
    monkeypatch.chdir(tmp_path)
    Path("small").mkdir()
    bpe.save("small")
    assert load_tokenizer("small").digest == bpe.digest
    assert Cut.named("small").tokenizer == bpe._definition


def test_transformers_makes_what_older_folders_do_not_have(home: Path, tmp_path: Path) -> None:
    """The word list of a BERT, in a folder and in the cache."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "sing", "##ing", "bird"]
    files = {"vocab.txt": "\n".join(words) + "\n", "config.json": json.dumps({"model_type": "bert"})}
    snapshot = cached(home, "old/bert", files)
    for source in ("old/bert", snapshot):
        made = load_tokenizer(source)
        assert made.encode("singing bird").tolist() == [5, 6, 7]
        assert made.end_of_text == 3
    made.save(tmp_path)
    assert load_tokenizer(tmp_path).digest == made.digest


def test_folders_without_a_tokenizer_are_named(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"has no tokenizer\.json\)"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(InputError, match=r"has no tokenizer\.json\)"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("no JSON")
    with pytest.raises(InputError, match=r"has no tokenizer\.json, nor files that transformers can read"):
        load_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"has no tokenizer\.json; transformers may .*pip install 'meristem\[hf\]'"):
        load_tokenizer(tmp_path)


def test_the_command_takes_a_name(bpe: HfTokenizer, tmp_path: Path) -> None:
    cached(tmp_path / "hf", "somebody/small", {"tokenizer.json": bpe._definition})
    (tmp_path / "text.txt").write_text("a bird sings " * 200)
    command = ["data", "prepare", str(tmp_path / "text.txt"), "--tokenizer", "somebody/small", "--out", "data"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    subprocess.run([sys.executable, "-m", "meristem", *command], check=True, cwd=tmp_path, env=environment)
    assert load_tokenizer(tmp_path / "data").digest == bpe.digest
