"""The memory plan: what is counted, and what would fit where a bundle does not."""

from dataclasses import replace

import pytest

from specbuild.runtime import Bundle
from specbuild.runtime.bundle import memory_plan
from specbuild.runtime.bundle.manifest import EngineRecord, FileRecord
from specbuild.runtime.errors import OptionError

MIB = 1 << 20
TARGET_ROW, DRAFT_ROW = 2 * 6 * 2 * 64 * 2, 2 * 2 * 1 * 64 * 2  # bytes of a token's keys and values in fp16


@pytest.fixture(scope="module")
def manifest(bundle):
    """The reference pair's, as if it were two plans of 40 and 10 MiB in fp16."""
    found = Bundle.open(bundle).manifest
    plans = {"target/model.plan": FileRecord(40 * MIB, "0"), "draft/model.plan": FileRecord(10 * MIB, "0")}
    models = {
        name: replace(record, graphs={"4": f"{name}/model.plan"}, precision="fp16")
        for name, record in found.models.items()
    }
    profiles = {"nodes64": {"nodes": [64, 64, 64]}, "prompt": {"nodes": [65, 256, 512]}}
    one = EngineRecord("1.7.1", [], "native", None, False, None, 3 * MIB, profiles)
    engines = {"target/model.plan": one, "draft/model.plan": replace(one, activations=MIB)}
    return replace(found, files=found.files | plans, models=models, engines=engines)


def test_a_plan(manifest, bundle):
    on_cpu = memory_plan.plan(Bundle.open(bundle).manifest, 1)
    assert (on_cpu.caches, on_cpu.activations) == ((1024 + 64) * 2 * (TARGET_ROW + DRAFT_ROW), 0), "in fp32"
    both, alone = memory_plan.plan(manifest, 2), memory_plan.plan(manifest, 2, models=["target"])
    files = {
        name: sum(f.bytes for file, f in manifest.files.items() if file.startswith(name))
        for name in ("target", "draft")
    }
    assert (both.weights, alone.weights) == (sum(files.values()), files["target"])
    assert (both.caches, alone.caches) == (2 * (1024 + 64) * (TARGET_ROW + DRAFT_ROW), 2 * (1024 + 64) * TARGET_ROW)
    assert (both.activations, alone.activations) == (3 * MIB, 3 * MIB)
    assert both.to_dict()["total"] == both.total > both.weights + both.caches + both.activations
    assert memory_plan.plan(manifest, 2, 500).caches == both.caches * (512 + 64) // (1024 + 64), "in whole 64 rows"
    twice = memory_plan.plan(manifest, 4)
    assert (twice.caches, twice.weights) == (2 * both.caches, both.weights)
    assert twice.buffers > both.buffers > 2 * 4096 * 64 * 4, "logits of every node"
    engines = manifest.engines | {
        "target/model.plan": replace(manifest.engines["target/model.plan"], kv_cache_dtype="fp8")
    }
    fp8 = memory_plan.plan(replace(manifest, engines=engines), 2)
    assert fp8 == replace(both, caches=2 * (1024 + 64) * (TARGET_ROW // 2 + DRAFT_ROW))


@pytest.fixture
def paged(manifest):
    """The same in pages of 32 rows; a slot has 34."""
    return replace(manifest, engines={name: replace(e, block_size=32) for name, e in manifest.engines.items()})


def test_pages(paged, manifest):
    assert [memory_plan.pages(paged, 2, tokens) for tokens in (None, 32, 100, 4 * 1088)] == [68, 1, 3, 136]
    assert memory_plan.pages(manifest, 2) == 0
    for wrong in (31, 4 * 1088 + 1, 64.0, True):
        with pytest.raises(OptionError, match=f"kv_cache_tokens must be 32…4352 for this bundle, not {wrong}$"):
            memory_plan.pages(paged, 2, wrong)
    with pytest.raises(OptionError, match="caches are not paged: drop kv_cache_tokens, or build it with --block-size"):
        memory_plan.pages(manifest, 2, 1088)
    linear, same, fewer = (
        memory_plan.plan(each, 2, tokens=tokens) for each, tokens in ((manifest, None), (paged, None), (paged, 100))
    )
    assert same.caches == linear.caches + 32 * (TARGET_ROW + DRAFT_ROW), "the page that is nobody's"
    assert fewer == replace(same, caches=(96 + 32) * (TARGET_ROW + DRAFT_ROW))


def test_what_fits_of_pages(paged):
    free = memory_plan.plan(paged, 4, tokens=320).total
    assert memory_plan.check(paged, 4, free, tokens=320).total == free
    with pytest.raises(OptionError, match="are free: load it with kv_cache_tokens=320, or load") as told:
        memory_plan.check(paged, 4, free)
    assert "batch_size=" in str(told.value)
    with pytest.raises(OptionError, match="are free: load it with kv_cache_tokens=288, or "):
        memory_plan.check(paged, 4, free - 1)
    with pytest.raises(OptionError, match="are free: use a GPU with more memory") as told:
        memory_plan.check(paged, 4, MIB)
    assert "kv_cache_tokens" not in str(told.value)


def test_what_fits(manifest):
    needed = memory_plan.plan(manifest, 4).total
    assert memory_plan.check(manifest, 4, needed).total == needed
    with pytest.raises(
        OptionError, match=r"batch 4 of 1024 tokens takes \d+ MiB, \d+ MiB are free: load it with "
    ) as e:
        memory_plan.check(manifest, 4, memory_plan.plan(manifest, 3).total)
    assert "load it with batch_size=3, or build it with --max-seq-len " in str(e.value)
    length = int(str(e.value).split()[-1])
    assert memory_plan.plan(manifest, 4, length).total <= memory_plan.plan(manifest, 3).total
    assert memory_plan.plan(manifest, 4, length + 64).total > memory_plan.plan(manifest, 3).total


def test_streamed_weights_are_not_on_the_device(manifest):
    needed = memory_plan.plan(manifest, 4).total
    streamed = int(memory_plan.plan(manifest, 1, models=["target"]).weights * 0.75)
    memory_plan.check(manifest, 4, needed - streamed, weights=0.25)
    with pytest.raises(OptionError, match=rf"takes {(needed - streamed) >> 20} MiB, "):
        memory_plan.check(manifest, 4, needed - streamed - 1, weights=0.25)
