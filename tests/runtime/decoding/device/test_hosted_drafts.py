"""Drafts whose trees the host grows, from models on a device: what they propose, and plain decoding's tokens."""

from __future__ import annotations

import functools
from dataclasses import replace

import onnx_ir as ir
import pytest
from device_requests import prompt_of, request_of, run
from host_device import HostDevice, HostQueue, QueuedModel
from plugin_executors import HEAD, torch_model
from plugin_model import PluginModel
from small_models import head_chain, parallel_chain, random_head
from tiny_models import BUCKETS, CAPACITY, CHUNK, TEXT, VOCAB

from specbuild.builder.frontend.attention_layout import Layout, probe
from specbuild.builder.frontend.export import export
from specbuild.builder.frontend.hidden_state_taps import Taps
from specbuild.builder.frontend.logits_file import LOWEST
from specbuild.builder.lower import plugin, standard
from specbuild.builder.passes import run_portable
from specbuild.builder.passes.spread_logits import spread_logits
from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.onnxruntime_cuda.model import OrtModel, RunContext
from specbuild.runtime.backends.tensorrt.pages import PageTable
from specbuild.runtime.decoding.device.loop import DeviceLoop
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.drafting.eagle3 import EagleDrafter
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.drafting.pard import PardDrafter
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.tree import Tree

KNOWN, PLACES, MASK, WIDTH = list(range(0, VOCAB, 2)), (0, 1), VOCAB - 1, 4 * HEAD
REQUESTS = [
    (3, {}),
    (33, {"temperature": 0.8, "top_p": 0.9}),
    (1, {}),
    (60, {"max_new_tokens": TEXT - 60}),  # to the cache's end
    (12, {"speculation": "off", "temperature": 1.0}),
    (36, {"repetition_penalty": 1.4}),
]


@functools.cache
def head():
    made = random_head(torch_model("target").config, KNOWN)
    assert made.config.taps == list(PLACES)
    made.embed_tokens.weight.data.copy_(torch_model("target").get_input_embeddings().weight)
    return made


def lower_with(lowering, name, page_rows):
    """target: with taps; head; draft: whose last token is the mask."""
    model = head() if name == "head" else torch_model(name)
    layout = Layout.alike(2, HEAD, (0,)) if name == "head" else probe(model.config, CAPACITY)
    taps = Taps(PLACES, head().fc) if name == "target" else None
    graph = export(model, layout, CAPACITY, CAPACITY, taps)
    run_portable(graph)
    if name == "head":
        spread_logits(graph.graph, KNOWN, VOCAB, LOWEST)
    paged = (None, page_rows) if lowering is plugin else ()
    lowered = lowering.lower(graph, "fp32", CAPACITY, *paged)
    return lowered


