"""Reading a manifest believes nothing: what no build wrote is refused in one line, in the promised order."""

import dataclasses
import json
from pathlib import Path

import pytest
from campaign import bundle_copy
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from specbuild.runtime.bundle.backend import COMPILED
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.bundle.manifest import (
    MANIFEST,
    SCHEMA_VERSION,
    CacheShape,
    EngineRecord,
    KernelRecord,
    Manifest,
    parse,
)
from specbuild.runtime.errors import BundleError

ENGINE = EngineRecord("1.7.1", ["89"], "native", None, False, None, 0, {"nodes1": {"nodes": [1, 1, 1]}})


@pytest.fixture(scope="module")
def small(manifest_of, write_bundle, tmp_path_factory):
    """A bundle of two models with everything that a build may write."""
    draft = {"kind": "parallel", "mask_token": 0, "tokens": "draft_tokens.json"}
    kernels = {"kernels/sm_90.cubin": KernelRecord("90", ["walk_tree"])}
    manifest = manifest_of(draft=draft, chat_template="chat.jinja", kernels=kernels)
    return write_bundle(tmp_path_factory.mktemp("manifests"), manifest).folder


def sealed(body):
    """The manifest with its digest."""
    return json.dumps(bundle_copy.sealed(body)).encode()


def refused(folder, data, what=""):
    """The one line with which a manifest is refused."""
    with pytest.raises(BundleError) as caught:
        parse(folder, data)
    message = str(caught.value)
    assert what in message
    return message


@given(place=st.floats(0, 1, exclude_max=True))
def test_a_flipped_bit_in_the_manifest_is_found(small, place):
    damaged = bytearray((small / MANIFEST).read_bytes())
    bit = int(place * 8 * len(damaged))
    damaged[bit // 8] ^= 1 << bit % 8
    refused(small, bytes(damaged))


NONE = '{"schema_version": 3, "models": {}, "files": {}, "tokenizer": %s, "chat_template": null}'
DRAWN = st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner))


@example(b"[" * 100_000)
@example(b"\xff\xfe\x00{")
@example((NONE % '"a\\u0000b"').encode())
@example((NONE % '"t", "x": "\\ud800"').encode())
@settings(max_examples=30)
@given(
    st.binary() | (DRAWN | st.fixed_dictionaries({"schema_version": DRAWN})).map(lambda each: json.dumps(each).encode())
)
def test_a_manifest_that_is_none(data):
    refused(Path("some.bundle"), data, "some.bundle")


