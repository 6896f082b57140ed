"""A tree is drafted where caches and models have room for it, and a sequence gets all rows it may ever write."""

from types import SimpleNamespace

import pytest
from device_requests import Made, prompt_of, request_of
from made_up_chances import LARGE, table_of
from tiny_models import BUCKETS, TEXT

from specbuild.runtime.decoding.device.proposals import Proposals
from specbuild.runtime.decoding.device.room import Room
from specbuild.runtime.decoding.planner import Planner
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.speculation.controller import Controller
from specbuild.runtime.speculation.cost_model import CostModel
from specbuild.runtime.speculation.tree import TreeSpec


def executor_of(max_positions=1000, max_rows=64, rows=100):
    """As much of an executor as is asked: slot 0 has `rows`, and each further one ten less."""
    return SimpleNamespace(
        spec=SimpleNamespace(max_positions=max_positions),
        max_rows=max_rows,
        rows=lambda slot: rows - 10 * slot,
        bucket=lambda nodes: next(bucket for bucket in BUCKETS if bucket >= nodes),
    )


def ask(tree, tokens=10, slot=0, max_new_tokens=30):
    sequence = request_of(prompt_of(1, tokens), speculation=tree, max_new_tokens=max_new_tokens)
    sequence.slot, sequence.cached = slot, tokens - 1
    return sequence


@pytest.mark.parametrize(
    ("tree", "drafted", "alone"),
    [
        ("off", 0, 0),
        ("chain:1", 2, 2),  # verified in a step of two nodes
        ("chain:4", 8, 8),  # five nodes are a step of eight
        ("topk:3,3", 16, 16),
        ("best:12", 8 * 6 + 8, 16),  # the draft's levels take more than what is verified
    ],
)
@pytest.mark.parametrize("tokens", [1, 25])
def test_rows_that_a_sequence_may_ever_write(tree, drafted, alone, tokens):
    """Its longest text and a tree behind it, whatever the round's shape is and however much is there already."""
    sequence = ask(tree, tokens, max_new_tokens=30)
    sequence.budget = None
    assert Room(executor_of(), executor_of()).needed(sequence) == tokens + 30 + drafted
    assert Room(executor_of(), None).needed(sequence) == tokens + 30 + alone


@pytest.mark.parametrize("short", ["max_positions", "max_rows", "rows"])
def test_a_tree_of_which_anything_lacks_room_is_not_drafted(short):
    """Positions for its nodes, rows of one step for its levels, rows behind the text; the last two are the draft's."""
    needs = {"max_positions": 10 + 12, "max_rows": 8 * 7, "rows": 10 + 8 * 6 + 8}
    spec, sequence = TreeSpec.parse("best:12"), ask("best:12", 10)
    for missing in (0, 1):
        executor = executor_of(**needs | {short: needs[short] - missing})
        assert Room(executor, executor).fits(sequence, spec, [spec]) == (not missing)
        assert Room(executor, None).fits(sequence, spec, [spec]) == (not missing or short != "max_positions")


def test_a_decision_for_a_tree_that_lacks_room_becomes_plain_decoding():
    sequence, cost = ask("best:12"), CostModel(table_of(LARGE), 1, padded=True, corrected=False)
    sequence.controller = Controller(cost, has_model=True).for_request(0.0)
    proposer, kinds = Proposer(SimpleNamespace(backlog=lambda _: 0), looks_up=False), []
    for rows in (100, 10):
        proposals = Proposals(Planner(), Room(executor_of(), executor_of(rows=rows)), BUCKETS, on_host=False)
        ((_, proposal),) = proposals.plan(proposer, [sequence])
        kinds.append((proposal.decision.kind, proposal.shape is not None, len(proposal.tree)))
    assert kinds == [("model", True, 1), ("plain", False, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["best:5", "best:7"])
def test_a_tree_that_just_fits_is_drafted(host, folder, tree):
    """Without a fault, in models' own caches; with one token more nothing is. What is verified always fits."""
    drafted = dict[int, int]()
    for more in (0, 1):
        made = Made(host, folder, 1)
        room = made.loop.proposals.room.free_rows
        spec = TreeSpec.parse(tree)
        left = room(ask(tree, 1), spec, [spec])
        sequence = ask(tree, left + more, max_new_tokens=6)  # the prompt's step emits the token that fills it
        sequence.cached = 0
        assert sequence.request.max_tokens <= TEXT
        while not sequence.output:
            made.loop.round([sequence])
        assert room(sequence, spec, [spec]) == -more
        made.loop.round([sequence])
        assert sequence.error is None
        drafted[more] = sequence.metrics.speculative_decoding.num_spec_steps
    assert drafted == {0: 1, 1: 0}
