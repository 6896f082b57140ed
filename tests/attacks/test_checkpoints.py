"""Hostile checkpoints: every file of one mutated; each ends in one line, soon, before anything is made of it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbuild.builder.bundle_writer import save_tokenizer
from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.frontend.checkpoint import Checkpoint, find, load
from specbuild.builder.frontend.eagle3_head import EagleHead, find_head, head_config, load_head, save_head
from specbuild.builder.prepare import prepare
from specbuild.runtime.errors import CheckpointError

LIMIT = 10  # seconds, after which it hangs
HUGE = "9" * 5000
BROKEN = {
    "deep": b'{"a":' * 100_000,
    "deep list": b"[" * 100_000,
    "long number": b'{"num_hidden_layers": ' + HUGE.encode() + b"}",
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "not a number": b'{"a": NaN}',
    "half a character": b'{"a": "\\ud800"}',
    "list": b"[]",
    "empty": b"",
    "twice": b"{}{}",
}
OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
VALUES = (None, True, False, -1, 0, 1.5, 10**9, 10**18, 2**64, "", "x", "\0", [], [[1]], {}, {"a": [None]})


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """Whatever takes too long fails where it is."""

    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def original(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", num_hidden_layers=1)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def edit(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(content | fields), encoding="utf-8")


def refusal(folder: Path) -> str:
    """The line by which a build refuses a target."""
    with pytest.raises(CheckpointError) as caught:
        prepare(BuildConfig(str(folder), folder.parent / "out"))
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 1000
    return line


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("num_hidden_layers", 10**9, "its weights have 1 and none of model.layers.1."),
        ("num_hidden_layers", 2, "its weights have 1 and none of model.layers.1."),
        ("num_hidden_layers", -1, "at least 1"),
        ("num_hidden_layers", True, "at least 1"),
        ("num_hidden_layers", "1", "at least 1"),
        ("num_hidden_layers", 1.0, "at least 1"),
        ("hidden_size", 10**12, "no dimension of its weights is beyond 4096"),
        ("vocab_size", 10**10, "no dimension of its weights is beyond 4096"),
        ("intermediate_size", 2**64, "no dimension of its weights is beyond 4096"),
        ("intermediate_size", 47, "makes model.layers.0.mlp.down_proj.weight [32, 47], the weights have [32, 48]"),
        ("num_attention_heads", 10**9, "no dimension of its weights is beyond 4096"),
        ("num_attention_heads", 8, "makes model.layers.0.self_attn.o_proj.weight [32, 128], the weights have [32, 64]"),
        ("num_key_value_heads", 4, "makes model.layers.0.self_attn.k_proj.weight [64, 32], the weights have [32, 32]"),
        ("head_dim", 10**9, "no dimension of its weights is beyond 4096"),
        ("head_dim", 0, "at least 1"),
        ("max_position_embeddings", 10**12, "no model has more than 2147483648"),
        ("num_labels", 10**9, "no dimension beyond 4096"),
        ("text_config", {"num_hidden_layers": 10**9}, "no dimension beyond 4096"),
        ("max_window_layers", 10**9, "no dimension beyond 4096"),
    ],
)
def test_sizes_are_held_against_the_weights(folder: Path, field: str, value: Any, told: str) -> None:
    edit(folder / "config.json", **{field: value})
    line = refusal(folder)
    assert told in line
    assert "config.json" in line
    shown = "num_hidden_layers" if field == "text_config" else field
    assert f"{shown} {10**9 if field == 'text_config' else value!r}" in line


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_sizes_by_a_familys_own_names(tmp_path: Path, pair: Path, kind: str) -> None:
    from small_models import random_model

    random_model(kind, vocab_size=4096).save_pretrained(tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pair / "target" / name, tmp_path / "m")
    find(str(tmp_path / "m"))
    name = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    edit(tmp_path / "m" / "config.json", **{name: 10**9})
    assert f"{name} 1000000000, its weights have 3" in refusal(tmp_path / "m")


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("kind", BROKEN)
def test_json_that_is_none(folder: Path, name: str, kind: str) -> None:
    (folder / name).write_bytes(BROKEN[kind])
    assert f"{name} is not" in refusal(folder)


@pytest.mark.parametrize("kind", BROKEN)
def test_an_index_that_is_none(folder: Path, kind: str) -> None:
    (folder / "model.safetensors.index.json").write_bytes(BROKEN[kind])
    assert "model.safetensors.index.json" in refusal(folder)


@pytest.mark.parametrize(
    "names",
    [
        "../x.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        ".",
        "",
        "a\0b",
        "none.safetensors",
        "x" * 5000,
        5,
        None,
        ["x"],
    ],
)
def test_an_index_that_names_what_it_should_not(folder: Path, names: Any) -> None:
    edit(folder / "model.safetensors.index.json", weight_map={"model.norm.weight": names})
    refusal(folder)


@pytest.mark.parametrize("weight_map", [None, 5, [], "x", {}])
def test_an_index_without_a_map(folder: Path, weight_map: Any) -> None:
    edit(folder / "model.safetensors.index.json", weight_map=weight_map)
    refusal(folder)


def test_a_tensor_that_two_files_have(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    edit(folder / "model.safetensors.index.json", weight_map={"a": "model.safetensors", "b": "other.safetensors"})
    assert "as another of its files" in refusal(folder)


@pytest.mark.parametrize(
    "name", [*OBJECTS, "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "chat_template.jinja"]
)
def test_only_regular_files_are_opened(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)):
        make(folder / name)
        assert name in refusal(folder)
        (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_ten_gigabytes_of_nothing(folder: Path, name: str) -> None:
    with (folder / name).open("r+b") as file:
        file.truncate(10 << 30)
    refusal(folder)


def test_links_of_a_hubs_cache_are_followed(folder: Path, original: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(original / "model.safetensors")
    assert find(str(folder)).weights == [folder / "model.safetensors"]


def header(path: Path, change: Callable[[dict[str, Any]], Any], length: int | None = None) -> None:
    """Rewrite a file's header, as what `change` makes of it."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    fields = json.loads(data[8 : 8 + size])
    change(fields)
    text = json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data[8 + size :])