@pytest.fixture(scope="module")
def loops(host, tmp_path_factory):
    """`loops(lowering, kind)`: a loop of two slots, and what its drafter proposes: to whom, after which text."""
    lowered = functools.cache(lower_with)

    def executor(lowering, name, device, pages):
        layers, windows = (1, (0,)) if name == "head" else (2, (0, 7))
        hidden = WIDTH if name != "draft" else 0
        sizes = layers, 2, HEAD, VOCAB, CAPACITY, BUCKETS[-1], windows
        spec = ModelSpec(name, *sizes, hidden=hidden, reads_hidden=name == "head")
        stream, graph = device.stream(), lowered(lowering, name, pages.rows if pages else 0)
        if lowering is plugin:
            model = PluginModel(graph, spec, device, 2, BUCKETS, CHUNK, pages=pages)
        else:
            path = tmp_path_factory.mktemp(name) / "model.onnx"
            ir.save(graph, path)
            model = OrtModel(path, spec, RunContext(device, stream, "cpu", 2, BUCKETS, CHUNK))
        return StandardExecutor(device, QueuedModel(model, device), stream)

    def make(lowering, kind, ahead=0, rows=0):
        device = HostDevice()
        pages = PageTable(device, 2, CAPACITY, rows, 2 * CAPACITY // rows) if rows else None
        target = executor(lowering, "target", device, pages)
        draft = executor(lowering, "head" if kind == "eagle3" else "draft", device, pages)
        drafter: ModelDrafter
        if kind == "eagle3":
            drafter = EagleDrafter(draft, BUCKETS[-1], target)
        else:
            drafter = PardDrafter(draft, BUCKETS[-1], MASK)
        loop = DeviceLoop(target, None, HostQueue(host, device), frozenset(), False, drafter, ahead=ahead)
        proposer, seen = loop.proposer, list[tuple[Sequence, list[int], Tree]]()
        grow = proposer.grow

        def grow_noted(plan, indices):
            proposals = grow(plan, indices)
            drafted = [at for at in indices if plan.proposals[at].shape]
            seen.extend((plan.sequences[at], list(plan.sequences[at].tokens), proposals[at].tree) for at in drafted)
            return proposals

        proposer.grow = grow_noted
        return loop, seen

    return make


def requests(tree):
    prompts = [prompt_of(i, length) for i, (length, _) in enumerate(REQUESTS)]
    prompts[-1][:33] = prompts[1]  # which finds its beginning in a cache
    return [
        request_of(prompt, **{"speculation": tree, "max_new_tokens": 6 + i, "seed": i} | fields)
        for i, (prompt, (_, fields)) in enumerate(zip(prompts, REQUESTS, strict=True))
    ]


@pytest.fixture(scope="module")
def expected(loops):
    target = loops(standard, "parallel")[0].target
    return [s.output for s in run(HostLoop(target, Proposer(looks_up=False), CHUNK, frozenset()), requests("off"))]


@functools.cache
def chain_of(kind):
    if kind == "eagle3":
        return head_chain(torch_model("target"), head(), KNOWN)
    return parallel_chain(torch_model("draft"), MASK)


def truth(loop, expected):
    """Let every other tree be what will be emitted, so that long paths are accepted."""
    proposer = loop.proposer
    grow, rounds = proposer.grow, [0]

    def grow_truth(plan, indices):
        rounds[0] += 1
        proposals = grow(plan, indices)
        for at, (s, proposal) in enumerate(zip(plan.sequences, proposals, strict=True)):
            ahead = expected[s.params.seed or 0][len(s.output) :][: len(proposal.tree) - 1]
            if ahead and (rounds[0] + at) % 2:
                proposals[at] = replace(proposal, tree=Tree.chain([s.tokens[-1], *ahead]))
        return proposals

    proposer.grow = grow_truth


@pytest.mark.nightly(but=("rounds ahead",))
@pytest.mark.slow
@pytest.mark.parametrize(
    ("lowering", "kind", "more"),
    [
        (standard, "eagle3", {}),
        (plugin, "parallel", {}),
        (plugin, "eagle3", {"rows": 16}),
        (standard, "parallel", {"ahead": 32}),
    ],
    ids=["standard", "plugin", "pages", "rounds ahead"],
)
def test_chains_are_what_the_draft_says(loops, lowering, kind, more, expected):
    """A resident loop needs the host for every tree, and says so."""
    loop, seen = loops(lowering, kind, **more)
    truth(loop, expected)
    done = run(loop, requests("chain:3"))
    assert [s.output for s in done] == expected
    assert any(len(s.metrics.speculative_decoding.acceptance_histogram) > 3 for s in done)  # all three came true
    greedy = [(text, tree.tokens[1:]) for s, text, tree in seen if s.params.seed in (0, 2, 3) and len(tree) > 1]
    assert len(greedy) > 14
    for text, tokens in greedy[::3]:
        assert tokens == chain_of(kind)(text, len(tokens)), text
    alone = "rounds do not follow each other: the host grows this draft's trees"
    assert loop.notes == ([alone] if "ahead" in more else [])


@pytest.mark.nightly
def test_trees_are_the_same_in_both_lowerings(loops, expected):
    found = []
    for lowering in (standard, plugin):
        loop, seen = loops(lowering, "eagle3")
        assert [s.output for s in run(loop, requests("best:7"))] == expected
        found.append([(s.params.seed, text, grown.tokens, grown.parents) for s, text, grown in seen])
    assert found[0] == found[1]
    assert max(len(tokens) for _, _, tokens, _ in found[0]) > 4
