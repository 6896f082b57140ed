"""Many callers, one loop: every request is answered, no slot is lost, and tokens are those of a quiet engine."""

import itertools
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from engine_checks import LONG, SHORT, at_rest, expected

from specbuild.runtime import SamplingParams
from specbuild.runtime.errors import EngineClosedError, PromptError, QueueFullError


def in_thread(function, *arguments):
    """A call in a thread of its own, and where its result will be."""
    out = []
    thread = threading.Thread(target=lambda: out.append(function(*arguments)))
    thread.start()
    return thread, out


def in_line(engine, prompt, params=SHORT):
    """The handle of a request that stands in line where the queue is full, as a window's do."""
    ((sequence,), _) = engine.requests(prompt, params, "raise")
    return engine.scheduler.submit(sequence)


def drain_begun(engine, *timeout):
    """A drain in a thread of its own, from when nothing new is taken."""
    started = in_thread(engine.drain, *timeout)
    while not (engine.scheduler.draining or engine.scheduler.closed):
        pass
    return started


FATES = ("wait", "stream", "cancel now", "cancel later", "deadline", "raises", "nan")


@pytest.mark.slow
def test_stress(hash_engine):
    """8 threads, 200 requests, with cancellations, deadlines and failures at random."""
    engine, quiet = hash_engine(batch_size=3, max_waiting=5), hash_engine()
    model = engine.model

    def one(rng):
        fate = rng.choice(FATES)
        prompt = [rng.randrange(9) for _ in range(rng.randint(1, 20))]
        prompt[0] = {"raises": model.RAISES, "nan": model.NAN}.get(fate, prompt[0])
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
        assert engine.usage.waiting <= 5 + 8, "those in line, and of each thread one that waits for its place"
        if fate == "stream":
            chunks = list(handle)
            assert [t for c in chunks for t in c.token_ids] == handle.result().token_ids
            assert "".join(c.text for c in chunks) == handle.result().text
        if fate == "cancel later":
            next(iter(handle))
        if fate.startswith("cancel"):
            handle.cancel()
        return prompt, params, fate, handle.result(timeout=60)

    def many(seed):
        rng = random.Random(seed)
        return [one(rng) for _ in range(25)]

    with ThreadPoolExecutor(8) as pool:
        answers = [answer for some in pool.map(many, range(8)) for answer in some]
    at_rest(engine)
    for prompt, params, fate, result in answers:
        times = result.metrics
        order = [t for t in (times.submitted, times.started, times.first_token, times.finished) if t is not None]
        assert order == sorted(order)
        assert (times.first_token is None) == (not result.token_ids)
        if fate in ("nan", "raises"):
            assert result.finish_reason == "error", result
            assert "the model raises" in str(result.error) or (fate == "nan" and "nan" in str(result.error))
            continue
        (alone,) = quiet.generate(prompt, replace(params, speculation="auto", deadline=None))
        whole = result.finish_reason == "length"
        assert result.token_ids == alone.token_ids[: None if whole else len(result.token_ids)], (fate, result)
        allowed = {"cancel now": "cancelled", "cancel later": "cancelled", "deadline": "deadline"}.get(fate, "length")
        assert result.finish_reason in (allowed, "length", "error")
        assert result.finish_reason != "error" or "the model raises" in str(result.error), "a step shared with it"
    reasons = Counter(result.finish_reason for *_, result in answers)
    assert min(reasons[r] for r in ("length", "cancelled", "deadline", "error")) > 5, reasons


def test_the_queue_holds_what_it_may(hash_engine):
    engine = hash_engine(batch_size=1, max_waiting=2, gated=True)
    handles = [engine.submit([i], SHORT, wait=False) for i in range(3)]  # one in the slot, two in the queue
    with pytest.raises(QueueFullError, match="holds 2"):
        engine.submit("a", SHORT, wait=False)
    late = in_line(engine, "a")
    assert not late.queued
    with pytest.raises(QueueFullError):  # nobody overtakes who stands in line
        engine.submit("a", SHORT, wait=False)
    thread, out = in_thread(engine.submit, "c", SHORT)  # which waits for its place
    while len(engine.scheduler.overflow) < 2:
        pass
    assert out == []
    handles[1].cancel()
    assert (late.queued, len(engine.scheduler.waiting)) == (True, 2)
    engine.gate.open()
    thread.join(60)
    assert [h.result().finish_reason for h in [*handles, late]] == ["length", "cancelled", "length", "length"]
    for handle, prompt in ((late, "a"), (out[0], "c")):
        assert handle.result().token_ids == expected(hash_engine, prompt, SHORT)


