"""The book of cache rows knows where each slot's rows end, and their positions and hidden states, as naive lists do."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.executor import ModelSpec, StepInput
from specbuild.runtime.backends.slot_rows import SlotRows

CAPACITY, SLOTS, MOST = 20, 3, 6


SPEC = ModelSpec("target", 1, 1, 1, 12, CAPACITY, MOST, (0, 4), hidden=2)


def nodes(slot, start, positions):
    return StepInput(slot, start, start, [0] * len(positions), positions, None, 1)


class Naive:
    """A slot is a list of rows, each a position and a hidden state; those after its end are nobody's."""

    def __init__(self):
        self.slots = [list[tuple[int, float]]() for _ in range(SLOTS)]

    def write(self, slot, start, positions, states):
        self.slots[slot][start:] = zip(positions, states, strict=True)

    def commit(self, slot, rows, start):
        moved = [self.slots[slot][row][1] for row in rows]
        self.slots[slot][start:] = [(start + index, state) for index, state in enumerate(moved)]

    def share(self, slot, source, rows):
        self.slots[slot] = self.slots[source][:rows]


def agree(book, naive):
    assert book.ends == [len(rows) for rows in naive.slots]
    for slot, rows in enumerate(naive.slots):
        assert book.positions[slot, : len(rows)].tolist() == [position for position, _ in rows]
        assert book.hidden[slot, : len(rows), 0].tolist() == [state for _, state in rows]


@settings(max_examples=50)
@given(st.randoms(use_true_random=False))
def test_rounds_of_trees_against_naive_lists(rng):
    """Trees of one level or several, paths of them committed, slots that forget, and slots that begin as others."""
    book, naive, committed, states = SlotRows(SPEC, SLOTS), Naive(), [0] * SLOTS, iter(range(1, 10**6))
    for _ in range(8):
        slot, kind = rng.randrange(SLOTS), rng.choice(["tree", "tree", "tree", "forget", "share"])
        start = committed[slot]
        if kind == "tree":
            end = start
            for _ in range(rng.randint(1, 3)):
                positions = [start + rng.randint(0, 3) for _ in range(min(rng.randint(1, MOST), CAPACITY - end))]
                if positions:
                    written = [float(next(states)) for _ in positions]
                    book.write(nodes(slot, end, positions), MOST)
                    book.hidden[slot, end : end + len(positions)] = np.array(written)[:, None]
                    naive.write(slot, end, positions, written)
                    end += len(positions)
                    agree(book, naive)
            path = sorted(rng.sample(range(start, end), rng.randint(0, end - start)))
            committed[slot] = start + len(path)
            book.commit(slot, path, start)
            naive.commit(slot, path, start)
        elif kind == "forget":
            committed[slot] = rng.randint(0, start)
            book.commit(slot, (), committed[slot])
            naive.commit(slot, [], committed[slot])
        else:
            source = rng.randrange(SLOTS)
            if source != slot:
                rows = committed[slot] = rng.randint(0, committed[source])
                book.copy(slot, source, rows)
                book.commit(slot, (), rows)
                naive.share(slot, source, rows)
        agree(book, naive)
        for each, count in enumerate(committed):
            assert book.positions[each, :count].tolist() == list(range(count)), "a committed row's is its number"
