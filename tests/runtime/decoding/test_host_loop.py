"""The loop on the host: plain decoding's tokens, whoever drafts and whatever else is read in the same steps."""

import pytest
from device_requests import run
from hash_models import HashExecutor, HashModel, plain_text, sequence_of
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_chances import record_of, table_of

from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.decoding.loop import LoopOptions
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.drafting.pard import PardDrafter
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.cost_model import CostModel
from specbuild.runtime.speculation.draft_limits import Limits
from specbuild.runtime.speculation.timing_table import TimingTable

VOCAB, CHUNK = 12, 8
TREES = ["off", "chain:1", "chain:4", "topk:2,3", "topk:4,4", "topk:3,1", "best:5", "best:16"]
PARAMS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.95},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    {"temperature": 1.0, "frequency_penalty": 0.6, "logit_bias": {3: 2.0, 5: -100.0}},
]

ASKED = st.tuples(st.sampled_from(TREES), st.sampled_from(PARAMS), st.integers(1, 24))


def proposer_of(name, executor):
    if name in ("none", "lookup"):
        return Proposer(looks_up=name == "lookup")
    model = PardDrafter(executor, CHUNK, VOCAB) if name == "parallel" else ModelDrafter(executor, CHUNK)
    return Proposer(model, looks_up="lookup" in name)


@settings(max_examples=50)
@given(
    drafter=st.sampled_from(["none", "model", "lookup", "lookup, model", "parallel"]),
    slots=st.integers(1, 3),
    seed=st.integers(0, 1000),
    error=st.floats(0, 2),
    order=st.sampled_from([0, 2]),  # of two tokens: it loops
    asked=st.lists(ASKED, min_size=1, max_size=4),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
)
def test_tokens_do_not_depend_on_draft_or_batch(drafter, slots, seed, error, order, asked, prompt):
    target, draft, eos = HashModel(seed, order=order), HashModel(seed, error, order), frozenset({4})
    proposing = proposer_of(drafter, HashExecutor(draft, slots))
    loop = HostLoop(HashExecutor(target, slots), proposing, CHUNK, eos)
    wanted = [
        sequence_of(
            prompt[: 1 + index * 7 % len(prompt)],
            SamplingParams(max_new_tokens=count, speculation=tree, seed=seed + index, **params),
            index,
        )
        for index, (tree, params, count) in enumerate(asked)
    ]
    wanted = run(loop, wanted)
    loop.close()
    for request in wanted:
        text = request.tokens[: request.metrics.num_prompt_tokens]
        assert request.output == plain_text(target, text, request.params, eos)
        assert request.finish_reason == ("stop" if request.output[-1] in eos else "length")
        if request.request.tree is None or drafter == "none":
            assert request.metrics.speculative_decoding.num_spec_steps == 0


def test_statistics_of_a_perfect_chain():
    model, params = HashModel(3), SamplingParams(max_new_tokens=26, speculation="chain:4")
    loop = HostLoop(HashExecutor(model), proposer_of("model", HashExecutor(model)), CHUNK, frozenset())
    request = sequence_of([1, 2, 3], params)
    run(loop, [request])  # the prompt gives one token, each of 5 rounds 5 more
    stats = request.metrics.speculative_decoding
    assert stats.acceptance_histogram == stats.depth_histogram == [0, 0, 0, 0, 5]
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (5, 20, 20)
    assert stats.mean_acceptance_length == 5
    assert loop.stats.rounds == 6
    assert loop.stats.accept > 0 < loop.stats.commit


LINEAR = {"verify": [[1, 10.0], [64, 41.5]], "draft": [[1, 0.2], [64, 0.4]], "plain": 0.4, "round": 0.4, "level": 0.04}


@pytest.mark.parametrize(
    ("live", "budget", "temperature"), [(True, None, 0.0), (True, 24, 1.0), (False, 24, 0.0), (False, None, 1.0)]
)
def test_a_long_prompt_never_stops_the_others(live, budget, temperature):
    """Its chunks share the rows of a step with those who decode: they emit in each, and two prompts are read evenly."""
    model, table = HashModel(3), table_of(LINEAR, 4)
    cost = CostModel(table, 4) if live else None
    options = LoopOptions(Limits(budget and budget // 4 - 1), step_nodes=budget, cost=cost)
    executor = HashExecutor(model, 4, 400)
    loop = HostLoop(executor, Proposer(), 64, frozenset(), options)
    params = SamplingParams(max_new_tokens=60, temperature=temperature, seed=1, speculation="chain:4")
    first = [sequence_of([1, 2, slot], params, slot=slot) for slot in range(2)]
    loop.round(first)
    late = [sequence_of([5, 6, 7, slot] * 40, params, slot=slot) for slot in (2, 3)]
    executor.steps.clear()
    while not all(each.output for each in late):
        before = [len(each.output) for each in first]
        loop.round([*first, *late])
        assert all(len(each.output) > count for each, count in zip(first, before, strict=True))
    reading = [{each.slot: len(each.tokens) for each in step} for step in executor.steps][:-1]
    assert all(abs(each[2] - each[3]) <= 1 for each in reading)
    if budget:
        assert max(sum(each.values()) for each in reading) == budget
    if live:  # drafts have to pay for themselves
        seconds = table.at(4).verify
        assert all(seconds[2 + each[2] + each[3]] <= 3 * seconds[2] for each in reading)
    if not (live or budget):
        assert reading[0][2] == 64
    while active := [each for each in [*first, *late] if not each.finish_reason]:
        loop.round(active)
    for each in [*first, *late]:
        assert each.output == plain_text(model, each.tokens[: each.metrics.num_prompt_tokens], params)


@pytest.mark.parametrize("corrected", [True, False])
def test_one_text_does_not_hold_up_many_prompts(corrected):
    """A step for one is so cheap that by its pace alone three prompts would be read at two tokens a round."""
    record = record_of(LINEAR, 4)
    record["times"]["1"] = LINEAR | {"verify": [[1, 3.0], [64, 41.5]]}
    table = TimingTable.of(record, 64)
    executor = HashExecutor(HashModel(3), 4, 400)
    loop = HostLoop(executor, Proposer(), 64, frozenset(), LoopOptions(cost=CostModel(table, 4, corrected=corrected)))
    first = sequence_of([1, 2, 3], SamplingParams(max_new_tokens=60, speculation="off"), slot=0)
    loop.round([first])
    late = [sequence_of([5, 6, 7, slot] * 40, first.params, slot=slot) for slot in (1, 2, 3)]
    before = len(first.output)
    loop.round([first, *late])
    read, seconds = [each.cached for each in late], table.at(4).verify
    assert len(first.output) == before + 1
    assert max(read) - min(read) <= 1
    assert min(read) > 2
    assert seconds[1 + sum(read)] <= 3 * seconds[4]
