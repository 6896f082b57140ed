"""A model around TensorRT's plugin, driven as one in standard operators is: plain decoding's tokens, its own cache."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import attention_oracle
import numpy as np
import onnx_ir as ir
import pytest
from attention_oracle import oracle
from device import HostKernels
from host_device import HostDevice, HostQueue, QueuedModel
from plugin_model import Compute, PluginModel
from small_models import branching, reference
from test_device_loop import prompt_of, request_of, run
from tiny_models import BUCKETS, CAPACITY, CHUNK, SIZES, VOCAB, lower_model

from specbuild.builder.lower import plugin
from specbuild.runtime.backends.executor import ModelSpec, Share
from specbuild.runtime.backends.gpu.device import PageTable
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.gpu.onnxruntime_cuda import OrtModel
from specbuild.runtime.backends.kernels.abi import Dtype, KernelLibrary
from specbuild.runtime.decoding.device.loop import DeviceLoop
from specbuild.runtime.decoding.host_loop import Loop
from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import Tree

HEAD, BOUND = 64, {"rtol": 1e-4, "atol": 1e-4}
REQUESTS: list[tuple[int, dict[str, Any]]] = [
    (3, {}),
    (33, {"temperature": 0.8, "top_p": 0.9}),
    (19, {"temperature": 1.1, "top_k": 12, "repetition_penalty": 1.2}),
    (1, {"repetition_penalty": 1.4, "logit_bias": {3: 1.5}}),
    (12, {"speculation": "off", "temperature": 1.0}),
]


@pytest.fixture(scope="module", autouse=True)
def _in_float32() -> Iterator[None]:
    """A type that the kernel has not, for exact comparisons."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plugin.DTYPES, "fp32", ir.DataType.FLOAT)
        patch.setitem(attention_oracle.NUMPY, Dtype.F32, np.float32)
        yield


@functools.cache
def torch_model(name: str) -> Any:
    """target, or draft: the target with some noise; heads that the kernel has, and a window in one of two layers."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    window = {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]}
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"} | {"hidden_size": 4 * HEAD}
    config = Qwen2Config(**sizes, **window, initializer_range=0.08)
    model = Qwen2ForCausalLM(config).eval()
    if name == "draft":
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.01 * torch.randn_like(weight)
    return model


@functools.cache
def lowered(name: str, precision: str, page_rows: int = 0) -> ir.Model:
    """The graph with the plugin; "fp16, fp8": in float16 over caches in E4M3."""
    from specbuild.builder.frontend.attention_layout import probe
    from specbuild.builder.frontend.export import export
    from specbuild.builder.passes import run_portable
    from specbuild.builder.quantize.fp8_caches import calibrate

    model = torch_model(name)
    graph = export(model, probe(model.config, CAPACITY), CAPACITY, CAPACITY)
    run_portable(graph)
    precision, _, fp8 = precision.partition(", ")
    return plugin.lower(graph, precision, CAPACITY, calibrate(model, [prompt_of(9, 40)]) if fp8 else None, page_rows)


def spec(name: str) -> ModelSpec:
    return ModelSpec(name, 2, 2, HEAD, VOCAB, CAPACITY, BUCKETS[-1], (0, 7))


def made(
    name: str,
    device: HostDevice,
    batch_size: int,
    precision: str = "fp32",
    tree_nodes: int = 64,
    by: Compute = oracle,
    pages: PageTable | None = None,
) -> StandardExecutor:
    """The model's executor, on a stream of its own."""
    graph = lowered(name, precision, pages.pages.rows if pages else 0)
    model = PluginModel(graph, spec(name), device, batch_size, BUCKETS, CHUNK, tree_nodes, by, pages)
    return StandardExecutor(device, QueuedModel(model, device), device.stream())


def loop_of(host: KernelLibrary, batch_size: int, **more: Any) -> DeviceLoop:
    device = HostDevice()
    executors = [made(name, device, batch_size, **more) for name in ("target", "draft")]
    return DeviceLoop(*executors, HostQueue(host, device), frozenset(), "model")


def requests(tree: str, count: int = len(REQUESTS)) -> list[Sequence]:
    return [
        request_of(prompt_of(i, length), **{"speculation": tree, "max_new_tokens": 6 + i, "seed": i} | fields)
        for i, (length, fields) in enumerate(REQUESTS[:count])
    ]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The requests' tokens by plain decoding of the same model in standard operators, one by one."""
    path, device = tmp_path_factory.mktemp("standard") / "target.onnx", HostDevice()
    ir.save(lower_model(torch_model("target"), CAPACITY), path)
    stream = device.stream()
    model = QueuedModel(OrtModel(path, spec("target"), device, 1, BUCKETS, CHUNK, "cpu", stream), device)
    loop = Loop(StandardExecutor(device, model, stream), None, CHUNK, frozenset())
    return [s.output for s in run(loop, requests("off"))]


@pytest.mark.parametrize("tree", ["chain:4", "topk:2,3", "best:7"])
def test_tokens_are_plain_decodings(host: KernelLibrary, expected: list[list[int]], tree: str) -> None:
    """Prompts of many lengths join and leave, greedy and sampled, one without speculation."""
    done = run(loop_of(host, 2), requests(tree))
    assert [s.output for s in done] == expected
    assert sum(s.metrics.speculative_decoding.num_accepted_draft_tokens for s in done) > 5
    assert all(s.metrics.speculative_decoding.num_spec_steps for s in done if s.tree)