NORM = "model.norm.weight"
LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "offsets beyond the file": lambda h: h[NORM].update(data_offsets=[0, 10**15]),
    "offsets that overlap": lambda h: h[NORM].update(data_offsets=h["lm_head.weight"]["data_offsets"]),
    "offsets backwards": lambda h: h[NORM].update(data_offsets=[128, 0]),
    "negative offsets": lambda h: h[NORM].update(data_offsets=[-4, 0]),
    "unknown dtype": lambda h: h[NORM].update(dtype="F99"),
    "wrong shape": lambda h: h[NORM].update(shape=[33]),
    "shape that overflows": lambda h: h[NORM].update(shape=[2**40, 2**40]),
    "negative shape": lambda h: h[NORM].update(shape=[-32]),
    "wrong types": lambda h: h.update({NORM: [1]}),
    "no shape": lambda h: h[NORM].pop("shape"),
}


@pytest.mark.parametrize("name", LIES)
def test_headers_that_lie(folder: Path, name: str) -> None:
    header(folder / "model.safetensors", LIES[name])
    assert "model.safetensors is damaged" in refusal(folder)


@pytest.mark.parametrize("length", [0, 1, 2**40, 2**64 - 1])
def test_headers_of_a_length_that_lies(folder: Path, length: int) -> None:
    header(folder / "model.safetensors", lambda _: None, length)
    assert "model.safetensors is damaged" in refusal(folder)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"chat_template": 1e308}, "chat_template"),
        ({"chat_template": {"default": [1]}}, "chat_template"),
        ({"added_tokens_decoder": {"x": 1}}, "tokenizer"),
        ({"tokenizer_class": ["x"]}, "tokenizer"),
    ],
)
def test_a_tokenizers_configuration(folder: Path, fields: dict[str, Any], told: str) -> None:
    edit(folder / "tokenizer_config.json", **fields)
    assert told in refusal(folder)