def places(value, above=()):
    """The path of every value below this one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*above, key)
        yield from places(each, (*above, key))


@given(data=st.data())
def test_a_value_of_a_wrong_type_is_refused_and_named_wherever_it_stands(small, data):
    body = bundle_copy.manifest(small)
    del body["digest"], body["schema_version"]
    *above, key = data.draw(st.sampled_from(list(places(body))))
    value = data.draw(st.sampled_from([None, True, "x" * 5000, 5, 1.5, ["x"], {"x": "y"}]))
    owner = body
    for each in above:
        owner = owner[each]
    assume(type(value) is not type(owner[key]) and (key, value) != ("exactness_bound", 5))
    assume(key not in ("chat_template", "tokens", "mask_token") or value is not None)
    owner[key] = value
    message = refused(small, sealed(body | {"schema_version": SCHEMA_VERSION}))
    assert str((*above, key)[0]) in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        *[
            ("schema_version", older, "was built by an older specbuild: build the")
            for older in (-1, 0, True, SCHEMA_VERSION - 1)
        ],
        *[("buckets", wrong, "buckets") for wrong in ([], [0, 1], [1, 1], [4, 1])],
        ("models", {}, "its models are not a target and at most a draft"),
        ("models/target/graphs", {}, "length >= 1"),
        ("models/target/colour", "red", "unknown fields colour at $.models.target"),
        *[("models/draft/kind", kind, "the draft is of kind") for kind in ("model", "eagle3", "telepathy")],
        ("models/draft/hidden", 12, "the draft is of kind"),
        ("models/draft/hidden", -1, "`int` >= 0"),
        ("models/draft/mask_token", None, "the draft is of kind"),
        *[("models/target/kind", kind, "the target is of kind") for kind in ("eagle3", "parallel")],
        ("models/target/mask_token", 4, "the target is of kind"),
        ("models/target/capacity", 60, "capacity"),
        ("models/target/caches", [{"heads": 1, "key": 4, "value": 4}] * 9, "has 9 caches of its own for"),
        ("max_batch_size", 3, "has no graph for a batch of 3"),
        ("engines", {"target/weights.bin": dataclasses.asdict(ENGINE)}, "backend onnxruntime has engines"),
        *[
            ("engines", {"a": dataclasses.asdict(ENGINE) | {"profiles": {"nodes1": {"nodes": sizes}}}}, said)
            for sizes, said in (([2, 1, 1], "not least, usual, largest"), ([1, 1], "length >= 3"), ([True] * 3, "bool"))
        ],
        ("eos_token_ids", [50], "an end-of-text token is not in the vocabulary"),
    ],
)
def test_what_no_build_writes_is_refused(small, path, value, message):
    body = bundle_copy.manifest(small)
    *above, key = path.split("/")
    owner = body
    for each in above:
        owner = owner[each]
    owner[key] = value
    refused(small, sealed(body), message)


def test_faults_are_said_in_the_promised_order(small):
    """All at once; and each one, once those before it are mended."""
    body, newer = bundle_copy.manifest(small), SCHEMA_VERSION + 1
    wrong = body | {"schema_version": newer, "tokenizer": "../x", "buckets": [], "more": 1}
    refused(small, json.dumps(wrong).encode(), f"has schema_version {newer}, this specbuild reads up to")
    wrong["schema_version"] = SCHEMA_VERSION
    refused(small, json.dumps(wrong).encode(), "was changed after the build: copy or build the bundle again")
    refused(small, sealed(wrong), "is malformed (Expected `array` of length >= 1 - at `$.buckets`)")
    wrong["buckets"] = body["buckets"]
    refused(small, sealed(wrong), "is malformed (unknown fields more at $)")
    del wrong["more"]
    refused(small, sealed(wrong), "names '../x', which leaves the bundle: do not use this bundle")
    wrong["tokenizer"] = "other.json"
    refused(small, sealed(wrong), "uses 'other.json' but does not list its hash: build the bundle again")
    items = list(body.items())[::-1]
    assert parse(small, json.dumps(dict(items)).encode()) == parse(small, sealed(body)), "fields have no order"
    del body["digest"]
    refused(small, json.dumps(body).encode(), "was changed after the build")


@pytest.mark.parametrize("name", ["..", "a/../../x", "target/../tokenizer.json", "/etc/passwd", "..\\x", "/"])
def test_a_path_that_leaves_the_bundle_is_refused_wherever_it_stands(small, name):
    body = bundle_copy.manifest(small)
    target, draft = body["models"]["target"], body["models"]["draft"]
    for change in (
        {"files": body["files"] | {name: body["files"]["tokenizer.json"]}},
        {"models": {"target": target | {"graphs": target["graphs"] | {"1": name}}}},
        {"models": {"target": target, "draft": draft | {"tokens": name}}},
        {"tokenizer": name},
        {"chat_template": name},
        {"kernels": {name: dataclasses.asdict(KernelRecord("90", []))}},
        {"engines": {name: dataclasses.asdict(ENGINE)}, "backend": COMPILED[0]},
    ):
        refused(small, sealed(body | change), "leaves the bundle")


def test_a_symlink_that_leaves_the_bundle_is_refused(manifest_of, write_bundle, tmp_path):
    folder = write_bundle(tmp_path / "small.bundle", manifest_of(draft={})).folder
    for name in ("tokenizer.json", "draft"):
        moved = tmp_path / name
        (folder / name).rename(moved)
        (folder / name).symlink_to(moved)
        refused(folder, (folder / MANIFEST).read_bytes(), "leaves the bundle")
        (folder / name).unlink()
        moved.rename(folder / name)
    Bundle.open(folder).verify()


def test_whatever_is_used_has_a_hash(small):
    body = bundle_copy.manifest(small)
    used = {"tokenizer.json", "chat.jinja", "draft_tokens.json", "kernels/sm_90.cubin"}
    used |= {f"{model}/batch{size}.onnx" for model in ("target", "draft") for size in (1, 2)}
    assert set(body["files"]) == used
    for name in used:
        files = {n: record for n, record in body["files"].items() if n != name}
        refused(small, sealed(body | {"files": files}), f"uses {name!r} but does not list its hash")


def test_every_field_is_needed_unless_there_is_none_of_it(small):
    """Kernels and engines alone may be missing; and are, where there are none."""
    body = bundle_copy.manifest(small)
    assert {field.name for field in dataclasses.fields(Manifest)} - body.keys() == {"engines"}
    for name in body.keys() - {"kernels", "digest"}:
        assert name in refused(small, sealed({n: value for n, value in body.items() if n != name}))
    del body["models"]["draft"]["capacity"]
    refused(small, sealed(body), "missing required field `capacity`")


def test_what_is_unusual_is_written_of_those_alone_that_have_it(small, manifest_of):
    """So that whoever reads a schema reads bundles of other caches and drafts, and the other way round."""
    usual, unusual = (
        dataclasses.replace(ENGINE, plugin="1"),
        dataclasses.replace(ENGINE, kv_cache_dtype="fp8", block_size=32),
    )
    written = json.loads(manifest_of(engines={"a.plan": usual, "b.plan": unusual}).to_json())["engines"]
    assert written["b.plan"].keys() - written["a.plan"].keys() == {"kv_cache_dtype", "block_size"}
    assert [EngineRecord(**each) for each in written.values()] == [usual, unusual]
    caches = [CacheShape(1, 4, 4), CacheShape(1, 4, 4, 6)]
    written = json.loads(manifest_of(target={"caches": caches}).to_json())["models"]["target"]["caches"]
    assert written[1].keys() - written[0].keys() == {"state"}
    assert [CacheShape(**each) for each in written] == caches
    models = bundle_copy.manifest(small)["models"]
    assert {"kind", "mask_token", "tokens"} <= models["draft"].keys() - models["target"].keys()


def test_every_graph_of_engines_has_a_record(manifest_of, write_bundle, tmp_path):
    graphs = {name: {"graphs": {"2": f"{name}/model.plan"}} for name in ("target", "draft")}
    records = {"target/model.plan": ENGINE, "draft/model.plan": ENGINE}
    bundle = write_bundle(tmp_path, manifest_of(**graphs, backend=COMPILED[0], engines=records))
    assert bundle.manifest.engines == records
    fewer = dataclasses.replace(bundle.manifest, engines={"target/model.plan": ENGINE})
    refused(tmp_path, fewer.to_json().encode(), "has no record of the engine draft/model.plan: build the bundle again")


@settings(max_examples=20)
@given(
    bound=st.floats(0, 1e9),
    texts=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    buckets=st.sets(st.integers(1, 8), min_size=1).map(sorted),
)
def test_any_sound_values_come_back_as_they_were(small, bound, texts, buckets):
    before = parse(small, (small / MANIFEST).read_bytes())
    manifest = dataclasses.replace(before, exactness_bound=bound, special_tokens=texts, buckets=buckets)
    found = parse(small, manifest.to_json().encode())
    assert (found, found.to_json()) == (manifest, manifest.to_json())
    assert found.digest == json.loads(manifest.to_json())["digest"]
    assert (found.digest == before.digest) == (found == before)
