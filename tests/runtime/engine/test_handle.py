"""A handle gives its caller chunks and the result, wakes who listens, and passes a cancellation on, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from engine_checks import SHORT, at_rest, expected
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime import Chunk, Handle, SamplingParams, TokenLogprobs
from specbuild.runtime.requests.sequence import Sequence

Make = Callable[..., Handle]


@pytest.fixture(scope="session")
def make(request_of: Callable[..., Sequence]) -> Make:
    """`make(**SamplingParams fields)`: the handle of a sequence after the text "ab"; who cancels it is in `asked`."""

    def make(prompt: Any = (0, 1), other: Any = None, **params: Any) -> Handle:
        sequence = request_of(list(prompt), SamplingParams(**{"speculation": "off"} | params), **other or {})
        asked = list[Handle]()
        handle: Any = Handle(sequence, asked.append)
        handle.asked = asked
        return handle  # type: ignore[no-any-return]

    return make


def emit(handle: Handle, *tokens: int, publish: bool = True) -> None:
    """As the worker does in a round."""
    for at, token in enumerate(tokens):
        handle.sequence.emit(token, frozenset(), begins=at == 0)
    if publish:
        handle.publish()


def test_a_chunk_is_what_came_since_the_last_one(make: Make) -> None:
    """After the end the result is told again."""
    handle = make()
    handle.sequence.index, handle.sequence.sample = 3, 2
    emit(handle, 5, 6, publish=False)
    assert handle.take() is None, "what a round has emitted is there when the round has ended"
    emit(handle, 7)
    first = handle.take()
    assert first == Chunk(3, 2, "fgh", [5, 6, 7], None, None, [True, False, False])
    assert handle.take() is None
    first.token_ids.append(99)
    emit(handle, 8)
    handle.end("length", 1.0)
    for text, tokens in (("i", [8]), ("", [])):
        chunk = handle.take()
        assert (chunk.text, chunk.token_ids, chunk.result) == (text, tokens, handle.result()), (
            "the result is told again"
        )


def test_logprobs_come_with_their_tokens_where_they_were_asked_for(make: Make) -> None:
    handle, logprobs = make(logprobs=0), [TokenLogprobs(token, -float(token), ()) for token in range(5, 9)]
    for count, each in enumerate(logprobs, 1):
        handle.sequence.logprobs.append(each)
        emit(handle, each.token_id)
        if count % 2 == 0:
            assert handle.take().logprobs == logprobs[count - 2 : count]
    handle.sequence.logprobs.append(TokenLogprobs(9, -9.0, ()))  # of a token that was not emitted: the round failed
    handle.end("error", 1.0)
    assert handle.take().logprobs == []
    assert handle.result().logprobs == logprobs
    silent = make()
    emit(silent, 5)
    silent.end("length", 1.0)
    assert (silent.take().logprobs, silent.result().logprobs) == (None, None)


def test_what_a_stop_string_held_back_comes_with_the_end(make: Make) -> None:
    handle = make(stop=["fgh"])
    emit(handle, 4, 5, 6)
    assert handle.take().text == "e"
    handle.end("cancelled", 1.0)
    chunk = handle.take()
    assert (chunk.text, chunk.token_ids, chunk.result.text) == ("fg", [], "efg")


def test_the_end_s_reason_is_the_sequence_s_own_if_it_has_one(make: Make) -> None:
    cut, whole = make(), make(max_new_tokens=1)
    cut.end("deadline", 1.0)
    emit(whole, 5)
    whole.end("cancelled", 1.0)
    assert [handle.result().finish_reason for handle in (cut, whole)] == ["deadline", "length"]


class Panic(BaseException):
    """As what a tokenizer written in Rust raises when it panics: no Exception."""


class Stubborn:
    """A detokenizer that raises where it is asked to."""

    def __init__(self, error: BaseException, finish: bool) -> None:
        self._error, self._finish = error, finish

    def finish(self) -> None:
        if self._finish:
            raise self._error

    @property
    def text(self) -> str:
        raise self._error


@pytest.mark.parametrize("finish", [False, True])
@pytest.mark.parametrize("error", [ValueError("no text"), Panic("no text")])
def test_a_request_ends_whatever_its_text_raises(make: Make, error: BaseException, finish: bool) -> None:
    handle = make()
    emit(handle, 5, 6)
    assert handle.take().text == "fg"
    handle.sequence.detokenizer = Stubborn(error, finish)  # type: ignore[assignment]
    if not finish:
        handle.publish()
        assert (handle.sequence.finish_reason, handle.take()) == ("error", None)
    handle.end("length", 1.0)
    result = handle.result(0)
    assert (result.finish_reason, result.token_ids, result.text) == ("error", [5, 6], "fg"), "what was told stays"
    assert str(result.error) == f"decoding failed, {type(error).__name__}: no text"
    assert result.error.__cause__ is error
    assert handle.take().text == ""


@pytest.mark.parametrize("where", ["push", "text", "finish"])
def test_a_tokenizer_that_panics_ends_its_request_and_not_the_worker(hash_engine: Any, where: str) -> None:
    engine = hash_engine(batch_size=2)

    class Tokens:
        text = ""

        def push(self, token: int) -> bool:
            if where == "push":
                raise Panic("a panic")
            return False

        def finish(self) -> None:
            if where == "finish":
                raise Panic("a panic")

    class Textless(Tokens):
        @property
        def text(self) -> str:  # type: ignore[override]
            raise Panic("a panic")

    ((sequence,), _) = engine.requests("ab", SHORT, "raise")
    sequence.detokenizer = Textless() if where == "text" else Tokens()
    result = engine.scheduler.submit(sequence).result(60)
    assert "Panic: a panic" in str(result.error)
    assert engine.generate("cd", SHORT)[0].token_ids == expected(hash_engine, "cd", SHORT)
    assert engine.health().state == "idle"
    at_rest(engine)


@pytest.mark.parametrize("timeout", [0.01])
def test_a_result_that_does_not_come_in_time(make: Make, timeout: float) -> None:
    handle = make()
    with pytest.raises(TimeoutError, match=f"^no result after {timeout} s: the request goes on, wait again or cancel"):
        handle.result(timeout)
    handle.end("length", 1.0)
    assert handle.result(timeout) is handle.result()


def test_leaving_a_handle_s_chunks_cancels_nothing(make: Make) -> None:
    handle: Any = make()
    emit(handle, 5)
    for chunk in handle:
        assert chunk.token_ids == [5]
        break
    emit(handle, 6)
    handle.end("length", 1.0)
    assert [(chunk.token_ids, chunk.result is None) for chunk in handle] == [([6], False)]
    assert handle.asked == []


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(["emit", "publish", "take"]), max_size=40), st.sampled_from(["", "cd", "bb"]))
def test_chunks_add_up_to_the_result(make: Make, steps: list[str], stop: str) -> None:
    handle, chunks, emitted = make(max_new_tokens=99, stop=[stop] if stop else []), list[Chunk | None](), 0
    for step in steps:
        if step == "emit" and not handle.sequence.finish_reason:
            emit(handle, (emitted := emitted + 1) % 5, publish=False)
        if step == "publish":
            handle.publish()
        if step == "take":
            chunks.append(handle.take())
    handle.end("cancelled", 1.0)
    chunks.append(handle.take())
    given, result = [chunk for chunk in chunks if chunk], handle.result()
    assert [token for chunk in given for token in chunk.token_ids] == result.token_ids == handle.sequence.output
    assert "".join(chunk.text for chunk in given) == result.text
    assert [chunk.result for chunk in given[:-1]] == [None] * (len(given) - 1)
    assert given[-1].result is result
    assert all(chunk.token_ids for chunk in given[:-1]), "a chunk without a token would say nothing"


def test_a_reader_in_another_thread_misses_nothing(make: Make) -> None:
    handle, chunks = make(max_new_tokens=2000, logprobs=0), list[Chunk]()
    reader = threading.Thread(target=lambda: chunks.extend(handle))
    reader.start()
    tokens = [index * index % 12 for index in range(600)]
    for token in tokens:
        handle.sequence.logprobs.append(TokenLogprobs(token, -1.0, ()))
        emit(handle, token)
    handle.end("cancelled", 1.0)
    reader.join(60)
    assert not reader.is_alive()
    assert [token for chunk in chunks for token in chunk.token_ids] == tokens
    assert [each.token_id for chunk in chunks for each in chunk.logprobs or ()] == tokens
    assert "".join(chunk.text for chunk in chunks) == handle.result().text
    assert [chunk.result is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_a_slow_reader_gets_longer_chunks(hash_engine: Any) -> None:
    handle = hash_engine().submit("ab", SamplingParams(max_new_tokens=40, logprobs=0))
    result = handle.result()
    (chunk,) = handle
    assert (chunk.token_ids, chunk.text, chunk.result) == (result.token_ids, result.text, result)
    assert chunk.logprobs == result.logprobs
    (again,) = handle
    assert (again.token_ids, again.text, again.result) == ([], "", result)


def test_a_reader_gets_every_round(hash_engine: Any) -> None:
    engine = hash_engine(gated=True)
    chunks = iter(engine.submit("ab", SamplingParams(max_new_tokens=5, speculation="off")))
    engine.gate.halted()
    for _ in range(4):
        engine.gate.step()
        assert len(next(chunks).token_ids) == 1
    engine.gate.open()
    assert [len(chunk.token_ids) for chunk in chunks] == [1]