def test_lower_priorities_go_first_and_nobody_is_put_off(hash_engine):
    """Among equals who came first, in the queue of two and in line for it; what runs ends first, however low it is."""
    times = itertools.count()
    engine = hash_engine(batch_size=1, max_waiting=2, gated=True, clock=lambda: float(next(times)))
    handles = [engine.submit([0, 0], replace(SHORT, priority=9))]
    engine.gate.halted()
    for index, priority in enumerate((1, 0, -1, 0, -1, 1, -(2**31)), 1):
        handles.append(in_line(engine, [index, index], replace(SHORT, priority=priority)))
    engine.gate.open()
    results = [handle.result() for handle in handles]
    order = sorted(range(8), key=lambda index: results[index].metrics.started or 0.0)
    assert order == [0, 2, 7, 3, 5, 4, 1, 6], "the second had its place in the queue before the others came"
    assert results[0].metrics.finished < results[2].metrics.started
    assert [result.token_ids for result in results] == [expected(hash_engine, [i, i], SHORT) for i in range(8)]
    at_rest(engine)


def test_cancelling_frees_the_slot_before_the_next_round(hash_engine):
    engine = hash_engine(batch_size=1, gated=True)
    first, second = engine.submit("ab", LONG), engine.submit("cd", SHORT)
    engine.gate.halted()
    engine.gate.step()  # the first token is out, the second round about to begin
    engine.gate.step()
    first.cancel()
    assert not first.done
    engine.gate.step()
    assert first.done
    assert [h.sequence.tokens[:2] for h in engine.scheduler.active] == [[2, 3]]  # the next step is the second's
    engine.gate.open()
    result = first.result()
    assert result.finish_reason == "cancelled"
    assert result.token_ids == expected(hash_engine, "ab")[: len(result.token_ids)] != []
    assert second.result().token_ids == expected(hash_engine, "cd", SHORT)
    for handle in (first, second):
        handle.cancel()
    assert (first.result(), second.result().finish_reason) == (result, "length")
    at_rest(engine)


def test_deadlines_while_waiting_in_line_and_running(hash_engine, clock):
    engine = hash_engine(batch_size=1, max_waiting=1, gated=True, clock=clock)
    running = engine.submit("ab", replace(LONG, deadline=10))
    engine.gate.halted()
    waiting = [engine.submit("cd", replace(SHORT, deadline=2)), in_line(engine, "ef", replace(SHORT, deadline=1))]
    engine.gate.step()
    assert not any(handle.done for handle in (running, *waiting))
    clock.now = 2.0
    engine.gate.step()
    assert not running.done
    for handle in waiting:
        result = handle.result(0)
        assert (result.finish_reason, result.metrics.started, result.metrics.e2el) == ("deadline", None, 2.0)
    last = engine.submit("gh", replace(SHORT, deadline=100))
    clock.now = 10.0
    engine.gate.open()
    result = running.result()
    assert (result.finish_reason, result.metrics.e2el) == ("deadline", 10.0)
    assert result.token_ids == expected(hash_engine, "ab")[: len(result.token_ids)] != []
    assert last.result().token_ids == expected(hash_engine, "gh", SHORT)
    at_rest(engine)


def test_a_failing_step_is_the_result_of_all_in_it_and_of_no_other(hash_engine):
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


def test_logits_wait_for_what_runs_and_hold_what_waits(hash_engine):
    engine = hash_engine(batch_size=2, gated=True)
    running = engine.submit("ab", SHORT)
    engine.gate.halted()
    thread, out = in_thread(lambda: (engine.logits([1, 2, 3]).tolist(), running.done))
    engine.gate.open()
    thread.join(60)
    assert out == [(engine.model([1, 2, 3]).tolist(), True)]
    assert engine.text_logits([1, 2]).tolist() == [engine.model([1]).tolist(), engine.model([1, 2]).tolist()]
    with engine.scheduler.exclusive():
        waiting = engine.submit("cd", SHORT)
        assert (engine.usage.running, engine.usage.waiting) == (0, 1)
    assert waiting.result().token_ids == expected(hash_engine, "cd", SHORT)
    for bad in ([], [99], [1] * 192):
        with pytest.raises(PromptError):
            engine.logits(bad)


def test_closing_wakes_who_waits_for_an_exclusive_section(hash_engine):
    engine = hash_engine(batch_size=1, gated=True)
    engine.submit("ab", LONG)
    engine.gate.halted()

    def measure():
        try:
            engine.logits([1, 2, 3])
        except EngineClosedError:
            return "closed"
        return "measured"

    thread, out = in_thread(measure)
    while not engine.scheduler.exclusive_sections:
        pass
    closing, _ = in_thread(engine.close)
    engine.gate.open()
    closing.join(60)
    thread.join(60)
    assert (closing.is_alive(), thread.is_alive(), out) == (False, False, ["closed"])


