"""The loop: for every tree, drafter, batch and processor the tokens of plain decoding, whose logits are a hash."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.decoding.host_loop import LEAST, PACE, PACE_OF_ALL, HostLoop
from specbuild.runtime.decoding.loop import LoopOptions
from specbuild.runtime.drafting.lookup_first import LookupDrafter
from specbuild.runtime.drafting.model import Drafter, ModelDrafter
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.live import LiveTimings
from specbuild.runtime.speculation.timings import TimingTable

VOCAB = 12
CHUNK = 8
TREES = ["off", "chain:1", "chain:4", "topk:1,3", "topk:2,3", "topk:4,4", "topk:3,1", "best:1", "best:5", "best:16"]
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.95},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    {"temperature": 1.0, "frequency_penalty": 0.6, "logit_bias": {3: 2.0, 5: -100.0}},
]


def run(loop: HostLoop, waiting: list[Sequence]) -> None:
    """As the engine does: a freed slot takes the next sequence."""
    waiting, active, free = list(waiting), list[Sequence](), list(range(loop.target.batch_size))
    while waiting or active:
        while waiting and free:
            active.append(waiting.pop(0))
            active[-1].slot = loop.pick(active[-1], free)
            free.remove(active[-1].slot)
        before = [(s.pending, len(s.output)) for s in active]
        loop.round(active)
        for sequence, (pending, count) in zip(active, before, strict=True):
            assert len(sequence.output) > count or sequence.pending <= pending - CHUNK
            if sequence.finish_reason:
                loop.release(sequence.slot)
                free.append(sequence.slot)
        active = [s for s in active if not s.finish_reason]


def drafter_of(name: str, executor: Any) -> Drafter | None:
    if name == "none":
        return None
    if name == "ngram":
        return LookupDrafter()
    model = ModelDrafter(executor, CHUNK)
    return model if name == "model" else LookupDrafter(model)


@pytest.mark.parametrize("drafter", ["none", "model", "ngram", "mixed"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("order", [0, 2])
def test_tokens_are_those_of_plain_decoding(
    hash_model: Any,
    hash_executor: Any,
    request_of: Any,
    drafter: str,
    batch_size: int,
    order: int,
    plain: Any,
) -> None:
    target, draft = hash_model(1, order=order), hash_model(1, error=0.3, order=order)  # of two tokens: it loops
    proposing = drafter_of(drafter, hash_executor(draft, batch_size))
    loop = HostLoop(hash_executor(target, batch_size), proposing, CHUNK, frozenset())
    requests = []
    for index, (tree, params) in enumerate((t, p) for t in TREES for p in PARAMS):
        prompt = [(index * 7 + i * i) % VOCAB for i in range(1 + index % 20)]
        chosen = SamplingParams(max_new_tokens=5 + index % 24, speculation=tree, seed=index % 5, **params)
        requests.append(request_of(prompt, chosen, index))
    run(loop, requests)
    for request in requests:
        prompt = request.tokens[: request.metrics.num_prompt_tokens]
        assert request.output == plain(target, prompt, request.params), (request.params, prompt)
        assert request.finish_reason == "length"
        stats = request.metrics.speculative_decoding
        if request.tree is None or drafter == "none":
            assert stats.num_spec_steps == 0
    drafted = [r.metrics.speculative_decoding for r in requests]
    if drafter in ("model", "mixed"):
        assert all(s.num_spec_steps for s, r in zip(drafted, requests, strict=True) if r.tree)
    if drafter != "none" and (order or drafter != "ngram"):
        assert sum(s.num_accepted_draft_tokens for s in drafted) > 50


@settings(deadline=None, max_examples=60)
@given(data=st.data(), seed=st.integers(0, 1000), error=st.floats(0, 2), tree=st.sampled_from(TREES))
def test_tokens_do_not_depend_on_draft_or_batch(
    hash_model: Any,
    hash_executor: Any,
    request_of: Any,
    data: st.DataObject,
    seed: int,
    error: float,
    tree: str,
    plain: Any,
) -> None:
    target, draft = hash_model(seed), hash_model(seed, error)
    eos = frozenset({4})
    loop = HostLoop(hash_executor(target, 2), drafter_of("model", hash_executor(draft, 2)), CHUNK, eos)
    requests = []
    for index in range(data.draw(st.integers(1, 3))):
        prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
        params = SamplingParams(
            max_new_tokens=data.draw(st.integers(1, 20)),
            temperature=data.draw(st.sampled_from([0, 1])),
            speculation=tree,
            seed=seed,
        )
        requests.append(request_of(prompt, params, index))
    run(loop, requests)
    for request in requests:
        prompt = request.tokens[: request.metrics.num_prompt_tokens]
        assert request.output == plain(target, prompt, request.params, eos)
        assert request.finish_reason == ("stop" if request.output[-1] in eos else "length")


@pytest.mark.parametrize("tree", ["off", "chain:4", "topk:2,3"])
def test_end_of_sequence_inside_an_accepted_path(
    hash_model: Any,
    hash_executor: Any,
    request_of: Any,
    tree: str,
    plain: Any,
) -> None:
    model, prompt, params = hash_model(2), [1, 2], SamplingParams(max_new_tokens=40, speculation=tree)
    text = plain(model, prompt, params)
    for at, token in enumerate(text[:12]):
        eos = frozenset({token})
        loop = HostLoop(hash_executor(model), drafter_of("model", hash_executor(model)), CHUNK, eos)
        request = request_of(prompt, params)
        run(loop, [request])
        assert request.output == text[: text.index(token) + 1]
        assert request.finish_reason == "stop"
        ignoring = request_of(prompt, SamplingParams(max_new_tokens=at + 2, speculation=tree, ignore_eos=True))
        run(loop, [ignoring])
        assert (ignoring.output, ignoring.finish_reason) == (text[: at + 2], "length")


@pytest.mark.parametrize("tree", ["off", "chain:4", "topk:2,3", "best:5"])
def test_a_stop_string_inside_an_accepted_path(
    hash_model: Any, hash_executor: Any, request_of: Any, tree: str, plain: Any
) -> None:
    model, prompt = hash_model(2), [1, 2]
    letters = "".join(chr(97 + token) for token in plain(model, prompt, SamplingParams(max_new_tokens=40)))
    for at in range(10):
        stop = letters[at : at + 3]
        params = SamplingParams(max_new_tokens=40, speculation=tree, stop=stop)
        loop = HostLoop(hash_executor(model), drafter_of("model", hash_executor(model)), CHUNK, frozenset())
        request = request_of(prompt, params)
        run(loop, [request])
        assert request.detokenizer.text == letters[: letters.index(stop)]
        assert len(request.output) == letters.index(stop) + 3
        assert request.finish_reason == "stop"


def test_statistics_of_a_perfect_chain(hash_model: Any, hash_executor: Any, request_of: Any) -> None:
    model, params = hash_model(3), SamplingParams(max_new_tokens=26, speculation="chain:4")
    loop = HostLoop(hash_executor(model), drafter_of("model", hash_executor(model)), CHUNK, frozenset())
    request = request_of([1, 2, 3], params)
    run(loop, [request])  # the prompt gives one token, each of 5 rounds 5 more
    stats = request.metrics.speculative_decoding
    assert stats.acceptance_histogram == stats.depth_histogram == [0, 0, 0, 0, 5]
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (5, 20, 20)
    assert stats.mean_acceptance_length == 5
    assert loop.stats.rounds == 6
    assert loop.stats.accept > 0 < loop.stats.commit


def test_run_statistics_count_what_was_emitted(hash_model: Any, hash_executor: Any, request_of: Any) -> None:
    loop = HostLoop(hash_executor(hash_model()), LookupDrafter(), CHUNK, frozenset())
    requests = [request_of([1] * 20, SamplingParams(max_new_tokens=n, speculation="chain:2")) for n in (3, 4)]
    run(loop, requests)
    assert loop.stats.emitted == 7


def test_measuring_logits_is_no_part_of_the_rounds(hash_model: Any, hash_executor: Any, request_of: Any) -> None:
    model = hash_model()
    target = hash_executor(model)  # counts a second for each step
    loop = HostLoop(target, None, CHUNK, frozenset())
    text = [1, 2, 3] * 6
    assert loop.logits(text).tolist() == [model(text).tolist()]
    wanted = [model(text[:end]).tolist() for end in range(13, 19)]
    for nodes in (None, 1, 4):
        target.seconds = 0.0
        assert loop.logits(text, 6, nodes).tolist() == wanted
    run(loop, [request_of([1, 2], SamplingParams(max_new_tokens=4, speculation="off"))])
    assert loop.stats.rounds == 4
    assert loop.stats.verify == 4.0


def test_the_last_token_and_the_prompt_are_not_drafted_for(request_of: Any) -> None:
    request = request_of([1, 2, 3], SamplingParams(max_new_tokens=3, speculation="chain:4"))
    assert not request.drafts  # the prompt is not read yet
    request.cached = 2
    assert request.drafts
    for token in (4, 5):
        request.emit(token, frozenset())
        request.cached += 1
    assert not request.drafts
    assert request.history.tolist() == request.tokens == [1, 2, 3, 4, 5]
    assert not request_of([1], SamplingParams(speculation="off")).drafts


SYSTEM = [5, 1, 4, 2, 8, 5, 7, 1, 9, 3, 6, 0, 2, 2, 1, 7]


@pytest.mark.parametrize("drafter", ["none", "model", "ngram", "mixed"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_prompts_are_read_from_where_a_cache_has_them(
    hash_model: Any,
    hash_executor: Any,
    request_of: Any,
    drafter: str,
    batch_size: int,
    plain: Any,
) -> None:
    """Texts that are continued, and texts with a common beginning: the same tokens, and fewer rounds."""
    model, previous, requests = hash_model(1), list[int](), list[Sequence]()
    target, proposing = hash_executor(model, batch_size), drafter_of(drafter, hash_executor(model, batch_size))
    loop = HostLoop(target, proposing, CHUNK, frozenset())
    for index in range(12):
        prompt = [*previous, 3] if index % 3 == 2 else [*SYSTEM[: 16 - index], index]
        params = SamplingParams(max_new_tokens=6, speculation="topk:2,3", seed=index, temperature=index % 2)
        requests.append(request_of(prompt, params, index))
        beside = [request_of(SYSTEM, params) for _ in range(batch_size - 1)] if index % 4 == 3 else []
        run(loop, [requests[-1], *beside])
        assert requests[-1].output == plain(model, prompt, params)
        assert all(other.output == plain(model, SYSTEM, params) for other in beside)
        previous = requests[-1].tokens
    for index, request in list(enumerate(requests))[1:]:
        common = request.metrics.num_prompt_tokens - 2 if index % 3 == 2 else 16 - index
        assert request.metrics.num_cached_tokens >= common, index
    if drafter == "model":  # a perfect draft, that has the rows it needs
        accepted = [r.metrics.speculative_decoding.acceptance_histogram for r in requests if not r.params.temperature]
        assert all(histogram[-1] and sum(histogram[:-1]) <= 1 for histogram in accepted), accepted


def test_rows_are_copied_from_a_slot_that_decodes(
    hash_model: Any, hash_executor: Any, request_of: Any, plain: Any
) -> None:
    model, params = hash_model(1), SamplingParams(max_new_tokens=9, speculation="chain:2")
    loop = HostLoop(hash_executor(model, 2), drafter_of("model", hash_executor(model, 2)), CHUNK, frozenset())
    first, second = (request_of([*SYSTEM, *more], params, slot=slot) for slot, more in enumerate(([], [4, 4])))
    for _ in range(3):
        loop.round([first])
    loop.round([first, second])
    assert (second.metrics.num_cached_tokens, len(second.output)) == (16, 1)
    while not second.finish_reason:
        loop.round([s for s in (first, second) if not s.finish_reason])
    assert [first.output, second.output] == [plain(model, [*SYSTEM, *more], params) for more in ([], [4, 4])]
    assert second.metrics.speculative_decoding.acceptance_histogram[:2] in ([0, 0], [0, 1])


def test_what_is_not_reused(hash_model: Any, hash_executor: Any, request_of: Any) -> None:
    """Rows of a sequence that failed, rows that logits were measured in, and none at all where it is not wanted."""
    params = SamplingParams(max_new_tokens=2, speculation="off")
    loop = HostLoop(hash_executor(hash_model(1)), None, CHUNK, frozenset())

    def cached() -> int:
        request = request_of(SYSTEM, params)
        run(loop, [request])
        return int(request.metrics.num_cached_tokens)

    assert [cached(), cached()] == [0, 15]
    loop.logits(SYSTEM[:4])
    assert [cached(), cached()] == [0, 15]
    failing = request_of(SYSTEM, params)
    loop.round([failing])
    failing.fail(RuntimeError("out of luck"))
    loop.release(0)
    assert [cached(), cached()] == [0, 15]
    loop = HostLoop(hash_executor(hash_model(1)), None, CHUNK, frozenset(), LoopOptions(prefix_caching=False))
    assert [cached(), cached()] == [0, 0]


def test_what_slots_keep_is_told_by_slot(hash_model: Any, hash_executor: Any, request_of: Any) -> None:
    loop = HostLoop(hash_executor(hash_model(), 3), None, CHUNK, frozenset())
    assert (loop.cached_tokens(), loop.page_tokens) == ((0, 0, 0), None)
    request = request_of([1, 2, 3], SamplingParams(max_new_tokens=4, speculation="off"))
    run(loop, [request])
    assert loop.cached_tokens() == (6, 0, 0), "all of the text but its last token, which was never read"
    loop = HostLoop(hash_executor(hash_model(), 3), None, CHUNK, frozenset(), LoopOptions(prefix_caching=False))
    run(loop, [request_of([1, 2, 3], request.params)])
    assert loop.cached_tokens() == (0, 0, 0)


def test_statistics_that_were_read_do_not_change(hash_model: Any, hash_executor: Any, request_of: Any) -> None:
    loop = HostLoop(hash_executor(hash_model()), None, CHUNK, frozenset())
    before = loop.stats
    run(loop, [request_of([1, 2], SamplingParams(max_new_tokens=4, speculation="off"))])
    assert (before.rounds, loop.stats.rounds, loop.stats.since(before).emitted) == (0, 4, 4)


CHEAP = {"verify": [[1, 3.0], [64, 41.5]], "draft": [[1, 0.2], [64, 0.4]], "plain": 0.4, "round": 0.4, "level": 0.04}
LINEAR = {"verify": [[1, 10.0], [64, 41.5]], "draft": [[1, 0.2], [64, 0.4]], "plain": 0.4, "round": 0.4, "level": 0.04}


@pytest.mark.parametrize("corrected", [True, False])
def test_one_text_does_not_hold_up_many_prompts(
    hash_model: Any, hash_executor: Any, request_of: Any, corrected: bool
) -> None:
    """A step for one is so cheap that by its pace alone three prompts would be read at two tokens a round.

    The pace is the table's, so it is kept whether or not rounds correct the table.
    """
    chances = {"likely": [0.0], "chance": [0.5], "step": 0.5, "reach": [0, 0.5], "lookup": [0.0, 0.5]}
    record = {"schema": 2, "machine": {}, "widest": "best:16", "times": {"1": CHEAP, "4": LINEAR}}
    table = TimingTable.of(record | {"chances": {"greedy": chances, "sampled": chances}}, 64)
    seconds, executor = table.at(4).verify_rows, hash_executor(hash_model(3), 4, 400)
    loop = HostLoop(executor, LookupDrafter(), 64, frozenset(), LoopOptions(live=LiveTimings(table, 4, corrected)))
    executor.seconds = 0.0
    first = request_of([1, 2, 3], SamplingParams(max_new_tokens=60, speculation="off"), slot=0)
    loop.round([first])
    late = [request_of([5, 6, 7, slot] * 40, first.params, slot=slot) for slot in (1, 2, 3)]
    before = len(first.output)
    loop.round([first, *late])
    assert len(first.output) == before + 1
    read = [each.cached for each in late]
    assert max(read) - min(read) <= 1
    assert min(read) > LEAST
    assert PACE * seconds[1] < seconds[1 + sum(read)] <= PACE_OF_ALL * seconds[4] < seconds[1 + sum(read) + 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("live", "budget"), [(True, None), (True, 24), (False, 24), (False, None)])
def test_a_long_prompt_never_stops_the_others(
    hash_model: Any, hash_executor: Any, request_of: Any, plain: Any, live: bool, budget: int | None, temperature: float
) -> None:
    """Its chunks share the rows of a step with those who decode: they emit in each, and two prompts are read evenly."""
    model = hash_model(3)
    chances = {"likely": [0.0], "chance": [0.5], "step": 0.5, "reach": [0, 0.5], "lookup": [0.0, 0.5]}
    record = {"schema": 2, "machine": {}, "widest": "best:16", "times": {"4": LINEAR}}
    table = TimingTable.of(record | {"chances": {"greedy": chances, "sampled": chances}}, 64)
    told = LiveTimings(table, 4) if live else None
    options = LoopOptions(sequence_nodes=budget and budget // 4, step_nodes=budget, live=told)
    executor = hash_executor(model, 4, 400)
    loop = HostLoop(executor, LookupDrafter(), 64, frozenset(), options)
    steps, inner = list[dict[int, int]](), executor.step

    def step(inputs: Any) -> Any:
        steps.append({each.slot: len(each.tokens) for each in inputs})
        executor.seconds = 0.0
        return inner(inputs)

    executor.step = step
    params = SamplingParams(max_new_tokens=60, temperature=temperature, seed=1, speculation="chain:4")
    first = [request_of([1, 2, slot], params, slot=slot) for slot in range(2)]
    loop.round(first)
    late = [request_of([5, 6, 7, slot] * 40, params, slot=slot) for slot in (2, 3)]
    begun = len(steps)
    while not all(each.output for each in late):
        before = [len(each.output) for each in first]
        loop.round([*first, *late])
        assert all(len(each.output) > count for each, count in zip(first, before, strict=True))
    reading = steps[begun:-1]
    assert all(abs(each[2] - each[3]) <= 1 for each in reading)
    if budget:
        assert max(sum(each.values()) for each in reading) == budget
    if live:
        seconds = table.at(4).verify_rows
        for each in reading:
            slow = float(seconds[2 + each[2] + each[3]])  # drafts have to pay for themselves
            assert slow <= max(PACE * seconds[2], PACE_OF_ALL * seconds[4]) or each[2] == each[3] == LEAST
    if not (live or budget):
        assert reading[0][2] == 64
    while active := [each for each in [*first, *late] if not each.finish_reason]:
        loop.round(active)
    for each in [*first, *late]:
        assert each.output == plain(model, each.tokens[: each.metrics.num_prompt_tokens], params)
