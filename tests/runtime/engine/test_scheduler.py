"""Many callers, one loop: every request is answered, no slot is lost, and tokens are those of a quiet engine."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from engine_checks import LONG, SHORT, at_rest, expected

from specbuild.runtime import Result, SamplingParams
from specbuild.runtime.errors import EngineClosedError, ExecutionError, PromptError, QueueFullError


def in_thread(function: Any, *arguments: Any) -> tuple[threading.Thread, list[Any]]:
    """A call in a thread of its own, and where its result will be."""
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(function(*arguments)))
    thread.start()
    return thread, out


def drain_begun(engine: Any, *timeout: float) -> tuple[threading.Thread, list[Any]]:
    """A drain in a thread of its own, from when nothing new is taken."""
    started = in_thread(engine.drain, *timeout)
    while not (engine.scheduler.draining or engine.scheduler.closed):
        pass
    return started


def test_stress(hash_engine: Any) -> None:
    """8 threads, 200 requests, with cancellations, deadlines and failures at random."""
    engine, quiet = hash_engine(batch_size=3, max_waiting=5), hash_engine()
    model, answers, lock = engine.model, list[tuple[list[int], SamplingParams, str, Result]](), threading.Lock()
    longest = list[int]()

    def one(rng: random.Random) -> None:
        fate = rng.choice(["wait", "stream", "cancel now", "cancel later", "deadline", "raises", "nan"])
        prompt = [rng.randrange(9) for _ in range(rng.randint(1, 20))]
        if fate in ("raises", "nan"):
            prompt[0] = {"raises": model.RAISES, "nan": model.NAN}[fate]
        params = SamplingParams(
            max_new_tokens=rng.randint(1, 40),
            temperature=rng.choice([0, 1]),
            seed=rng.randrange(5),
            speculation=rng.choice(["off", "auto", "chain:4"]),
            deadline=rng.choice([1e-9, 1e-3, 1e-2]) if fate == "deadline" else None,
        )
        try:
            handle = engine.submit(prompt, params, wait=rng.random() < 0.5)
        except QueueFullError:
            handle = engine.submit(prompt, params)
        longest.append(len(engine.scheduler.waiting))
        if fate == "stream":
            chunks = list(handle)
            assert [t for c in chunks for t in c.token_ids] == handle.result().token_ids
            assert "".join(c.text for c in chunks) == handle.result().text
        if fate == "cancel later":
            next(iter(handle))
        if fate.startswith("cancel"):
            handle.cancel()
        result = handle.result(timeout=60)
        with lock:
            answers.append((prompt, params, fate, result))

    def many(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(25):
            one(rng)

    threads = [threading.Thread(target=many, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 200
    assert max(longest) <= 5
    at_rest(engine)
    for *_, result in answers:
        times = result.metrics
        assert times.submitted is not None
        ended = times.finished
        assert ended is not None
        order = [t for t in (times.submitted, times.started, times.first_token, ended) if t is not None]
        assert order == sorted(order)
        assert (times.first_token is None) == (not result.token_ids)
        assert times.queue_time <= times.e2el
    for prompt, params, fate, result in answers:
        if fate == "nan":
            assert result.finish_reason in ("error",), result
            assert "nan" in str(result.error) or "the model raises" in str(result.error)
            continue
        if fate == "raises":
            assert "the model raises" in str(result.error)
            continue
        (alone,) = quiet.generate(prompt, SamplingParams(params.max_new_tokens, params.temperature, seed=params.seed))
        whole = result.finish_reason == "length"
        assert result.token_ids == alone.token_ids[: None if whole else len(result.token_ids)], (fate, result)
        allowed = {"cancel now": "cancelled", "cancel later": "cancelled", "deadline": "deadline"}.get(fate, "length")
        assert result.finish_reason in (allowed, "length", "error")
        assert result.finish_reason != "error" or "the model raises" in str(result.error)  # a step shared with it
    reasons = Counter(result.finish_reason for *_, result in answers)
    assert min(reasons[r] for r in ("length", "cancelled", "deadline", "error")) > 5, reasons
    assert engine.generate("abc", SHORT)[0].token_ids == expected(hash_engine, "abc", SHORT)


def test_the_queue_holds_what_it_may(hash_engine: Any) -> None:
    engine = hash_engine(batch_size=1, max_waiting=2, gated=True)
    handles = [engine.submit([i], SHORT, wait=False) for i in range(3)]  # one in the slot, two in the queue
    with pytest.raises(QueueFullError, match="holds 2"):
        engine.submit("a", SHORT, wait=False)
    ((sequence,), _) = engine.requests("a", SHORT, "raise")
    late = engine.scheduler.submit(sequence)
    assert (late.queued, len(engine.scheduler.waiting)) == (False, 2)
    with pytest.raises(QueueFullError):  # nobody overtakes who stands in line
        engine.submit("a", SHORT, wait=False)
    handles[1].cancel()
    assert (late.queued, len(engine.scheduler.waiting)) == (True, 2)
    engine.gate.open()
    assert [h.result().finish_reason for h in [*handles, late]] == ["length", "cancelled", "length", "length"]
    assert late.result().token_ids == expected(hash_engine, "a", SHORT)


def test_a_full_queue_makes_submit_wait(hash_engine: Any) -> None:
    engine = hash_engine(batch_size=1, max_waiting=1, gated=True)
    engine.submit("a", LONG)
    waiting = engine.submit("b", SHORT)
    thread, out = in_thread(engine.submit, "c", SHORT)
    while not engine.scheduler.overflow:
        pass
    assert out == []
    waiting.cancel()
    thread.join(60)
    engine.gate.open()
    assert out[0].result().token_ids == expected(hash_engine, "c", SHORT)


def test_a_free_slot_that_holds_the_beginning_is_taken(hash_engine: Any) -> None:
    """Else the one that has been free for longest; a text in use is copied."""
    engine, texts = hash_engine(batch_size=3, gated=True), [[index] * 10 for index in range(3)]
    handles = [engine.submit(text, SHORT) for text in texts]  # none ends before the last one has its slot
    engine.gate.open()
    for handle in handles:
        handle.result()
    for index in (2, 1, 2, 0):
        (result,) = engine.generate([*texts[index], 8], SHORT)
        assert result.metrics.num_cached_tokens == 10
        assert result.token_ids == expected(hash_engine, [*texts[index], 8], SHORT)
    assert engine.scheduler.free == [1, 2, 0]
    (result,) = engine.generate([6, 6], SHORT)
    assert (result.metrics.num_cached_tokens, engine.scheduler.free) == (0, [2, 0, 1])


def test_lower_priorities_go_first_and_nobody_is_put_off(hash_engine: Any) -> None:
    """Among equals who came first, in the queue of two and in line for it; what runs ends first, however low it is."""
    times = itertools.count()
    engine = hash_engine(batch_size=1, max_waiting=2, gated=True, clock=lambda: float(next(times)))
    asked = [SamplingParams(6, priority=priority, speculation="off") for priority in (9, 1, 0, -1, 0, -1, 1, -(2**31))]
    handles = [engine.submit([0, 0], asked[0])]
    engine.gate.halted()
    for index, params in enumerate(asked[1:], 1):
        ((sequence,), _) = engine.requests([index, index], params, "raise")
        handles.append(engine.scheduler.submit(sequence))
    scheduler = engine.scheduler
    assert [h.sequence.tokens[0] for h in scheduler.waiting] == [2, 1]
    assert [h.sequence.tokens[0] for h in scheduler.overflow] == [7, 3, 5, 4, 6]
    engine.gate.open()
    results = [handle.result() for handle in handles]
    order = sorted(range(8), key=lambda index: results[index].metrics.started or 0.0)
    assert order == [0, 2, 7, 3, 5, 4, 1, 6], "the second had its place in the queue before the others came"
    assert results[0].metrics.finished < results[2].metrics.started
    for index, result in enumerate(results):
        assert result.token_ids == expected(hash_engine, [index, index], SHORT)
    at_rest(engine)


def test_salts_keep_cached_prompts_apart(hash_engine: Any) -> None:
    engine, prompt = hash_engine(batch_size=2), [1, 2, 3, 4, 5, 6, 7, 8]
    cached = []
    for salt in (None, "a", "b", "a", None, "b", "c"):
        (result,) = engine.generate(prompt, replace(SHORT, cache_salt=salt))
        assert result.token_ids == expected(hash_engine, prompt, SHORT)
        cached.append(result.metrics.num_cached_tokens)
    assert cached == [0, 0, 0, 7, 0, 0, 0], "two slots hold the latest two salts"


def test_cancelling_frees_the_slot_before_the_next_round(hash_engine: Any) -> None:
    engine = hash_engine(batch_size=1, gated=True)
    first, second = engine.submit("ab", LONG), engine.submit("cd", SHORT)
    engine.gate.halted()
    engine.gate.step()  # the first token is out, the second round about to begin
    engine.gate.step()
    first.cancel()
    first.cancel()
    assert not first.done
    engine.gate.step()
    assert first.done
    assert [h.sequence.tokens[:2] for h in engine.scheduler.active] == [[2, 3]]  # the next step is the second's
    engine.gate.open()
    result = first.result()
    assert result.finish_reason == "cancelled"
    assert 1 <= len(result.token_ids) < 100
    assert result.token_ids == expected(hash_engine, "ab")[: len(result.token_ids)]
    assert second.result().token_ids == expected(hash_engine, "cd", SHORT)
    first.cancel()
    second.cancel()
    assert (first.result(), second.result().finish_reason) == (result, "length")
    at_rest(engine)


def test_deadlines_while_waiting_in_line_and_running(hash_engine: Any, clock: Any) -> None:
    engine = hash_engine(batch_size=1, max_waiting=1, gated=True, clock=clock)
    running = engine.submit("ab", SamplingParams(max_new_tokens=100, deadline=10))
    engine.gate.halted()
    waiting = engine.submit("cd", SamplingParams(deadline=2))
    ((sequence,), _) = engine.requests("ef", SamplingParams(deadline=1), "raise")
    standing = engine.scheduler.submit(sequence)
    engine.gate.step()
    assert [h.done for h in (running, waiting, standing)] == [False] * 3
    clock.now = 2.0
    engine.gate.step()
    assert not running.done
    for handle in (waiting, standing):
        never = handle.result(0).metrics
        assert (handle.result(0).finish_reason, never.started, never.first_token) == ("deadline", None, None)
        assert (never.queue_time, never.ttft, never.e2el) == (2.0, 0.0, 2.0)
    last = engine.submit("gh", SamplingParams(max_new_tokens=6, deadline=100))
    clock.now = 10.0
    engine.gate.open()
    result = running.result()
    assert result.finish_reason == "deadline"
    assert result.token_ids == expected(hash_engine, "ab")[: len(result.token_ids)] != []
    assert (result.metrics.queue_time, result.metrics.ttft, result.metrics.e2el) == (0.0, 0.0, 10.0)
    assert last.result().token_ids == expected(hash_engine, "gh", SHORT)
    at_rest(engine)


def test_a_failing_sequence_fails_alone(hash_engine: Any) -> None:
    engine = hash_engine(batch_size=3)
    for params in (SHORT, SamplingParams(max_new_tokens=6, temperature=1.0, top_p=0.9, seed=1)):
        one, bad, other = engine.generate(["ab", [engine.model.NAN, 1], "cd"], params)
        assert (bad.finish_reason, bad.token_ids) == ("error", [])
        assert isinstance(bad.error, ExecutionError)
        assert "nan" in str(bad.error)
        assert bad.to_dict()["error"] == str(bad.error)
        for prompt, result in (("ab", one), ("cd", other)):
            assert result.token_ids == expected(hash_engine, prompt, params)
            assert "error" not in result.to_dict()
    at_rest(engine)


def test_a_failing_step_is_the_result_of_all_in_it_and_of_no_other(hash_engine: Any) -> None:
    engine = hash_engine(batch_size=2, gated=True)
    beside = engine.submit("ab", LONG)
    engine.gate.halted()
    bad, after = engine.submit([engine.model.RAISES], SHORT), engine.submit("cd", SHORT)
    engine.gate.open()
    for handle in (bad, beside):
        result = handle.result()
        assert result.finish_reason == "error"
        assert str(result.error) == "decoding failed, RuntimeError: the model raises"
        assert isinstance(result.error.__cause__, RuntimeError)
    assert beside.result().token_ids == expected(hash_engine, "ab")[: len(beside.result().token_ids)] != []
    assert after.result().token_ids == expected(hash_engine, "cd", SHORT)
    at_rest(engine)


def test_a_bug_in_the_worker_leaves_nobody_waiting(hash_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = hash_engine(batch_size=1, max_waiting=1, gated=True)
    handles = [engine.submit("ab", SHORT), engine.submit("cd", SHORT)]

    def release(slot: int) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine.loop, "release", release)
    engine.gate.open()
    for handle in handles:
        assert handle.result(timeout=60).finish_reason in ("error", "length")
    assert "a bug" in str(handles[1].result().error)
    with pytest.raises(EngineClosedError):
        engine.generate("ab")
    assert engine.drain(60) is False
    assert (engine.health().state, engine.health().error) == ("failed", "RuntimeError('a bug')")


def test_logits_wait_for_what_runs_and_hold_what_waits(hash_engine: Any) -> None:
    engine = hash_engine(batch_size=2, gated=True)
    running = engine.submit("ab", SHORT)
    engine.gate.halted()
    thread, out = in_thread(lambda: (engine.logits([1, 2, 3]).tolist(), running.done))
    engine.gate.open()
    thread.join(60)
    assert out == [(engine.model([1, 2, 3]).tolist(), True)]
    assert engine.text_logits([1, 2]).tolist() == [engine.model([1]).tolist(), engine.model([1, 2]).tolist()]
    with engine.scheduler.exclusive() as loop:
        waiting = engine.submit("cd", SHORT)
        assert (engine.scheduler.active, len(engine.scheduler.waiting)) == ([], 1)
        assert loop.logits([4]).tolist() == [engine.model([4]).tolist()]
    assert waiting.result().token_ids == expected(hash_engine, "cd", SHORT)
    for bad in ([], [99], [1] * 192):
        with pytest.raises(PromptError):
            engine.logits(bad)


def test_closing_wakes_who_waits_for_an_exclusive_section(hash_engine: Any) -> None:
    engine = hash_engine(batch_size=1, gated=True)
    engine.submit("ab", LONG)
    engine.gate.halted()

    def measure() -> str:
        try:
            engine.logits([1, 2, 3])
        except EngineClosedError:
            return "closed"
        return "measured"

    thread, out = in_thread(measure)
    while not engine.scheduler._exclusive:
        pass
    closing, _ = in_thread(engine.close)
    engine.gate.open()
    closing.join(60)
    thread.join(60)
    assert (closing.is_alive(), thread.is_alive(), out) == (False, False, ["closed"])


def test_closing_cancels_everything_and_ends_the_worker(hash_engine: Any) -> None:
    engine = hash_engine(batch_size=1, max_waiting=1, gated=True)
    handles = [engine.submit("ab", LONG), engine.submit("cd", LONG)]
    ((sequence,), _) = engine.requests("ef", LONG, "raise")
    handles.append(engine.scheduler.submit(sequence))
    engine.gate.halted()
    thread, _ = in_thread(engine.close)
    assert [h.result(60).finish_reason for h in handles[1:]] == ["cancelled"] * 2  # closing has begun
    engine.gate.open()
    thread.join(60)
    assert handles[0].result(0).finish_reason == "cancelled"
    assert not any(t.name == "specbuild" and t is engine.scheduler._worker for t in threading.enumerate())
    engine.close()
    for call in (engine.generate, engine.stream, engine.submit):
        with pytest.raises(EngineClosedError, match="closed"):
            call("ab")
    with pytest.raises(EngineClosedError):
        engine.logits([1])


def test_a_drain_finishes_200_requests_of_an_engine(hash_engine: Any) -> None:
    """Single ones, whole batches whose windows have submitted little so far, and streams."""
    engine = hash_engine(batch_size=4, max_waiting=8, gated=True)
    prompts = [[i % 9, i // 9] for i in range(60)]
    generating = [in_thread(engine.generate, prompts, SHORT) for _ in range(2)]
    streaming = [in_thread(lambda: [c.result for c in engine.stream(prompts[:20], SHORT) if c.result]) for _ in "ab"]
    single = [in_thread(engine.submit, prompt, SHORT) for prompt in prompts[:40]]
    engine.gate.halted()
    while engine.usage.to_come + engine.usage.waiting + engine.usage.running < 200:
        pass
    assert engine.usage.to_come > 100
    draining, out = drain_begun(engine)
    with pytest.raises(EngineClosedError, match="draining and takes nothing new"):
        engine.submit("ab", SHORT)
    engine.gate.open()
    draining.join(60)
    results = list[Result]()
    for thread, found in (*generating, *streaming):
        thread.join(60)
        results += found[0]
    for thread, found in single:
        thread.join(60)
        results.append(found[0].result(0))
    assert (out, len(results)) == ([True], 200)
    assert {result.finish_reason for result in results} == {"length"}


def test_what_drains_takes_nothing_new(hash_engine: Any) -> None:
    engine = hash_engine(gated=True)
    running = engine.submit("ab", SHORT)
    engine.gate.halted()
    ((late,), _) = engine.requests("cd", SHORT, "raise")
    draining, out = drain_begun(engine)
    for call in (
        lambda: engine.submit("ab"),
        lambda: engine.generate("ab"),
        lambda: list(engine.stream("ab")),
        lambda: engine.logits([1]),
        lambda: engine.scheduler.submit(late),  # who was validated before, and comes too late
        lambda: engine.window([late], print, False),
    ):
        with pytest.raises(EngineClosedError, match="the engine is draining and takes nothing new"):
            call()
    engine.gate.open()
    draining.join(60)
    assert (out, running.result(0).finish_reason) == ([True], "length")
    with pytest.raises(EngineClosedError, match="closed"):
        engine.submit("ab")


@pytest.mark.parametrize("timeout", [-1.0, 0.01])
def test_a_drain_that_takes_too_long_cancels_what_is_left(hash_engine: Any, timeout: float) -> None:
    engine = hash_engine(batch_size=1, max_waiting=1, gated=True)
    handles = [engine.submit("ab", LONG), engine.submit("cd", LONG)]
    ((sequence,), _) = engine.requests("ef", LONG, "raise")
    handles.append(engine.scheduler.submit(sequence))
    engine.gate.halted()
    draining, out = in_thread(engine.drain, timeout)
    assert [handle.result(60).finish_reason for handle in handles[1:]] == ["cancelled"] * 2
    engine.gate.open()
    draining.join(60)
    assert (out, handles[0].result(0).finish_reason) == ([False], "cancelled")
    assert engine.drain() is False, "what was cancelled stays so"


def test_draining_what_does_nothing_closes_it(hash_engine: Any) -> None:
    engine = hash_engine()
    assert engine.drain() is True
    assert engine.health().state == "closed"
    assert engine.drain(0) is True
    closed = hash_engine()
    closed.close()
    assert closed.drain() is True, "nothing was left when it was closed"


def test_closing_ends_a_drain(hash_engine: Any) -> None:
    engine = hash_engine(gated=True)
    handles = [engine.submit("ab", LONG), engine.submit("cd", LONG)]
    engine.gate.halted()
    draining, out = drain_begun(engine)
    closing, _ = in_thread(engine.close)
    assert handles[1].result(60).finish_reason == "cancelled"
    late, found = in_thread(engine.drain)  # while it is being closed
    engine.gate.open()
    for thread in (draining, closing, late):
        thread.join(60)
        assert not thread.is_alive()
    assert (out, found, handles[0].result(0).finish_reason) == ([False], [False], "cancelled")


def test_a_drain_waits_for_who_has_the_models_and_who_waits_for_them(hash_engine: Any) -> None:
    engine = hash_engine(gated=True)
    running = engine.submit("ab", SHORT)
    engine.gate.halted()
    measuring, logits = in_thread(lambda: engine.logits([1, 2, 3]).tolist())
    while not engine.scheduler._exclusive:
        pass
    waiting = engine.submit("cd", SHORT)
    draining, out = drain_begun(engine)
    engine.gate.open()
    for thread in (measuring, draining):
        thread.join(60)
    assert (logits, out) == ([engine.model([1, 2, 3]).tolist()], [True])
    assert [handle.result(0).finish_reason for handle in (running, waiting)] == ["length"] * 2


def test_cancelling_the_last_that_waits_ends_a_drain(hash_engine: Any) -> None:
    engine = hash_engine(gated=True)
    with engine.scheduler.exclusive():
        waiting = engine.submit("cd", SHORT)
        draining, out = drain_begun(engine)
        waiting.cancel()
        assert out == [], "the models are somebody's still"
    draining.join(60)
    assert (out, waiting.result(0).finish_reason) == ([True], "cancelled")


def test_submitting_races_with_draining(hash_engine: Any) -> None:
    """Whoever was let in has the whole result, and whoever was not was told so."""
    for _ in range(10):
        engine = hash_engine(batch_size=2, max_waiting=1)
        results, refused, ready = list[Result](), list[str](), threading.Barrier(7)

        def ask(engine: Any = engine, results: Any = results, refused: Any = refused, ready: Any = ready) -> None:
            ready.wait(60)
            for number in range(50):
                try:
                    results.append(engine.submit([number % 9], SHORT).result(60))
                except EngineClosedError as error:
                    refused.append(str(error))
                    return

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        ready.wait(60)
        assert engine.drain(60) is True
        for thread in threads:
            thread.join(60)
        assert {result.finish_reason for result in results} <= {"length"}
        assert len(results) == 300 or refused