def test_the_kernel_in_its_own_type(host: KernelLibrary, host_kernels: HostKernels) -> None:
    """The compiled kernel in float16, every tensor in the device's memory: as plain decoding through it."""
    by: Compute = functools.partial(attention_oracle.run, host_kernels)  # type: ignore[assignment]
    target = made("target", HostDevice(), 1, "fp16", by=by)
    plain = [s.output for s in run(Loop(target, None, CHUNK, frozenset()), requests("off", 2))]
    done = run(loop_of(host, 2, precision="fp16", by=by), requests("topk:2,3", 2))
    assert [s.output for s in done] == plain
    assert sum(s.metrics.speculative_decoding.num_accepted_draft_tokens for s in done) > 2


def test_the_kernel_over_fp8_caches(host: KernelLibrary, host_kernels: HostKernels) -> None:
    """Rows of bytes: drafted, committed, moved up, erased and read again, as plain decoding through them."""
    by: Compute = functools.partial(attention_oracle.run, host_kernels)  # type: ignore[assignment]
    target = made("target", HostDevice(), 1, "fp16, fp8", by=by)
    assert target.model.cache.dtype == np.uint8
    plain = [s.output for s in run(Loop(target, None, CHUNK, frozenset()), requests("off", 3))]
    loop = loop_of(host, 2, precision="fp16, fp8", by=by)
    done = run(loop, requests("topk:2,3", 3))
    assert [s.output for s in done] == plain
    assert sum(s.metrics.speculative_decoding.num_accepted_draft_tokens for s in done) > 2
    own = made("target", HostDevice(), 1, "fp16", by=by)
    assert own.model.cache.nbytes == 2 * target.model.cache.nbytes


def test_a_fault_ends_its_sequence_alone(
    host: KernelLibrary, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin reports none; who checks the tree for it does."""
    loop, batch = loop_of(host, 2), requests("chain:3", 2)
    propose = loop._propose

    def wrong(sequences: list[Sequence]) -> list[Tree | None]:
        trees = propose(sequences)
        for at, sequence in enumerate(sequences):
            if sequence is batch[0] and len(sequence.output) > 2:
                trees[at] = Tree([sequence.tokens[-1], 5, 6], [-1, 2, 0], [0, 1, 1])
        return trees

    monkeypatch.setattr(loop, "_propose", wrong)
    run(loop, batch)
    assert "fault PARENT" in str(batch[0].error)
    assert batch[0].output == expected[0][: len(batch[0].output)]
    assert batch[1].output == expected[1]


def test_a_plan_with_small_trees_drafts_none_that_are_larger(host: KernelLibrary, expected: list[list[int]]) -> None:
    """best:7 may run 42 nodes in the draft, and such a model takes 16."""
    loop = loop_of(host, 2, tree_nodes=BUCKETS[-1])
    done = run(loop, [*requests("best:7", 1), *requests("chain:4", 2)[1:]])
    assert [s.output for s in done] == expected[:2]
    drafted = [s.metrics.speculative_decoding.num_spec_steps for s in done]
    assert drafted[0] == 0 < drafted[1]


def test_the_executor_reads_prompts_and_leaves_other_slots_alone() -> None:
    """Short chunks together, long ones alone, a step of one node; whoever has no share keeps every row."""
    model, texts = torch_model("target"), [prompt_of(slot, 40) for slot in range(3)]
    target = made("target", HostDevice(), 3)
    target.step([chain(1, texts[1][:5], 0, 1)])
    cache = target.device.array(target.model.cache)
    kept = cache[:, 1].copy()
    assert kept[:, :, :5].any()
    first = target.step([chain(0, texts[0][:CHUNK], 0, 1), chain(2, texts[2][:20], 0, 0)])
    np.testing.assert_array_equal(cache[:, 1], kept)
    assert not cache[:, 2, :, 20:].any()
    assert [len(rows) for rows in first] == [1, 0]
    np.testing.assert_allclose(first[0], reference(model, texts[0][:CHUNK])[-1:], **BOUND)
    second = target.step([chain(2, texts[2][20:36], 20, 3), chain(1, texts[1][5:6], 5, 1)])
    np.testing.assert_allclose(second[0], reference(model, texts[2][:36])[-3:], **BOUND)
    np.testing.assert_allclose(second[1], reference(model, texts[1][:6])[-1:], **BOUND)
    assert target.model.steps == [8, CHUNK, 20, 16]


def chain(slot: int, tokens: list[int], start: int, logits: int, visible: Any = None, apart: int = 1) -> Share:
    positions = range(start, start + len(tokens) * apart, apart) if apart else [start] * len(tokens)
    return Share(slot, start, start, tokens, positions, visible, logits)


def test_trees_from_the_host() -> None:
    """In two steps, the second one's nodes below those of the first."""
    model, text, tree = torch_model("target"), prompt_of(3, 9), branching(2, 12)
    target = made("target", HostDevice(), 2)
    target.step([chain(1, text, 0, 1)])
    got = list[Any]()
    for first, end in ((0, 5), (5, 12)):
        positions = [len(text) + depth for depth in tree.depths[first:end]]
        visible = tree.ancestors()[first:end, :end]
        share = Share(1, len(text) + first, len(text), tree.tokens[first:end], positions, visible, end - first)
        got += list(target.step([share])[0].copy())
    for node, logits in enumerate(got):
        path = [tree.tokens[0], *tree.path(node)]
        np.testing.assert_allclose(logits, reference(model, [*text, *path])[-1], **BOUND)
    with pytest.raises(ExecutionError, match="the tree has more than 64 nodes: ask for a smaller one"):
        target.step([Share(1, 80, 9, [1] * 8, [9] * 8, np.ones((8, 79), dtype=np.bool_), 8)])
