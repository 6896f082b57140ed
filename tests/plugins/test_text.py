"""Texts continued on a device against the lookup on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from calls import POISON, Array, ints, poisoned, struct
from device import HostKernels
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.kernels.abi import Fault, KernelLibrary, Text
from specbuild.runtime.decoding.device.texts import COMMON, habit_keys
from specbuild.runtime.drafting.habits import SLOTS
from specbuild.runtime.drafting.lookup import continuation, longest
from specbuild.runtime.requests.sequence import string_of

CAPACITY = 700


def follow(kernels: HostKernels, given: list[list[int]], width: int, **more: Any) -> dict[str, Array]:
    """The chains of texts of which the last `new` tokens of each were emitted in the last round."""
    batch, new = len(given), more.pop("new", [0] * len(given))
    there, emitted = poisoned(batch, CAPACITY), poisoned(batch, width)
    for b, (text, count) in enumerate(zip(given, new, strict=True)):
        there[b, : len(text) - count], emitted[b, :count] = text[: len(text) - count], text[len(text) - count :]
    out = {"tokens": poisoned(batch, width), "parents": poisoned(batch, width), "fault": np.zeros(batch, np.int32)}
    fields = {"texts": there, "emitted": emitted, "length": ints(new), "roots": ints([text[-1] for text in given])}
    fields |= {"root_position": ints([len(text) - 1 for text in given]), "most": ints([24] * batch)}
    fields |= {"counts": ints([1] * batch), "batch": batch, "nodes": width, "capacity": CAPACITY} | out | more
    kernels.launch("continue_text", struct(kernels, Text, **fields))
    return fields


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 4),
    nodes=st.integers(1, 64),
    vocab=st.sampled_from([2, 6, 50]),
    order=st.integers(0, 3),
)
def test_anything(
    kernels: HostKernels,
    host: KernelLibrary,
    in_order: Callable[..., Any],
    seed: int,
    batch: int,
    nodes: int,
    vocab: int,
    order: int,
) -> None:
    """The same match and the same continuation as on the host, as long as twice what matched."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, vocab, int(rng.integers(1, CAPACITY))).tolist() for _ in range(batch)]
    new = [int(rng.integers(0, min(nodes, len(text)) + 1)) for text in texts]
    most = ints(rng.integers(0, 30, batch))
    with in_order(host, order):
        found = follow(kernels, texts, nodes, new=new, most=most)
    assert not found["fault"].any()
    for b, text in enumerate(texts):
        assert found["texts"][b].tolist() == [*text, *[POISON] * (CAPACITY - len(text))]
        start, matched = longest(string_of(text))
        count = min(2 * matched, int(most[b]), nodes - 1)
        chain = continuation(text, start, count) if count else []
        assert found["tokens"][b].tolist() == [text[-1], *chain, *[0] * (nodes - 1 - count)]
        assert found["parents"][b].tolist() == [-1, *range(count), *[-1] * (nodes - 1 - count)]
        assert found["counts"][b] == 1 + count


def table(*known: tuple[int, int, int, int]) -> Array:
    """Habits that know of (before, last, salt) what follows."""
    found = np.zeros(SLOTS, np.uint64)
    for before, last, salt, follows in known:
        (key,) = habit_keys(np.array([before]), np.array([last]), salt)
        found[int(key) % SLOTS] = key >> np.uint64(32) << np.uint64(32) | np.uint64(follows)
    return found


def habits(found: Array, *salts: int) -> dict[str, Any]:
    return {"habits": found, "salts": np.array(salts, np.uint32), "slots": len(found)}


def chains(found: dict[str, Array]) -> list[list[int]]:
    return [row[1:count].tolist() for row, count in zip(found["tokens"], found["counts"], strict=True)]


def test_what_was_emitted_becomes_a_habit(kernels: HostKernels) -> None:
    """Of texts of the same salt alone, two tokens after another; only what the last round emitted is learnt."""
    known = table()
    follow(kernels, [[9, 8, 1, 2, 3, 4, 5, 6, 7]], 8, new=[7], **habits(known, 4))
    texts = [[31, 1, 2], [31, 9, 8], [31, 3, 4], [31, 6, 7], [31, 1, 2]]
    found = follow(kernels, texts, 8, **habits(known, 4, 4, 4, 4, 0))
    assert chains(found) == [[3, 4, 5, 6], [1, 2, 3, 4], [5, 6, 7], [], []]
    texts = [[2, 6, 1, 2], [7, 1, 2, 7, 1, 2]]  # against one token of the text itself, and against two
    assert chains(follow(kernels, texts, 8, **habits(known, 4, 4))) == [[3, 4, 5, 6], [7, 1, 2, 7, 1, 2]]
    assert chains(follow(kernels, [[31, 1, 2]], 3, **habits(known, 4))) == [[3, 4]]
    assert chains(follow(kernels, [[31, 1, 2]], 8, most=ints([1]), **habits(known, 4))) == [[3]]


def test_what_common_texts_say(kernels: HostKernels) -> None:
    """It comes last: after the text's own continuation of one token; of one token only where nothing else is known."""
    known = table((1, 2, COMMON, 3), (2, 3, COMMON, 4), (-1, 4, COMMON, 5), (-1, 2, COMMON, 6), (6, 1, 0, 2))
    texts = [[1, 2], [6, 1], [7, 2], [2, 9, 1, 2], [4], [7]]
    found = follow(kernels, texts, 8, **habits(known, 0, 0, 3, 0, 0, 0))
    assert chains(found) == [[3, 4], [2, 3, 4], [6], [9, 1], [5], []]


def test_an_idle_sequence_is_left_alone(kernels: HostKernels) -> None:
    found = follow(kernels, [[1, 2, 1], [1, 2, 1]], 4, counts=ints([0, 1]), new=[2, 0])
    assert found["counts"].tolist() == [0, 3]
    assert (found["tokens"][0] == POISON).all()
    assert (found["texts"][0, 1:] == POISON).all()


def test_what_is_no_token_is_never_drafted(kernels: HostKernels) -> None:
    found = follow(kernels, [[5, 7, 3, -1, 7, 3], [4, -1, 4, -1]], 8)
    assert found["tokens"].tolist() == [[3, 0, 7, 3, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0, 0, 0]]
    assert found["counts"].tolist() == [5, 1]


@pytest.mark.parametrize(
    "change", [{"root_position": ints([-1])}, {"root_position": ints([CAPACITY])}, {"length": ints([5])}]
)
def test_a_root_that_lies_in_no_text(kernels: HostKernels, change: dict[str, Any]) -> None:
    """Nothing is written to a text; `length`: more tokens than the text has."""
    found = follow(kernels, [[1, 2, 1]], 4, **change)
    assert found["fault"] == Fault.CAPACITY
    assert found["counts"] == 1
    assert found["texts"][0].tolist() == [1, 2, 1, *[POISON] * (CAPACITY - 3)]
