"""Reading a manifest believes nothing: what no build wrote is refused in one line, in the promised order."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.bundle.backend import COMPILED
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.bundle.manifest import (
    KINDS,
    MANIFEST,
    SCHEMA_VERSION,
    EngineRecord,
    KernelRecord,
    Manifest,
    _digest,
    parse,
)
from specbuild.runtime.errors import BundleError

Make = Callable[..., Manifest]
ENGINE = EngineRecord("1.7.1", ["89"], "native", None, False, None, 0, {"nodes1": {"nodes": [1, 1, 1]}})


@pytest.fixture
def small(manifest_of: Make, write_bundle: Callable[..., Bundle], tmp_path: Path) -> Path:
    """A bundle of two models to damage."""
    return write_bundle(tmp_path / "small.bundle", manifest_of(draft={})).folder


def read(folder: Path) -> Manifest:
    return parse(folder, (folder / MANIFEST).read_bytes())


def refused(folder: Path, what: str = "") -> str:
    """The one line with which a manifest is refused."""
    with pytest.raises(BundleError) as caught:
        read(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert what in message
    return message


def edit(folder: Path, change: Callable[[dict[str, Any]], object], seal: bool = True) -> None:
    """A manifest whose JSON says something else, and whose digest is right where it is to be sealed."""
    path = folder / MANIFEST
    body = json.loads(path.read_text(encoding="utf-8"))
    change(body)
    if seal:
        body.pop("digest", None)
        body["digest"] = _digest(body)
    path.write_text(json.dumps(body), encoding="utf-8")


def rewrite(folder: Path, **changes: Any) -> None:
    """A manifest that says something else, and whose digest is right."""
    manifest = dataclasses.replace(read(folder), **changes)
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def test_a_flipped_bit_in_the_manifest_is_found(small: Path) -> None:
    path, rng = small / MANIFEST, random.Random(1)
    before = path.read_bytes()
    for bit in [*range(64), *(rng.randrange(8 * len(before)) for _ in range(600))]:
        damaged = bytearray(before)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        refused(small)
    path.write_bytes(before)
    read(small)


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
    refused(tmp_path, MANIFEST)


def test_a_manifest_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(b"\xff\xfe\x00{")
    refused(tmp_path, MANIFEST)


def test_an_older_schema_is_to_be_built_again(small: Path) -> None:
    manifest = json.loads((small / "manifest.json").read_text(encoding="utf-8"))
    (small / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 1}), encoding="utf-8")
    assert "build the bundle again" in refused(small, "older specbuild")


def test_a_newer_schema_is_refused_first(small: Path) -> None:
    path = small / MANIFEST
    newer = {"schema_version": SCHEMA_VERSION + 1, "anything": "else", "files": {"../x": {}}}
    path.write_text(json.dumps(newer))
    message = refused(small, f"schema_version {SCHEMA_VERSION + 1}")
    assert "update specbuild" in message


def test_an_older_digest_is_refused(small: Path) -> None:
    path = small / MANIFEST
    body = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(body | {"max_seq_len": body["max_seq_len"] + 1}), encoding="utf-8")
    refused(small, "changed after the build")
    del body["digest"]
    path.write_text(json.dumps(body), encoding="utf-8")
    refused(small, "changed after the build")


OUTSIDE = ["../x", "..", "a/../../x", "target/../tokenizer.json", "/etc/passwd", "..\\x", "target\\x", "/"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_path_that_leaves_the_bundle_is_refused_wherever_it_stands(small: Path, name: str) -> None:
    manifest, before = read(small), (small / MANIFEST).read_text(encoding="utf-8")
    target = manifest.models["target"]
    files = manifest.files | {name: manifest.files["tokenizer.json"]}
    models = manifest.models | {"target": dataclasses.replace(target, graphs=target.graphs | {"1": name})}
    for changes in ({"files": files}, {"models": models}, {"tokenizer": name}, {"chat_template": name}):
        rewrite(small, **changes)
        refused(small, "leaves the bundle")
        (small / MANIFEST).write_text(before, encoding="utf-8")


def test_a_symlink_that_leaves_the_bundle_is_refused(small: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "draft"):
        moved = tmp_path / "elsewhere" / name
        moved.parent.mkdir(exist_ok=True)
        (small / name).rename(moved)
        (small / name).symlink_to(moved)
        refused(small, "leaves the bundle")
        (small / name).unlink()
        moved.rename(small / name)
    Bundle.open(small).verify()


def test_a_used_file_without_a_hash_is_refused(small: Path) -> None:
    manifest = read(small)
    for name in ("tokenizer.json", "target/batch1.onnx"):
        rewrite(small, files={n: record for n, record in manifest.files.items() if n != name})
        refused(small, name)
        rewrite_whole(small, manifest)


def rewrite_whole(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buckets": []}, "length >= 1 - at `$.buckets`"),
        ({"buckets": ["a"]}, "got `str` - at `$.buckets[0]`"),
        ({"buckets": [4, 1]}, "buckets are [4, 1]"),
        ({"max_batch_size": None}, "got `null` - at `$.max_batch_size`"),
        ({"max_seq_len": True}, "got `bool` - at `$.max_seq_len`"),
        ({"models": {}}, "its models are not a target and at most a draft"),
        ({"exactness_bound": "small"}, "at `$.exactness_bound`"),
    ],
)
def test_what_no_build_writes_is_refused(small: Path, changes: dict[str, Any], message: str) -> None:
    rewrite(small, **changes)
    assert message in refused(small)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activations": "x"}, "got `str` - at `$.engines[...].activations`"),
        ({"architectures": "89"}, "got `str` - at `$.engines[...].architectures`"),
        ({"attention": 5}, "got `int` - at `$.engines[...].attention`"),
        ({"kv_cache_dtype": None}, "got `null` - at `$.engines[...].kv_cache_dtype`"),
        ({"block_size": "16"}, "got `str` - at `$.engines[...].block_size`"),
        ({"profiles": {"nodes1": {"nodes": [2, 1, 1]}}}, "not least, usual, largest"),
        ({"profiles": {"nodes1": {"nodes": [1, 1]}}}, "length >= 3"),
        ({"profiles": {"nodes1": {"nodes": [True, 1, 1]}}}, "got `bool`"),
        ({}, "backend onnxruntime has engines"),
    ],
)
def test_what_no_engine_has_is_refused(small: Path, changes: dict[str, Any], message: str) -> None:
    record = EngineRecord("1.7.1", ["89"], "native", None, False, None, 0, {"nodes1": {"nodes": [1, 1, 1]}})
    rewrite(small, engines={"target/weights.bin": dataclasses.replace(record, **changes)})
    assert message in refused(small)


def test_what_is_unusual_of_a_cache_is_told(manifest_of: Make) -> None:
    """So that whoever reads schema 2 reads bundles of other caches, and the other way round."""
    record = EngineRecord("10.15", ["89"], "plugin", "1", False, None, 0, {})
    both = {"a.plan": record, "b.plan": dataclasses.replace(record, kv_cache_dtype="fp8", block_size=32)}
    manifest = manifest_of(engines=both)
    written = json.loads(manifest.to_json())["engines"]
    assert [each.get("kv_cache_dtype") for each in written.values()] == [None, "fp8"]
    assert [each.get("block_size") for each in written.values()] == [None, 32]
    assert {name: EngineRecord(**each) for name, each in written.items()} == both


def test_what_was_written_is_read_back(small: Path) -> None:
    manifest = read(small)
    assert manifest.to_json() == (small / MANIFEST).read_text(encoding="utf-8")
    assert Bundle.open(small).manifest == manifest
    assert [type(each).__name__ for each in (*manifest.models.values(), *manifest.files.values())] == [
        *["ModelRecord"] * 2,
        *["FileRecord"] * len(manifest.files),
    ]


def test_the_digest_is_the_files(small: Path) -> None:
    manifest = read(small)
    assert manifest.digest == json.loads((small / MANIFEST).read_text(encoding="utf-8"))["digest"]
    assert dataclasses.replace(manifest, precision="int8").digest != manifest.digest


def test_an_order_of_fields_is_not_part_of_what_is_said(small: Path) -> None:
    manifest = read(small)

    def turn(body: dict[str, Any]) -> None:
        items = list(body.items())[::-1]
        body.clear()
        body.update(items)

    edit(small, turn, seal=False)
    assert read(small) == manifest


@pytest.mark.parametrize("version", [-1, 0, 1, True, SCHEMA_VERSION - 1])
def test_schemas_from_before_are_refused(small: Path, version: int) -> None:
    edit(small, lambda body: body.update(schema_version=version))
    refused(small, "was built by an older specbuild: build the bundle again")


def test_faults_are_said_in_the_promised_order(small: Path) -> None:
    """All at once; and each one, once those before it are mended."""
    wanted = read(small).to_json()
    edit(small, lambda body: body.update(schema_version=SCHEMA_VERSION + 1, tokenizer="../x", buckets=[]), seal=False)
    refused(small, f"has schema_version {SCHEMA_VERSION + 1}, this specbuild reads up to {SCHEMA_VERSION}: update")
    edit(small, lambda body: body.update(schema_version=SCHEMA_VERSION), seal=False)
    refused(small, "was changed after the build: copy or build the bundle again")
    edit(small, lambda body: body.update(more=1))
    refused(small, "is malformed (Expected `array` of length >= 1 - at `$.buckets`): copy or build the bundle again")
    edit(small, lambda body: body.update(buckets=[1, 4, 8]))
    refused(small, "is malformed (unknown fields more at $): copy or build the bundle again")
    edit(small, lambda body: body.pop("more"))
    refused(small, "names '../x', which leaves the bundle: do not use this bundle")
    edit(small, lambda body: body.update(tokenizer="other.json"))
    refused(small, "uses 'other.json' but does not list its hash: build the bundle again")
    edit(small, lambda body: body.update(tokenizer="tokenizer.json"))
    assert read(small).to_json() == wanted


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Manifest)])
def test_every_field_is_needed_unless_there_is_none_of_it(small: Path, name: str) -> None:
    """Kernels, engines and classes alone may be missing; and are, where there are none."""
    body = json.loads((small / MANIFEST).read_text(encoding="utf-8"))
    if name in ("kernels", "engines", "exactness"):
        assert name not in body
        return
    assert name in body
    edit(small, lambda body: body.pop(name))
    assert name in refused(small)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("models", {"layers": None}, "got `null` - at `$.models[...].layers`"),
        ("models", {"layers": 2.0}, "got `float`"),
        ("models", {"windows": 0}, "got `int`"),
        ("models", {"windows": ["0"]}, "got `str`"),
        ("models", {"graphs": {}}, "length >= 1"),
        ("models", {"graphs": {"1": 5}}, "is malformed"),
        ("models", {"tokens": 5}, "is malformed"),
        ("models", {"colour": "red"}, "unknown fields colour at $.models.target"),
        ("models", {"mask_token": "3"}, "got `str`"),
        ("files", {"bytes": "7"}, "got `str`"),
        ("files", {"bytes": True}, "got `bool`"),
        ("files", {"sha256": None}, "got `null`"),
        ("files", {"mode": 7}, "unknown fields mode at $.files"),
    ],
)
def test_records_of_wrong_types_are_refused(small: Path, part: str, change: dict[str, Any], message: str) -> None:
    edit(small, lambda body: next(iter(body[part].values())).update(change))
    refused(small, message)


def test_what_a_record_lacks_is_refused(small: Path) -> None:
    edit(small, lambda body: body["models"]["draft"].pop("capacity"))
    refused(small, "missing required field `capacity`")


def test_a_long_value_is_cut_in_what_is_said(small: Path) -> None:
    edit(small, lambda body: body.update(precision=["x" * 5000]))
    assert len(refused(small, "got `array` - at `$.precision`")) < 300


@pytest.mark.parametrize("buckets", [[0, 1], [1, 1], [4, 1], [-1], [], [1.5], [True, 2], None])
def test_buckets_ascend_from_at_least_one(small: Path, buckets: Any) -> None:
    edit(small, lambda body: body.update(buckets=buckets))
    refused(small, "buckets")


@pytest.mark.parametrize(
    ("fields", "sound"),
    [
        ({"kind": "model"}, True),
        ({"kind": "parallel", "mask_token": 0}, True),
        ({"kind": "eagle3", "hidden": 12}, True),
        ({"kind": "parallel"}, False),
        ({"kind": "eagle3"}, False),
        ({"kind": "model", "mask_token": 3}, False),
        ({"kind": "model", "hidden": 12}, False),
        ({"kind": "eagle3", "hidden": -1}, False),
        ({"kind": "parallel", "mask_token": 3, "hidden": 12}, False),
        ({"kind": "telepathy"}, False),
    ],
)
def test_a_draft_has_what_its_kind_needs_and_no_more(
    manifest_of: Make, write_bundle: Callable[..., Bundle], tmp_path: Path, fields: dict[str, Any], sound: bool
) -> None:
    manifest = manifest_of(draft=fields)
    if sound:
        bundle = write_bundle(tmp_path, manifest)
        assert bundle.manifest.models["draft"] == manifest.models["draft"]
        assert fields["kind"] in KINDS
    else:
        with pytest.raises(BundleError, match=f"the draft is of kind {fields['kind']}|Expected `int` >= 0"):
            write_bundle(tmp_path, manifest)


def test_a_target_may_write_hidden_states_and_is_a_model_all_the_same(
    manifest_of: Make, write_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    bundle = write_bundle(tmp_path, manifest_of(target={"hidden": 12}, draft={"kind": "eagle3", "hidden": 12}))
    assert bundle.manifest.models["target"].hidden == 12
    for wrong in ({"kind": "eagle3"}, {"kind": "parallel"}, {"mask_token": 4}):
        with pytest.raises(BundleError, match="the target is of kind"):
            write_bundle(tmp_path, manifest_of(target=wrong))


def test_what_only_some_models_have_is_told_of_those_alone(manifest_of: Make) -> None:
    draft = {"kind": "parallel", "mask_token": 0, "tokens": "draft_tokens.json"}
    written = json.loads(manifest_of(draft=draft).to_json())
    assert {"kind", "hidden", "mask_token", "tokens"}.isdisjoint(written["models"]["target"])
    assert {name: written["models"]["draft"][name] for name in draft} == draft
    assert "hidden" not in written["models"]["draft"]
    assert {"kernels", "engines"}.isdisjoint(written)


@pytest.mark.parametrize("backend", COMPILED)
def test_every_graph_of_engines_has_a_record(
    manifest_of: Make, write_bundle: Callable[..., Bundle], tmp_path: Path, backend: str
) -> None:
    graphs = {name: {"graphs": {"2": f"{name}/model.plan"}} for name in ("target", "draft")}
    records = {"target/model.plan": ENGINE, "draft/model.plan": ENGINE}
    bundle = write_bundle(tmp_path, manifest_of(**graphs, backend=backend, engines=records))
    assert bundle.manifest.engines == records
    rewrite(tmp_path, engines={"target/model.plan": ENGINE})
    refused(tmp_path, "has no record of the engine draft/model.plan: build the bundle again")


def test_whatever_is_used_has_a_hash(manifest_of: Make, write_bundle: Callable[..., Bundle], tmp_path: Path) -> None:
    draft = {"kind": "model", "tokens": "draft_tokens.json"}
    kernels = {"kernels/sm_90.cubin": KernelRecord("90", ["walk_tree"])}
    bundle = write_bundle(tmp_path, manifest_of(draft=draft, chat_template="chat.jinja", kernels=kernels))
    used = {"tokenizer.json", "chat.jinja", "draft_tokens.json", "kernels/sm_90.cubin"}
    used |= {f"{model}/batch{size}.onnx" for model in ("target", "draft") for size in (1, 2)}
    assert set(bundle.manifest.files) == used
    for name in used:
        rewrite_whole(tmp_path, bundle.manifest)
        rewrite(tmp_path, files={n: record for n, record in bundle.manifest.files.items() if n != name})
        refused(tmp_path, f"uses {name!r} but does not list its hash")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a\\b"])
@pytest.mark.parametrize("where", ["tokens", "kernels", "engines"])
def test_a_path_of_what_only_some_have_is_checked_too(small: Path, name: str, where: str) -> None:
    def change(body: dict[str, Any]) -> None:
        if where == "tokens":
            body["models"]["draft"]["tokens"] = name
        else:
            record = KernelRecord("90", []) if where == "kernels" else ENGINE
            body[where] = {name: dataclasses.asdict(record)}
            if where == "engines":
                body["backend"] = COMPILED[0]

    edit(small, change)
    refused(small, f"names {name!r}, which leaves the bundle")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("manifests")


@settings(deadline=None, max_examples=40)
@given(
    bound=st.floats(0, 1e9),
    libraries=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    eos=st.lists(st.integers(0, 49), max_size=3),
    special=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    buckets=st.sets(st.integers(1, 8), min_size=1, max_size=5).map(sorted),
)
def test_any_sound_values_come_back_as_they_were(
    manifest_of: Make,
    folder: Path,
    bound: float,
    libraries: dict[str, str],
    eos: list[int],
    special: dict[str, str],
    buckets: list[int],
) -> None:
    fields = {"exactness_bound": bound, "libraries": libraries, "eos_token_ids": eos, "special_tokens": special}
    names = ("tokenizer.json", "target/batch1.onnx", "target/batch2.onnx")
    files = {name: {"bytes": 1, "sha256": "0"} for name in names}
    manifest = manifest_of(buckets=buckets, **fields)
    body = json.loads(manifest.to_json()) | {"files": files}
    body["digest"] = _digest({name: value for name, value in body.items() if name != "digest"})
    (folder / MANIFEST).write_text(json.dumps(body, ensure_ascii=False), encoding="utf-8")
    found = read(folder)
    assert dataclasses.replace(found, files={}) == manifest
    assert found.to_json() == json.dumps(body, indent=2, ensure_ascii=False) + "\n"
