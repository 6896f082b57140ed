"""Decoding over paged caches gives plain decoding's tokens: with fewer pages than all slots could have, and shared."""

import functools
import threading

import attention_oracle
import numpy as np
import pytest
from attention_oracle import oracle
from device_requests import again, prompt_of, request_of, run
from host_device import HostDevice, HostQueue
from plugin_executors import made, requests
from tiny_models import CAPACITY, CHUNK, TEXT

from specbuild.runtime.backends.tensorrt.pages import PageTable
from specbuild.runtime.decoding.device.loop import DeviceLoop
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.engine.scheduler import Scheduler
from specbuild.runtime.errors import ExecutionError, OptionError

ROWS, EVERY = 16, CAPACITY // 16  # of a page; pages of a whole slot
LONG = prompt_of(4, 50)
pytestmark = pytest.mark.slow


class Paged:
    """A loop over paged caches, and what is written where: of the target no row by two, and no page that two have."""

    def __init__(self, host, slots, pages, ahead=0, **more):
        """`more`: of `made`, and `names` of the models."""
        self.device = HostDevice()
        self.pages, by = PageTable(self.device, slots, CAPACITY, ROWS, pages), more.pop("by", oracle)
        names = more.pop("names", ("target", "draft"))
        self.target, draft = (
            made(name, self.device, slots, by=functools.partial(self.compute, at == 0, by), pages=self.pages, **more)
            for at, name in enumerate(names)
        )
        queue = HostQueue(host, self.device)
        self.loop = DeviceLoop(self.target, draft, queue, frozenset(), False, ahead=ahead)
        self.shared = 0

    def compute(self, target, by, case):
        assert case.page_table is not None
        assert case.counts is not None
        assert case.tree_offset is not None
        written = set[tuple[int, int]]()
        for table, start, offset, count in zip(
            case.page_table, case.cache_len, case.tree_offset, case.counts, strict=True
        ):
            for row in range(start + offset, start + offset + count) if target else ():
                page = int(table[row // ROWS])
                assert self.owners(page) == 1, f"page {page} is written, and {self.owners(page)} have it"
                assert (page, row % ROWS) not in written
                written.add((page, row % ROWS))
        self.shared = max(self.shared, *map(self.owners, range(1, self.pages.count + 1)))
        return by(case)

    def owners(self, page):
        """How many slots have a page."""
        return sum(page in slot for slot in self.pages.of)

    def begin(self, sequence, *free):
        """Put a sequence into one of these slots, as if it could have one."""
        assert self.pick(sequence, free)
        return sequence

    def pick(self, sequence, free):
        """Whether a sequence gets one of these slots; asked once, for the slot then has its pages."""
        slot = self.loop.admission.pick(sequence, free)
        if slot is not None:
            sequence.slot = slot
        return slot is not None

    def finish(self, *sequences):
        while active := [s for s in sequences if not s.finish_reason]:
            self.loop.round(active)


def plain(*done):
    """The same requests one by one, without speculation, over a linear cache."""
    loop = HostLoop(made("target", HostDevice(), 1), Proposer(looks_up=False), CHUNK, frozenset())
    return [s.output for s in run(loop, [again(s, speculation="off") for s in done])]


def check_plain(*done):
    assert [(s.error, s.output) for s in done] == [(None, output) for output in plain(*done)]


@pytest.mark.soak(only=("6-best:7-0", "14-chain:4-0", "14-chain:4-32", "14-best:7-0"))
@pytest.mark.nightly
@pytest.mark.parametrize("ahead", [0, 32])
@pytest.mark.parametrize("tree", ["chain:4", "best:7"])
@pytest.mark.parametrize("pages", [6, 2 * EVERY])
def test_tokens_are_plain_decodings(host, tree, pages, ahead):
    """With six pages hardly two requests fit at once; they are started in turn."""
    paged = Paged(host, 3, pages, ahead)
    done = run(paged.loop, requests(tree))
    check_plain(*done)
    assert sum(s.metrics.speculative_decoding.num_accepted_draft_tokens for s in done) > 5
    linear = made("target", HostDevice(), 3).model.tensors.cache.nbytes
    assert paged.target.cache_bytes == linear * (1 + pages) // (3 * EVERY)


@pytest.mark.nightly
def test_rounds_by_themselves_end_where_the_pages_do(host):
    """A perfect draft, and a device as far ahead as it may be: past the text's end, and not past its pages."""
    paged = Paged(host, 2, EVERY, 32, names=("target", "target"))
    paged.device.ahead = 99
    check_plain(*run(paged.loop, [request_of(prompt_of(2, 6), speculation="chain:4", max_new_tokens=18)]))
    assert paged.device.turns > 1


@pytest.mark.nightly
@pytest.mark.parametrize("tree", ["chain:4", "topk:2,3", "off"])
def test_prefixes_are_shared_by_page(host, tree):
    """Of a long text, while it is decoded, by those that begin as it does, in whole pages and not."""
    paged = Paged(host, 4, 12)
    first, *others = (
        request_of(prompt, speculation=tree, max_new_tokens=8 if at else 20, seed=at, temperature=at % 2)
        for at, prompt in enumerate([LONG, [*LONG, 5], [*LONG[:40], 7, 8], LONG, prompt_of(5, 3), LONG[:33]])
    )
    paged.begin(first, 0, 1, 2, 3)
    while not first.output:
        paged.loop.round([first])
    batch, waiting, free = [first], list(others), [1, 2, 3]
    while batch or waiting:
        while waiting and free and paged.pick(waiting[0], free):
            batch.append(waiting.pop(0))
            free.remove(batch[-1].slot)
        paged.loop.round(batch)
        for sequence in [s for s in batch if s.finish_reason]:
            paged.loop.release(sequence.slot)
            free.append(sequence.slot)
            batch.remove(sequence)
    check_plain(first, *others)
    cached = [s.metrics.num_cached_tokens for s in others]
    assert cached[:2] == [48, 32]  # of 50 and 40 rows that are there: a page is shared whole
    assert cached[2] >= 48
    assert cached[4] == 32
    assert paged.shared >= 3


def test_salts_share_no_pages(host):
    """While the first text is decoded, and in the pages that it has left; within a salt they are shared."""
    paged, salts = Paged(host, 3, 3 * EVERY), ("a", "b", None, "a")
    *batch, last = (
        request_of([*LONG, *[5] * at], speculation="chain:4", max_new_tokens=5, cache_salt=salt)
        for at, salt in enumerate(salts)
    )
    paged.begin(batch[0], 0)
    while not batch[0].output:
        paged.loop.round([batch[0]])
    for slot in (1, 2):
        paged.begin(batch[slot], slot)
    paged.finish(*batch)
    assert paged.shared == 1
    for sequence in batch:
        paged.loop.release(sequence.slot)
    run(paged.loop, [last])
    assert [s.metrics.num_cached_tokens for s in (*batch, last)] == [0, 0, 0, 50]
    check_plain(*batch, last)


def test_a_text_that_lost_pages_is_read_from_what_is_left(host):
    """Four pages were kept of it; the other text takes three that are free, and two of them."""
    paged, asked = Paged(host, 2, EVERY), {"speculation": "chain:4", "max_new_tokens": 6}
    (first,) = run(paged.loop, [request_of(LONG, **asked)])
    other = paged.begin(request_of(prompt_of(6, 60), **asked), 1 - first.slot)
    paged.finish(other)
    paged.loop.release(other.slot)
    (second,) = run(paged.loop, [again(first)])
    assert second.metrics.num_cached_tokens == 32
    assert second.output == first.output


@pytest.mark.soak(only=("",))
@pytest.mark.nightly
@pytest.mark.parametrize("fp8", ["", ", fp8"])
def test_the_kernel_over_pages(host, host_kernels, fp8):
    """The compiled kernels in float16, pages of bytes with FP8: as plain decoding through them, over a linear cache."""
    by = functools.partial(attention_oracle.run, host_kernels)
    target = made("target", HostDevice(), 1, "fp16" + fp8, by=by)
    wanted = [
        s.output for s in run(HostLoop(target, Proposer(looks_up=False), CHUNK, frozenset()), requests("off")[:3])
    ]
    paged = Paged(host, 2, 7, precision="fp16" + fp8, by=by)
    done = run(paged.loop, requests("topk:2,3")[:3])
    assert [s.output for s in done] == wanted
    assert sum(s.metrics.speculative_decoding.num_accepted_draft_tokens for s in done) > 2
    assert paged.target.cache_bytes == target.cache_bytes * 8 // EVERY


def test_nothing_of_a_sequence_that_failed_is_left(host):
    """Its neighbour has two of its pages, and goes on; the next one gets the others, without NaN."""
    paged, spoiled = Paged(host, 2, 11), list[int]()
    first, second, third = (
        request_of(prompt, speculation="chain:3", max_new_tokens=12, seed=at)
        for at, prompt in enumerate([LONG, [*LONG[:40], 7], prompt_of(6, 20)])
    )
    paged.begin(first, 0, 1)
    while len(first.output) < 2:
        paged.loop.round([first])
    paged.begin(second, 1 - first.slot)
    assert second.metrics.num_cached_tokens == 32
    executors = paged.target, paged.loop.draft_executor

    def spoil(nodes):
        if not spoiled and len(second.output) > 1:
            spoiled.extend(page for page in paged.pages.of[first.slot] if page not in paged.pages.of[second.slot])
            slots, vocab = paged.target.batch_size, paged.target.spec.vocab_size
            logits = paged.device.array(paged.target.model.tensors.logits).ravel()[: slots * nodes * vocab]
            logits.reshape(slots, nodes, vocab)[first.slot] = np.nan
            for executor in executors:
                paged.device.array(executor.model.tensors.cache)[:, spoiled] = np.nan

    paged.target.model.spoil = spoil
    while not first.finish_reason:
        paged.loop.round([first, second])
    assert (type(first.error), len(spoiled)) == (ExecutionError, 3)
    paged.loop.release(first.slot)
    paged.begin(third, first.slot)
    assert {*spoiled} <= {*paged.pages.of[first.slot]}
    paged.finish(second, third)
    check_plain(second, third)
    for executor in executors:
        assert np.isfinite(paged.device.array(executor.model.tensors.cache)).all()


def test_a_queue_in_turn(host):
    """Through the scheduler: whoever has too few pages waits, and so do those behind it; one goes before it began."""
    longest = request_of(LONG, speculation="chain:4", max_new_tokens=30)
    scheduler, asked = Scheduler(Paged(host, 3, EVERY).loop, 3, 16), [longest, *requests("chain:4")]
    try:
        ended = [threading.Event() for _ in asked]
        handles = [scheduler.submit(s, event.set) for s, event in zip(asked, ended, strict=True)]
        handles[2].cancel()
        for event in ended:
            assert event.wait(300)
        results = [handle.result() for handle in handles]
    finally:
        scheduler.close()
    del asked[2], results[2]
    assert [result.token_ids for result in results] == plain(*asked)
    starts = [s.metrics.started or 0.0 for s in asked]
    assert starts == sorted(starts)


def test_what_never_fits_is_refused(host):
    paged = Paged(host, 2, 4)
    paged.loop.check(request_of(LONG, speculation="chain:4", max_new_tokens=6))
    with pytest.raises(OptionError, match="the text may take 66 rows, the caches have 64: give a shorter"):
        paged.loop.check(request_of(LONG, speculation="chain:4", max_new_tokens=8))
    with pytest.raises(OptionError, match="the text may take 65 rows, the caches have 64: give a shorter"):
        paged.loop.logits(prompt_of(1, 65))
    linear = DeviceLoop(made("target", HostDevice(), 1), None, HostQueue(host, HostDevice()), frozenset())
    linear.check(request_of(LONG, speculation="off", max_new_tokens=TEXT))


def test_logits_for_measuring_are_a_linear_cache_s(host):
    linear = HostLoop(made("target", HostDevice(), 1), Proposer(looks_up=False), CHUNK, frozenset())
    paged = Paged(host, 1, EVERY)
    for _ in range(2):
        found, wanted = (each.logits(LONG, 9, 16) for each in (paged.loop, linear))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
