"""One seed, one text on a device whose kernels compute otherwise for every number of nodes in a step."""

import random

import pytest
from device_requests import prompt_of, request_of, run
from host_device import HostDevice, HostQueue
from shaped_model import executor
from tiny_models import BUCKETS

from specbuild.runtime.backends.exactness import ExactnessClass
from specbuild.runtime.decoding.device.loop import DeviceLoop
from specbuild.runtime.decoding.loop import DEFAULTS, LoopOptions
from specbuild.runtime.requests.sequence import Sequence

BATCH, COUNT = 2, 6
PROCESSORS = [
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 12, "repetition_penalty": 1.2},
    {"frequency_penalty": 0.6, "temperature": 0.9},
]


def kept_to(nodes, prefix_caching=True):
    return LoopOptions(prefix_caching=prefix_caching, exactness=ExactnessClass(BATCH * nodes, nodes))


PROMPTS = [prompt_of(i // 2, 3 + 15 * (i // 2)) + prompt_of(90 + i, 2 * (i % 2)) for i in range(COUNT)]


def requests(tree, texts):
    return [
        request_of(text, speculation=tree, seed=i, max_new_tokens=9 + i, **PROCESSORS[i % len(PROCESSORS)])
        for i, text in enumerate(texts)
    ]


def decode(host, tree, options, order, **how):
    """Two turns of every text, and how many drafted tokens were accepted; `order`: its seed, None: one by one."""
    device, ahead = HostDevice(), how.get("ahead", 0)
    target = executor("target", device, BATCH, planted=0.2)
    draft = executor("draft", device, BATCH, planted=0.0, error=0.1) if how.get("drafts", True) else None
    queue = HostQueue(host, device)
    loop = DeviceLoop(target, draft, queue, frozenset(), how.get("looks_up", False), options=options, ahead=ahead)
    texts, asked = [PROMPTS], list[Sequence]()
    for turn in range(2):
        wanted = requests(tree, texts[-1])
        mixed = random.Random(order).sample(wanted, COUNT)[:: -1 if turn else 1]  # who was last is there yet
        for each in [[one] for one in wanted] if order is None else [mixed]:
            run(loop, each)
        texts.append([[*each.tokens, 1] for each in wanted])
        asked += wanted
    assert not any(each.error for each in asked)
    assert bool(device.turns) == bool(ahead)  # of rounds that follow each other
    accepted = sum(each.metrics.speculative_decoding.num_accepted_draft_tokens for each in asked)
    return [each.output for each in asked], accepted


@pytest.fixture(scope="module")
def expected(host):
    """Plain decoding, one after another, no prefix kept, by the nodes of a step."""
    return {nodes: decode(host, "off", kept_to(nodes, False), None)[0] for nodes in (8, BUCKETS[-1])}


@pytest.mark.soak(only=("chain:1-16", "chain:4-16", "off-16", "topk:2,3-8", "topk:2,3-16", "best:7-8", "best:7-16"))
@pytest.mark.nightly(but=("chain:4-8",))
@pytest.mark.slow
@pytest.mark.parametrize("nodes", [8, BUCKETS[-1]])
@pytest.mark.parametrize("tree", ["off", "chain:1", "chain:4", "topk:2,3", "best:7"])
def test_no_text_differs(host, expected, tree, nodes):
    """In batches, in any order, with prefixes that others have left: every other prompt begins as the one before."""
    texts, accepted = decode(host, tree, kept_to(nodes), 0)
    assert texts == expected[nodes]
    assert (accepted > 5) == (tree != "off")


@pytest.mark.nightly(but=("lookup",))
@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{"ahead": 8}, {"ahead": 8, "tree": "off"}, {"drafts": False, "looks_up": True}, {"looks_up": True}],
    ids=["resident", "resident without drafts", "lookup", "both drafters"],
)
def test_whoever_drafts(host, expected, how):
    how = {"tree": "chain:3"} | how
    assert decode(host, options=kept_to(8), order=0, **how)[0] == expected[8]


@pytest.mark.slow
def test_what_was_planted_turns_texts(host, expected):
    """Without a class they differ, and so do those of two classes."""
    assert decode(host, "chain:4", DEFAULTS, 0)[0] != decode(host, "off", DEFAULTS, None)[0]
    assert expected[8] != expected[BUCKETS[-1]]