def test_a_tokenizer_that_would_end_the_process(folder: Path) -> None:
    edit(
        folder / "tokenizer.json",
        model={"type": "BPE", "vocab": {}, "merges": ["x \u00e9"], "continuing_subword_prefix": "a"},
    )
    assert "prefix 'a'" in refusal(folder)


@pytest.mark.parametrize("fields", [{"dtype": 5}, {"dtype": "abc"}, {"eos_token_id": True}, {"eos_token_id": [[0]]}])
def test_a_configurations_types(folder: Path, fields: dict[str, Any]) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", **fields)
    refusal(folder)


def test_a_panic_of_the_tokenizer_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):  # pyo3's is no Exception
        pass

    def panics(*_: Any, **__: Any) -> None:
        raise PanicException("called `Result::unwrap()` on an `Err` value")

    monkeypatch.setattr("transformers.tokenization_utils_tokenizers.TokenizersBackend._encode_plus", panics)
    assert "tokenizer that does not work" in refusal(folder)


def test_weights_that_change_meanwhile_are_noticed(folder: Path) -> None:
    """Before they are loaded, before they are hashed, and between: what is recorded is what was exported."""
    path = folder / "model.safetensors"
    found, weights = find(str(folder)), load_file(path)
    load(found, "sdpa")
    assert found.sha256()
    save_file({name: weight + 1 for name, weight in weights.items()}, folder / "new", {"format": "pt"})
    (folder / "new").replace(path)
    for use in (lambda: load(found, "sdpa"), found.sha256):
        with pytest.raises(CheckpointError, match="was changed while it was read"):
            use()
    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        found.sha256()


@pytest.fixture
def head(original: Path, tmp_path: Path) -> tuple[Checkpoint, Path]:
    target = find(str(original))
    raw = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    raw |= {"head_dim": 16, "vocab_size": 4096, "draft_vocab_size": 40, "model_type": "llama"}
    made = EagleHead(head_config(raw, target.config)).float()
    made.t2d[:40] = True
    (tmp_path / "head").mkdir()
    save_head(tmp_path / "head", made)
    load_head(find_head(str(tmp_path / "head"), target), torch.zeros(4096, 32))
    return target, tmp_path / "head"


@pytest.mark.parametrize(
    "field", ["hidden_size", "draft_vocab_size", "num_attention_heads", "eagle_config", "head_dim"]
)
@pytest.mark.parametrize(
    "value", [10**18, -1, "x", [1], True, {"eagle_aux_hidden_state_layer_ids": [True, "x", 10**9]}]
)
def test_heads(head: tuple[Checkpoint, Path], field: str, value: Any) -> None:
    target, folder = head
    edit(folder / "config.json", **{field: value})
    with pytest.raises(CheckpointError) as caught:
        find_head(str(folder), target)
    assert "\n" not in str(caught.value)


def test_a_heads_tokens_of_another_type(head: tuple[Checkpoint, Path]) -> None:
    target, folder = head
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"d2t": weights["d2t"].float()}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"d2t of torch\.float32"):
        load_head(find_head(str(folder), target), torch.zeros(4096, 32))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))


@pytest.mark.parametrize("seed", range(40))
def test_wrong_types_anywhere(folder: Path, tmp_path: Path, seed: int) -> None:
    """Values of all kinds at any place of any of its files: it is taken, or refused in one line."""
    rng = random.Random(seed)
    for _ in range(rng.choice((1, 2))):
        path = folder / rng.choice(("config.json", *OBJECTS[:3]))
        content = json.loads(path.read_text(encoding="utf-8"))
        *outer, last = rng.choice(list(places(content)))
        at = content
        for key in outer:
            at = at[key]
        at[last] = rng.choice(VALUES)
        path.write_text(json.dumps(content), encoding="utf-8")
    try:
        sources = prepare(BuildConfig(str(folder), tmp_path / "out"))
        load(sources.target, "eager")
        save_tokenizer(tmp_path, sources.target.tokenizer)
    except CheckpointError as error:
        assert "\n" not in str(error)  # noqa: PT017
