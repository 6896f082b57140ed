"""The bundle: every damage is found and said in one line, and nothing outside the folder is ever named."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime import Engine
from specbuild.runtime.bundle.bundle import Bundle, file_record
from specbuild.runtime.bundle.manifest import MANIFEST, SCHEMA_VERSION, EngineRecord, Manifest
from specbuild.runtime.errors import BundleError


def open_and_verify(folder: Path) -> None:
    Bundle.open(folder).verify()


def refused(folder: Path, what: str = "", check: Callable[[Path], object] | None = None) -> str:
    """The one line with which a bundle is refused."""
    with pytest.raises(BundleError) as caught:
        (check or open_and_verify)(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert what in message
    return message


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def rewrite(folder: Path, **changes: Any) -> None:
    """A manifest that says something else, and whose digest is right."""
    manifest = dataclasses.replace(Bundle.open(folder).manifest, **changes)
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def test_an_undamaged_bundle_is_as_it_was_written(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    opened.verify()
    assert opened.manifest.to_json() == (bundle / MANIFEST).read_text(encoding="utf-8")
    listed = {opened.path(name) for name in opened.manifest.files}
    on_disk = {path for path in bundle.rglob("*") if path.is_file()}
    assert on_disk - listed == {bundle / MANIFEST}
    assert listed <= on_disk


def test_a_flipped_bit_in_any_file_is_found(bundle_copy: Path) -> None:
    rng = random.Random(0)
    names = list(Bundle.open(bundle_copy).manifest.files)
    assert len(names) >= 8
    for name in names:
        path = bundle_copy / name
        size = path.stat().st_size
        for bit in (0, 8 * size - 1, rng.randrange(8 * size)):
            flip(path, bit)
            assert "hash" in refused(bundle_copy, str(path))
            flip(path, bit)
    Bundle.open(bundle_copy).verify()


def test_a_flipped_bit_in_the_manifest_is_found(bundle_copy: Path) -> None:
    path, rng = bundle_copy / MANIFEST, random.Random(1)
    before = path.read_bytes()
    for bit in [*range(64), *(rng.randrange(8 * len(before)) for _ in range(600))]:
        damaged = bytearray(before)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        refused(bundle_copy, check=Bundle.open)
    path.write_bytes(before)
    Bundle.open(bundle_copy)


@pytest.mark.parametrize("name", ["target/weights.bin", "draft/batch1.onnx", "tokenizer.json", "report.json"])
def test_loading_an_engine_finds_it_too(bundle_copy: Path, name: str) -> None:
    path = bundle_copy / name
    flip(path, 4 * path.stat().st_size)
    refused(bundle_copy, str(path), check=Engine.load)


@pytest.mark.parametrize("name", ["target/weights.bin", "target/batch1.onnx", "tokenizer.json"])
@pytest.mark.parametrize("check", [None, Engine.load])
def test_a_truncated_file_is_found(bundle_copy: Path, name: str, check: Callable[[Path], object] | None) -> None:
    path = bundle_copy / name
    os.truncate(path, path.stat().st_size // 2)
    assert "size" in refused(bundle_copy, str(path), check)


@pytest.mark.parametrize("name", ["draft/weights.bin", "target/batch1.onnx", "tokenizer.json", "report.json"])
@pytest.mark.parametrize("check", [None, Engine.load])
def test_a_missing_file_is_found(bundle_copy: Path, name: str, check: Callable[[Path], object] | None) -> None:
    (bundle_copy / name).unlink()
    refused(bundle_copy, str(bundle_copy / name), check)


def test_a_folder_in_a_files_place_is_found(bundle_copy: Path) -> None:
    (bundle_copy / "tokenizer.json").unlink()
    (bundle_copy / "tokenizer.json").mkdir()
    refused(bundle_copy, "tokenizer.json")


def test_what_is_no_bundle(tmp_path: Path) -> None:
    refused(tmp_path / "missing", "not a folder")
    (tmp_path / "file").write_text("{}")
    refused(tmp_path / "file", "not a folder")
    refused(tmp_path, MANIFEST)
    (tmp_path / MANIFEST).mkdir()
    refused(tmp_path, MANIFEST)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "5", '"text"', "{}", '{"schema_version": null}', '{"schema_version": "1"}'),
        *('{"schema_version": 3}', '{"schema_version": 3, "models": 5}', '{"schema_version": 3, "models": {"a": {}}}'),
        '{"schema_version": 3, "models": {}, "files": 5, "tokenizer": "t", "chat_template": null}',
        '{"schema_version": 3, "models": {}, "files": [5], "tokenizer": "t", "chat_template": null}',
        '{"schema_version": 3, "models": {}, "files": {}, "tokenizer": null, "chat_template": null}',
        pytest.param(
            '{"schema_version": 3, "models": {}, "files": {}, "tokenizer": "a\\u0000b", "chat_template": null}',
            id="nul",
        ),
        pytest.param(
            '{"schema_version": 3, "models": {}, "files": {}, "tokenizer": "\\ud800", "chat_template": null}',
            id="surrogate-path",
        ),
        pytest.param(
            '{"schema_version": 3, "models": {}, "files": {}, "tokenizer": "t", "chat_template": null, "x": "\\ud800"}',
            id="surrogate",
        ),
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_a_manifest_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    refused(tmp_path, MANIFEST, check=Bundle.open)


def test_a_manifest_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(b"\xff\xfe\x00{")
    refused(tmp_path, MANIFEST, check=Bundle.open)


def test_an_older_schema_is_to_be_built_again(bundle_copy: Path) -> None:
    manifest = json.loads((bundle_copy / "manifest.json").read_text(encoding="utf-8"))
    (bundle_copy / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 1}), encoding="utf-8")
    assert "build the bundle again" in refused(bundle_copy, "older specbuild", check=Bundle.open)


def test_a_newer_schema_is_refused_first(bundle_copy: Path) -> None:
    path = bundle_copy / MANIFEST
    newer = {"schema_version": SCHEMA_VERSION + 1, "anything": "else", "files": {"../x": {}}}
    path.write_text(json.dumps(newer))
    message = refused(bundle_copy, f"schema_version {SCHEMA_VERSION + 1}", check=Bundle.open)
    assert "update specbuild" in message


def test_an_older_digest_is_refused(bundle_copy: Path) -> None:
    path = bundle_copy / MANIFEST
    body = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(body | {"max_seq_len": body["max_seq_len"] + 1}), encoding="utf-8")
    refused(bundle_copy, "changed after the build", check=Bundle.open)
    del body["digest"]
    path.write_text(json.dumps(body), encoding="utf-8")
    refused(bundle_copy, "changed after the build", check=Bundle.open)


OUTSIDE = ["../x", "..", "a/../../x", "target/../tokenizer.json", "/etc/passwd", "..\\x", "target\\x", "/"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_path_that_leaves_the_bundle_is_refused_wherever_it_stands(bundle_copy: Path, name: str) -> None:
    manifest, before = Bundle.open(bundle_copy).manifest, (bundle_copy / MANIFEST).read_text(encoding="utf-8")
    target = manifest.models["target"]
    files = manifest.files | {name: manifest.files["tokenizer.json"]}
    models = manifest.models | {"target": dataclasses.replace(target, graphs=target.graphs | {"1": name})}
    for changes in ({"files": files}, {"models": models}, {"tokenizer": name}, {"chat_template": name}):
        rewrite(bundle_copy, **changes)
        refused(bundle_copy, "leaves the bundle", check=Bundle.open)
        (bundle_copy / MANIFEST).write_text(before, encoding="utf-8")


def test_a_symlink_that_leaves_the_bundle_is_refused(bundle_copy: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "draft"):
        moved = tmp_path / "elsewhere" / name
        moved.parent.mkdir(exist_ok=True)
        (bundle_copy / name).rename(moved)
        (bundle_copy / name).symlink_to(moved)
        refused(bundle_copy, "leaves the bundle", check=Bundle.open)
        (bundle_copy / name).unlink()
        moved.rename(bundle_copy / name)
    Bundle.open(bundle_copy).verify()


def test_a_symlink_to_itself_is_refused(bundle_copy: Path) -> None:
    (bundle_copy / "tokenizer.json").unlink()
    (bundle_copy / "tokenizer.json").symlink_to("tokenizer.json")
    refused(bundle_copy, "tokenizer.json")


def test_a_used_file_without_a_hash_is_refused(bundle_copy: Path) -> None:
    manifest = Bundle.open(bundle_copy).manifest
    for name in ("tokenizer.json", "target/batch1.onnx"):
        rewrite(bundle_copy, files={n: record for n, record in manifest.files.items() if n != name})
        refused(bundle_copy, name, check=Bundle.open)
        rewrite_whole(bundle_copy, manifest)


def rewrite_whole(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def test_an_unknown_backend_is_refused(bundle_copy: Path) -> None:
    rewrite(bundle_copy, backend="abacus")
    refused(bundle_copy, "abacus", check=Engine.load)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buckets": []}, "buckets are []"),
        ({"buckets": ["a"]}, "buckets is"),
        ({"buckets": [4, 1]}, "buckets are [4, 1]"),
        ({"max_batch_size": None}, "max_batch_size is None"),
        ({"max_seq_len": True}, "max_seq_len is True"),
        ({"models": {}}, "a model is missing"),
        ({"exactness_bound": "small"}, "exactness_bound is"),
    ],
)
def test_what_no_build_writes_is_refused(bundle_copy: Path, changes: dict[str, Any], message: str) -> None:
    rewrite(bundle_copy, **changes)
    assert message in refused(bundle_copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activations": "x"}, "activations is 'x'"),
        ({"architectures": "89"}, "architectures is '89'"),
        ({"attention": 5}, "attention is 5"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype is None"),
        ({"block_size": "16"}, "block_size is '16'"),
        ({"profiles": {"nodes1": {"nodes": [2, 1, 1]}}}, "not least, usual, largest"),
        ({"profiles": {"nodes1": {"nodes": [1, 1]}}}, "not least, usual, largest"),
        ({"profiles": {"nodes1": {"nodes": [True, 1, 1]}}}, "profiles is"),
        ({}, "backend onnxruntime has engines"),
    ],
)
def test_what_no_engine_has_is_refused(bundle_copy: Path, changes: dict[str, Any], message: str) -> None:
    record = EngineRecord("1.7.1", ["89"], "native", None, False, None, 0, {"nodes1": {"nodes": [1, 1, 1]}})
    rewrite(bundle_copy, engines={"target/weights.bin": dataclasses.replace(record, **changes)})
    assert message in refused(bundle_copy)


def test_what_is_unusual_of_a_cache_is_told(bundle: Path) -> None:
    """So that whoever reads schema 2 reads bundles of other caches, and the other way round."""
    record = EngineRecord("10.15", ["89"], "plugin", "1", False, None, 0, {})
    both = {"a.plan": record, "b.plan": dataclasses.replace(record, kv_cache_dtype="fp8", block_size=32)}
    manifest = dataclasses.replace(Bundle.open(bundle).manifest, engines=both)
    written = json.loads(manifest.to_json())["engines"]
    assert [each.get("kv_cache_dtype") for each in written.values()] == [None, "fp8"]
    assert [each.get("block_size") for each in written.values()] == [None, 32]
    assert {name: EngineRecord(**each) for name, each in written.items()} == both


def test_what_was_checked_takes_precedence_over_what_failed(bundle_copy: Path) -> None:
    opened = Bundle.open(bundle_copy)
    with pytest.raises(RuntimeError, match="body"), opened.verifying():
        raise RuntimeError("body")
    flip(bundle_copy / "report.json", 3)
    with pytest.raises(BundleError, match="report"), opened.verifying():
        raise RuntimeError("body")


def test_file_record(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    record = file_record(tmp_path / "abc")
    assert record.bytes == 3
    assert record.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
