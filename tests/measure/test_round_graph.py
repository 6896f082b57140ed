"""The graph of rounds that follow each other is described without a device, with its nodes, their order and memory."""

import json
from dataclasses import replace

import numpy as np
import pytest

from specbuild.measure.round_graph import RecordingDevice, describe_bundle
from specbuild.runtime import Bundle
from specbuild.runtime.bundle.manifest import EngineRecord
from specbuild.runtime.errors import ExecutionError, OptionError


def as_plans(bundle, attention):
    """The reference pair's, as if it were two plans of TensorRT."""
    opened = Bundle.open(bundle)
    record = EngineRecord("11.0", [], attention, "1" if attention == "plugin" else None, False, None, 0, {})
    inputs = ["parents"] if attention == "plugin" else []  # who knows no parents is given masks
    models = {
        name: replace(model, graphs={"4": f"{name}/model.plan"}, precision="fp16", inputs=dict.fromkeys(inputs, ""))
        for name, model in opened.manifest.models.items()
    }
    engines = {f"{name}/model.plan": record for name in models}
    return replace(opened, manifest=replace(opened.manifest, backend="tensorrt", models=models, engines=engines))


@pytest.mark.parametrize("attention", ["native", "plugin"])
def test_a_description_is_of_what_runs(bundle, attention):
    found = json.loads(json.dumps(describe_bundle(as_plans(bundle, attention), 2, "topk:2,3")))
    nodes, edges = found["body"]["nodes"], found["body"]["edges"]
    copies = 2 if attention == "native" else 2 + 3 * 3 + 2  # what TreeAttention takes; the target's tree has no offset
    assert found["counts"] == {"child": 4, "kernel": 15, "memcpy": copies}
    assert (found["nodes"], found["condition"], found["tree"]) == (64, "while", "topk:2,3")
    assert [node["nodes"] for node in nodes if node["kind"] == "child"] == [2, 2, 2, 64]
    names = [node["kernel"] for node in nodes if node["kind"] == "kernel"]
    level = ["tree_mask_BOOL", "choose_best_F32", "grow_level"]
    verify = ["tree_mask_BOOL", "choose_best_F32", "walk_tree", "commit_path", "publish"]
    assert names == [*level * 3, "grow_finish", *verify]
    assert edges == [[at, at + 1] for at in range(len(nodes) - 1)], "draft before target, and nothing beside"
    last = nodes[-1]
    assert last["writes"] == ["ring.memory (host)", "ring.published (host)", "ring.block.round"]
    assert not any("host" in name for node in nodes[:-1] for name in (*node["reads"], *node["writes"]))
    walk = next(node for node in nodes if node.get("kernel") == "walk_tree")
    assert {"slots.roots", "slots.pair", "round.length"} <= set(walk["writes"])
    assert walk["grid"] == [2, 1, 1]


def test_a_description_of_paged_caches(bundle):
    """The models' steps and the commit read one table; nothing else of a round is another."""
    opened = as_plans(bundle, "plugin")
    engines = {n: replace(e, block_size=32) for n, e in opened.manifest.engines.items()}
    paged = describe_bundle(replace(opened, manifest=replace(opened.manifest, engines=engines)), 2, "topk:2,3")
    found, linear = paged["body"]["nodes"], describe_bundle(opened, 2, "topk:2,3")["body"]["nodes"]
    tables = [[name for name in node["reads"] if "pages.table" in name] for node in found]
    readers = [i for i, node in enumerate(found) if node["kind"] == "child" or node.get("kernel") == "commit_path"]
    assert [i for i, names in enumerate(tables) if names] == readers
    assert len({names[0] for names in tables if names}) == 1
    for node, names, other in zip(found, tables, linear, strict=True):
        assert node | {"reads": [name for name in node["reads"] if name not in names]} == other


def test_a_description_without_a_draft(bundle):
    found = describe_bundle(as_plans(bundle, "native"), 3, "off")
    assert found["counts"] == {"child": 1, "kernel": 5, "memcpy": 2}
    assert found["body"]["nodes"][0]["reads"] == ["slots.roots"]
    for tree, reason in (("tree", "unknown tree"), ("chain:64", "64 nodes, this bundle verifies at most 63")):
        with pytest.raises(OptionError, match=reason):
            describe_bundle(as_plans(bundle, "native"), 3, tree)
    opened = as_plans(bundle, "native")
    models = opened.manifest.models | {"draft": replace(opened.manifest.models["draft"], kind="parallel")}
    with pytest.raises(OptionError, match="a draft of kind parallel, so no rounds follow each other"):
        describe_bundle(replace(opened, manifest=replace(opened.manifest, models=models)), 3, "off")


def test_what_a_body_cannot_hold():
    notes = RecordingDevice()
    stream, there = notes.stream(), notes.empty((4,), np.int32)
    here = notes.pinned((4,), np.int32)
    for step, kind in (
        (lambda: notes.upload(there, here, stream), "copy from the host"),
        (lambda: notes.download(here, there, stream), "copy to the host"),
        (lambda: notes.wait(stream), "wait of the host"),
        (lambda: notes.empty((1,), np.int32) and None, "allocation"),
    ):

        def body(handle, step=step):
            notes.copy(there, there, stream)
            step()

        with pytest.raises(ExecutionError, match=f"node 1 of the loop, {kind}, is none that a conditional body"):
            notes.loop(body, stream)
