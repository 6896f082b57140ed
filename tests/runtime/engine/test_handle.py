"""A handle gives its caller chunks and the result, wakes who listens, and passes a cancellation on, from any thread."""

from dataclasses import replace

import pytest
from engine_checks import SHORT, at_rest, expected
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime import Chunk, Handle, SamplingParams, TokenLogprobs


@pytest.fixture(scope="session")
def make(request_of):
    """`make(**SamplingParams fields)`: the handle of a sequence after the text "ab"; who cancels it is in `asked`."""

    def make(prompt=(0, 1), other=None, **params):
        sequence = request_of(list(prompt), SamplingParams(**{"speculation": "off"} | params), **other or {})
        asked = list[Handle]()
        handle = Handle(sequence, asked.append)
        handle.asked = asked
        return handle

    return make


def emit(handle, *tokens, publish=True):
    """As the worker does in a round."""
    for at, token in enumerate(tokens):
        handle.sequence.emit(token, frozenset(), begins=at == 0)
    if publish:
        handle.publish()


def test_a_chunk_is_what_came_since_the_last_one(make):
    """After the end the result is told again."""
    handle = make()
    handle.sequence.request = replace(handle.sequence.request, index=3, sample=2)
    emit(handle, 5, 6, publish=False)
    assert handle.take() is None, "what a round has emitted is there when the round has ended"
    emit(handle, 7)
    first = handle.take()
    assert first == Chunk(3, 2, "fgh", [5, 6, 7], None, None, [True, False, False])
    first.token_ids.append(99)
    emit(handle, 8)
    handle.end("length", 1.0)
    for text, tokens in (("i", [8]), ("", [])):
        chunk = handle.take()
        assert (chunk.text, chunk.token_ids, chunk.result) == (text, tokens, handle.result())


def test_a_result_that_cannot_be_told_is_a_result(request_of):
    handle = Handle(request_of([0, 1], SamplingParams(speculation="off")), print, lambda _: 1 / 0)
    handle.end("length", 1.0)
    assert handle.result().finish_reason == "length"


def test_logprobs_come_with_their_tokens_where_they_were_asked_for(make):
    handle, silent = make(logprobs=0), make()
    logprobs = [TokenLogprobs(token, -float(token), ()) for token in range(5, 9)]
    handle.sequence.logprobs += logprobs  # of the last the token was not emitted: the round failed
    for each in (handle, silent):
        emit(each, 5, 6, 7)
        first = each.take()
        each.end("error", 1.0)
        asked = each is handle
        assert (first.logprobs, each.take().logprobs) == ((logprobs[:3], []) if asked else (None, None))
        assert each.result().logprobs == (logprobs[:3] if asked else None)


def test_the_end_s_reason_is_the_sequence_s_own_if_it_has_one(make):
    cut, whole = make(), make(max_new_tokens=1)
    cut.end("deadline", 1.0)
    emit(whole, 5)
    whole.end("cancelled", 1.0)
    assert [handle.result().finish_reason for handle in (cut, whole)] == ["deadline", "length"]


class Panic(BaseException):
    """As what a tokenizer written in Rust raises when it panics: no Exception."""


@pytest.mark.parametrize("where", ["push", "text", "finish"])
@pytest.mark.parametrize("error", [ValueError("no text"), Panic("no text")])
def test_a_tokenizer_that_raises_ends_its_request_and_not_the_worker(hash_engine, where, error):
    engine = hash_engine(batch_size=2)

    class Tokens:
        text = "" if where != "text" else property(lambda self: self.fail("text"))

        def fail(self, place):
            if place == where:
                raise error
            return False

        def push(self, token):
            return self.fail("push")

        def finish(self):
            self.fail("finish")

    ((sequence,), _) = engine.requests("ab", SHORT, "raise")
    sequence.detokenizer = Tokens()
    result = engine.scheduler.submit(sequence).result(60)
    assert str(result.error) == f"decoding failed, {type(error).__name__}: no text"
    assert result.error.__cause__ is error
    assert engine.generate("cd", SHORT)[0].token_ids == expected(hash_engine, "cd", SHORT)
    assert engine.health().state == "idle"
    at_rest(engine)


def test_a_result_that_does_not_come_in_time(make):
    handle = make()
    with pytest.raises(TimeoutError, match=r"^no result after 0.01 s: the request goes on, wait again or cancel"):
        handle.result(0.01)
    handle.end("length", 1.0)
    assert handle.result(0.01) is handle.result()


def test_leaving_a_handle_s_chunks_cancels_nothing(make):
    handle = make()
    emit(handle, 5)
    for chunk in handle:
        assert chunk.token_ids == [5]
        break
    emit(handle, 6)
    handle.end("length", 1.0)
    assert [(chunk.token_ids, chunk.result is None) for chunk in handle] == [([6], False)]
    assert handle.asked == []


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["emit", "publish", "take"]), max_size=40), st.sampled_from([(), ("cd",), ("bb",)]))
def test_chunks_add_up_to_the_result(make, steps, stop):
    handle, chunks, emitted = make(max_new_tokens=99, stop=stop), list[Chunk | None](), 0
    for step in steps:
        if step == "emit" and not handle.sequence.finish_reason:
            emit(handle, (emitted := emitted + 1) % 5, publish=False)
        if step == "publish":
            handle.publish()
        if step == "take":
            chunks.append(handle.take())
    handle.end("cancelled", 1.0)
    *given, last = [chunk for chunk in (*chunks, handle.take()) if chunk]
    result = handle.result()
    assert (
        [token for chunk in (*given, last) for token in chunk.token_ids] == result.token_ids == handle.sequence.output
    )
    assert "".join(chunk.text for chunk in (*given, last)) == result.text
    assert last.result is result
    assert all(chunk.token_ids and chunk.result is None for chunk in given), "one without a token would say nothing"


def test_a_reader_gets_every_round(hash_engine):
    engine = hash_engine(gated=True)
    chunks = iter(engine.submit("ab", SamplingParams(max_new_tokens=5, speculation="off")))
    engine.gate.halted()
    for _ in range(4):
        engine.gate.step()
        assert len(next(chunks).token_ids) == 1
    engine.gate.open()
    assert [len(chunk.token_ids) for chunk in chunks] == [1]
