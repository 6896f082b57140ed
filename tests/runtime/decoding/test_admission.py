"""Slots go to the texts that they know most of, rows are shared in both models, and nothing of a failure is left."""

from dataclasses import replace

import pytest
from hash_models import HashExecutor, HashModel, sequence_of

from specbuild.runtime.decoding.admission import Admission
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.sampling.sampler import SamplingParams

OFF = SamplingParams(max_new_tokens=9, speculation="off")
TEXT = [5, 1, 4, 2, 8, 5, 7, 1]


class Slots:
    """An admission over two models, in whose caches texts are put as if they had been read."""

    def __init__(self, batch_size=3):
        self.target, self.draft = (HashExecutor(HashModel(), batch_size) for _ in range(2))
        self.drafter = ModelDrafter(self.draft, 8)
        self.admission = Admission(self.target, self.drafter)

    def ask(self, tokens, slot=-1, params=OFF):
        """A sequence that is in no slot yet, or in one."""
        return sequence_of(tokens, params, slot=slot)

    def enter(self, tokens, slot, params=OFF):
        sequence = self.ask(tokens, slot, params)
        self.admission.enter([sequence])
        return sequence

    def read(self, tokens, slot, params=OFF):
        """A sequence in a slot, all of whose tokens have their rows in both caches."""
        sequence = self.enter(tokens, slot, params)
        for executor in (self.target, self.draft):
            executor.rows[slot][: len(tokens)] = list(enumerate(tokens))
        sequence.cached = self.drafter.cached[slot] = len(tokens)
        return sequence

    def rows(self, slot):
        """The tokens in the slot's rows, by model."""
        return [[token for _, token in executor.rows[slot] if token >= 0] for executor in (self.target, self.draft)]


def test_a_prompt_goes_where_most_of_it_is():
    slots = Slots()
    for slot, length in enumerate((2, 6, 4)):
        slots.read(TEXT[:length], slot)
    picks = [slots.admission.pick(slots.ask(TEXT), free) for free in ([0, 1, 2], [2, 1, 0], [0, 2], [0])]
    assert picks == [1, 1, 2, 0]
    assert slots.admission.pick(slots.ask([9, *TEXT]), [2, 0, 1]) == 2, "nobody has anything: the longest unused"


def test_a_common_beginning_displaces_no_text():
    """Chats share their system prompt: a new one takes an empty slot, else the longest unused, and copies the rows."""
    slots = Slots()
    slots.read(TEXT, 0)
    other = [*TEXT[:5], 0, 0, 0]
    assert slots.admission.pick(slots.ask(other), [0, 1, 2]) == 1
    assert slots.read(other, 1).metrics.num_cached_tokens == 5
    slots.read([*TEXT[:5], 3], 2)
    assert slots.admission.pick(slots.ask([*TEXT[:5], 6]), [1, 2, 0]) == 1
    assert slots.admission.pick(slots.ask([*TEXT, 6]), [1, 2, 0]) == 0, "its next turn"


@pytest.mark.parametrize(
    ("prompt", "common"),
    [
        (TEXT, 7),  # not the last token's, whose logits are wanted
        ([*TEXT, 3], 8),
        ([*TEXT, 3, 3], 8),
        ([*TEXT[:5], 0, *TEXT[6:]], 5),
        ([0, *TEXT], 0),
        (TEXT[:1], 0),
        (TEXT[:2], 1),
    ],
)
def test_how_much_of_a_prompt_a_slot_has(prompt, common):
    slots = Slots()
    slots.read(TEXT, 1)
    assert [slots.admission.common(slots.ask(prompt), slot) for slot in range(3)] == [0, common, 0]


def test_a_prompt_whose_logprobs_are_wanted_is_read_whole():
    """A cached row has no logits."""
    slots = Slots()
    slots.read(TEXT, 1)
    assert slots.enter([*TEXT, 3], 1, replace(OFF, prompt_logprobs=1)).cached == 0


@pytest.mark.parametrize("slot", [0, 2])
def test_rows_are_shared_in_both_models(slot):
    """From another slot, which keeps them, or the sequence's own; and what follows them is gone."""
    slots = Slots()
    slots.read([9, 9, 9, 9, 9, 9, 9, 9, 9], 0)
    slots.read(TEXT, 2)
    sequence = slots.enter([*TEXT[:6], 0, 0], slot)
    assert slots.rows(slot) == [TEXT[:6], TEXT[:6]]
    assert (sequence.cached, sequence.metrics.num_cached_tokens, slots.drafter.cached[slot]) == (6, 6, 6)
    if slot == 0:
        assert slots.rows(2) == [TEXT, TEXT]


def test_what_was_read_alone_may_be_kept():
    """Not what was decoded in steps of other bits."""
    slots = Slots()
    slots.admission = Admission(slots.target, slots.drafter, generated=False)
    first = slots.read(TEXT[:5], 0)
    first.emit(TEXT[5], frozenset())
    first.cached = 6
    assert slots.admission.reusable(0) == 5
    assert slots.admission.common(slots.ask([*TEXT[:6], 3]), 0) == 5
    first.cached = 3
    assert slots.admission.reusable(0) == 3


def test_a_borrowed_slot_is_nobodys():
    """What was in it is no longer there for anybody."""
    slots = Slots()
    slots.read(TEXT, 0)
    slots.admission.borrow(0, 5)
    assert slots.admission.cached_tokens() == (0, 0, 0)
    slots.admission.release(0)
    assert slots.rows(0) == [[], TEXT], "the target's rows are garbage; the draft was not asked"
    assert slots.enter([*TEXT, 0], 0).cached == 0


def test_a_release_keeps_what_is_committed():
    """Rows behind it are garbage, and so is all that a failed one wrote, once its slot gets another sequence."""
    slots = Slots()
    slots.read(TEXT, 1).cached = 5
    slots.admission.release(1)
    assert (slots.rows(1)[0], slots.admission.cached_tokens()) == (TEXT[:5], (0, 5, 0))
    slots.read([*TEXT, 2], 2).fail(RuntimeError("out of luck"))
    slots.admission.release(2)
    assert slots.admission.cached_tokens() == (0, 5, 0)
    assert slots.enter([*TEXT, 2, 2], 2).cached == 5, "what another slot has, and not a row more"


@pytest.mark.parametrize("salts", [("a", "b"), (None, "a"), ("a", None)])
def test_salts_share_no_rows(salts):
    """Neither another slot's nor the sequence's own; within one all of them are shared."""
    slots, (mine, other) = Slots(), salts
    params = [replace(OFF, cache_salt=salt) for salt in (mine, other)]
    slots.read(TEXT, 1, params[0])
    assert [slots.admission.common(slots.ask([*TEXT, 3], params=each), 1) for each in params] == [8, 0]
    assert slots.admission.pick(slots.ask([*TEXT, 3], params=params[1]), [0, 1, 2]) == 0
    assert slots.admission.pick(slots.ask([*TEXT, 3], params=params[0]), [0, 1, 2]) == 1
    sequence = slots.enter([*TEXT, 3], 2, params[1])
    assert (sequence.cached, sequence.metrics.num_cached_tokens, slots.rows(2)) == (0, 0, [[], []])
    assert slots.enter([*TEXT, 3], 0, params[0]).cached == 8
    sequence = slots.enter([*TEXT, 3], 1, params[1])
    assert (sequence.cached, slots.rows(1)) == (0, [[], []])
