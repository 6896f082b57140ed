"""`auto`, limits and a tuned table on a device: plain decoding's tokens, and the decisions that the table implies."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from device_requests import Made, check_plain, request_of, run
from made_up_chances import table_of
from tiny_models import BUCKETS
from tuned_device import LARGE, SMALL, Tuned

from specbuild.runtime import Limits
from specbuild.runtime.speculation.cost_model import CostModel

pytestmark = pytest.mark.slow


def told(sequence):
    return sequence.metrics.speculative_decoding


@pytest.mark.nightly(but=("draft-0.9-large-32", "draft-0.0-small-0", "target-0.9-small-32", "target-0.0-large-0"))
@pytest.mark.slow(but=("draft-0.9-large-32",))
@pytest.mark.parametrize("ahead", [0, 32])
@pytest.mark.parametrize("times", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("draft", ["target", "draft"])
def test_tokens_are_plain_decodings(host, folder, times, ahead, temperature, draft):
    made = Tuned(host, folder, times, ("target", draft), ahead=ahead, batch_size=2, looks_up=True)
    done = run(made.loop, made.requests(3, 20 if temperature else 40, temperature=temperature))
    check_plain(folder, done)
    for each in map(told, done):
        assert sum(each.decisions.values()) > 0
        assert set(each.decisions) <= {"plain", "lookup", "model", "probe"}


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 32])
@pytest.mark.parametrize("times", [LARGE, SMALL], ids=["large", "small"])
def test_a_draft_that_pays_is_used_and_a_bad_one_is_left(host, folder, ahead, times):
    """The target itself in full steps, every round; its opposite now and then after a few rounds, a token at a time."""
    for hostile in (False, True):
        made = Tuned(host, folder, times, ("target", "target"), ahead=ahead, hostile=hostile)
        done = [run(made.loop, made.requests(tokens=60))[0] for _ in range(2)]
        check_plain(folder, done)
        last = told(done[-1])
        assert (made.device.turns > made.loop.stats.rounds - 9) == (ahead > 0), "rounds follow each other"
        if hostile:
            probes = last.decisions["probe"] if times is LARGE else 0  # there not even a success would pay
            assert last.decisions["plain"] > 40
            trees = last.decisions.get("model", 0)
            assert trees <= 2
            assert last.num_draft_tokens <= 8 * trees + probes
        elif times is LARGE:
            assert last.decisions["model"] >= sum(last.decisions.values()) - 3
            assert last.mean_acceptance_length > 2 < last.num_draft_tokens / last.num_spec_steps


@pytest.mark.slow
def test_a_continuation_stops_the_device_only_if_it_pays_well(host, folder):
    made = Tuned(host, folder, LARGE, ("target",), ahead=32, looks_up=True)
    repeats = {"logit_bias": dict.fromkeys([17, 4, 29, 61, 8, 2, 55, 90, 31], 30.0)}
    (done,) = run(made.loop, made.requests(tokens=60, **repeats))
    check_plain(folder, [done])
    assert told(done).decisions["lookup"]
    assert made.device.turns > made.loop.stats.rounds / 2


@pytest.mark.slow
def test_steps_of_rounds_are_timed_by_what_they_ran(host, folder):
    told = list[tuple[Any, ...]]()

    class Recording(CostModel):
        def record(self, *step):
            told.append(step)

    cost = Recording(table_of(LARGE, 1, most=BUCKETS[-1]), 1, padded=True)
    made = Tuned(host, folder, LARGE, ("target", "target"), cost=cost)
    run(made.loop, made.requests(tokens=20))
    assert {step[0] for step in told} == {"verify", "draft"}
    assert all(rows >= 1 and seconds >= 0 for _, rows, seconds, *_ in told)


@pytest.mark.slow
def test_limits_count_who_drafts_and_what_ends_beside_others_keeps_its_rows(host, folder):
    """Its slot is released after the others' rounds began, which must neither write there nor end by that."""
    by_size = Limits(num_speculative_tokens_per_batch_size={"1-1": 7, "2-9": 0})
    made = Tuned(host, folder, LARGE, ("target", "target"), by_size, 32, batch_size=2)
    long, short = made.requests(2, tokens=40)
    short.request = replace(short.request, max_tokens=len(short.tokens) + 12)
    run(made.loop, [long, short])
    assert told(short).num_draft_tokens == 0, "two drafted beside each other"
    assert told(long).num_draft_tokens > 0, "and one alone at the end"
    again = request_of(short.tokens, speculation="off", max_new_tokens=9)
    run(made.loop, [again])
    assert again.metrics.num_cached_tokens == len(short.tokens) - 1
    check_plain(folder, [again])
    cache = made.device.array(made.target.model.tensors.cache)[:, again.slot, :, : again.cached]
    alone = Made(host, folder, 1, ("target",))
    alone.loop.logits(again.tokens[: again.cached])
    np.testing.assert_allclose(
        cache, alone.device.array(alone.target.model.tensors.cache)[:, 0, :, : again.cached], atol=1e-4
    )