def test_closing_cancels_everything_and_ends_the_worker(hash_engine):
    engine = hash_engine(batch_size=1, max_waiting=1, gated=True)
    handles = [engine.submit("ab", LONG), engine.submit("cd", LONG), in_line(engine, "ef", LONG)]
    engine.gate.halted()
    thread, _ = in_thread(engine.close)
    assert [h.result(60).finish_reason for h in handles[1:]] == ["cancelled"] * 2  # closing has begun
    engine.gate.open()
    thread.join(60)
    assert handles[0].result(0).finish_reason == "cancelled"
    engine.close()
    for call in (engine.generate, engine.stream, engine.submit, engine.logits):
        with pytest.raises(EngineClosedError, match="closed"):
            call([1])


def test_a_drain_finishes_100_requests_of_an_engine(hash_engine):
    """Single ones, whole batches whose windows have submitted little so far, and streams."""
    engine = hash_engine(batch_size=4, max_waiting=8, gated=True)
    prompts = [[i % 9, i // 9] for i in range(40)]
    asked = [in_thread(lambda: engine.generate(prompts, SHORT))]
    asked += [in_thread(lambda: [c.result for c in engine.stream(prompts, SHORT) if c.result])]
    asked += [in_thread(lambda prompt=prompt: [engine.submit(prompt, SHORT).result()]) for prompt in prompts[:20]]
    engine.gate.halted()
    while engine.usage.to_come + engine.usage.waiting + engine.usage.running < 100:
        pass
    draining, out = drain_begun(engine)
    engine.gate.open()
    for thread in (draining, *(thread for thread, _ in asked)):
        thread.join(60)
    assert out == [True]
    assert [result.finish_reason for _, (results,) in asked for result in results] == ["length"] * 100


def test_what_drains_takes_nothing_new(hash_engine):
    engine = hash_engine(gated=True)
    running = engine.submit("ab", SHORT)
    engine.gate.halted()
    ((late,), _) = engine.requests("cd", SHORT, "raise")
    draining, out = drain_begun(engine)
    calls = [
        *((call, [1]) for call in (engine.submit, engine.generate, engine.logits)),
        (engine.scheduler.submit, late),
    ]
    for call, given in (*calls, (lambda prompt: list(engine.stream(prompt)), [1])):
        with pytest.raises(EngineClosedError, match="the engine is draining and takes nothing new"):
            call(given)
    engine.gate.open()
    draining.join(60)
    assert (out, running.result(0).finish_reason) == ([True], "length")
    with pytest.raises(EngineClosedError, match="closed"):
        engine.submit("ab")


@pytest.mark.parametrize("timeout", [-1.0, 0.01])
def test_a_drain_that_takes_too_long_cancels_what_is_left(hash_engine, timeout):
    engine = hash_engine(batch_size=1, max_waiting=1, gated=True)
    handles = [engine.submit("ab", LONG), engine.submit("cd", LONG), in_line(engine, "ef", LONG)]
    engine.gate.halted()
    draining, out = in_thread(engine.drain, timeout)
    assert [handle.result(60).finish_reason for handle in handles[1:]] == ["cancelled"] * 2
    engine.gate.open()
    draining.join(60)
    assert (out, handles[0].result(0).finish_reason) == ([False], "cancelled")
    assert engine.drain() is False, "what was cancelled stays so"


def test_closing_ends_a_drain(hash_engine):
    engine = hash_engine(gated=True)
    handles = [engine.submit("ab", LONG), engine.submit("cd", LONG)]
    engine.gate.halted()
    draining, out = drain_begun(engine)
    closing, _ = in_thread(engine.close)
    assert handles[1].result(60).finish_reason == "cancelled"
    engine.gate.open()
    for thread in (draining, closing):
        thread.join(60)
        assert not thread.is_alive()
    assert (out, handles[0].result(0).finish_reason) == ([False], "cancelled")
    idle = hash_engine()
    assert (idle.drain(), idle.health().state, idle.drain(0)) == (True, "closed", True), "nothing was left"


def test_a_drain_waits_for_who_has_the_models_and_who_waits_for_them(hash_engine):
    engine = hash_engine(gated=True)
    running = engine.submit("ab", SHORT)
    engine.gate.halted()
    measuring, logits = in_thread(lambda: engine.logits([1, 2, 3]).tolist())
    while not engine.scheduler.exclusive_sections:
        pass
    waiting = engine.submit("cd", SHORT)
    draining, out = drain_begun(engine)
    engine.gate.open()
    for thread in (measuring, draining):
        thread.join(60)
    assert (logits, out) == ([engine.model([1, 2, 3]).tolist()], [True])
    assert [handle.result(0).finish_reason for handle in (running, waiting)] == ["length"] * 2


def test_cancelling_the_last_that_waits_ends_a_drain(hash_engine):
    engine = hash_engine(gated=True)
    with engine.scheduler.exclusive():
        waiting = engine.submit("cd", SHORT)
        draining, out = drain_begun(engine)
        waiting.cancel()
        assert out == [], "the models are somebody's still"
    draining.join(60)
    assert (out, waiting.result(0).finish_reason) == ([True], "cancelled")
