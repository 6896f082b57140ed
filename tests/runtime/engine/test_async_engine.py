"""The asyncio twin: the same results; cancelled tasks free their slots; a full queue waits or refuses."""

import asyncio
from contextlib import aclosing

import pytest
from engine_checks import LONG, SHORT, at_rest

from specbuild.runtime import AsyncEngine, LoadOptions, SamplingParams
from specbuild.runtime.errors import EngineClosedError, PromptError, QueueFullError


def run(main):
    return asyncio.run(asyncio.wait_for(main, 60))


def test_results_are_those_of_the_engine(hash_engine):
    engine, params = hash_engine(batch_size=2), SamplingParams(max_new_tokens=9, temperature=1.0, seed=2, n=2)
    prompts = [[i % 9, i] for i in range(9)]
    want = engine.generate(prompts, params)

    async def main():
        twin = AsyncEngine(engine)
        every = await asyncio.gather(*(twin.generate([prompt], params) for prompt in prompts))
        streamed = [chunk async for chunk in twin.stream(prompts, params)]
        ended = sorted(((c.index, c.sample), c.result) for c in streamed if c.result)
        for found in (await twin.generate(prompts, params), [r for some in every for r in some], [r for _, r in ended]):
            assert [r.token_ids for r in found] == [r.token_ids for r in want]
        assert sum(len(chunk.token_ids) for chunk in streamed) == sum(len(r.token_ids) for r in want)
        await asyncio.to_thread(at_rest, engine)

    run(main())


def test_a_cancelled_task_frees_its_slot(hash_engine):
    engine = hash_engine(batch_size=1, gated=True)

    async def main():
        twin = AsyncEngine(engine)
        task = asyncio.create_task(twin.generate(["ab", "cd"], LONG))
        await asyncio.to_thread(engine.gate.halted)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert list(engine.scheduler.waiting) == []
        engine.gate.open()
        (result,) = await twin.generate("ef", SHORT)
        assert result.finish_reason == "length"
        assert engine.stats.rounds < 10
        await asyncio.to_thread(at_rest, engine)

    run(main())


def test_leaving_a_stream_cancels_it(hash_engine):
    engine = hash_engine(batch_size=1)

    async def main():
        twin = AsyncEngine(engine)
        async with aclosing(twin.stream(["ab", "ef"], LONG)) as chunks:
            assert (await anext(chunks)).token_ids
        await asyncio.to_thread(at_rest, engine)
        async for _ in twin.stream("cd", LONG):
            break
        await asyncio.to_thread(at_rest, engine)
        assert engine.stats.emitted < 3 * 100

    run(main())


def test_a_full_queue_waits_or_refuses(hash_engine):
    engine = hash_engine(batch_size=1, max_waiting=1, gated=True)

    async def main():
        twin = AsyncEngine(engine)
        handles = [engine.submit("ab", SHORT), engine.submit("cd", SHORT)]
        for call in (twin.generate("ef", SHORT, wait=False), anext(twin.stream("ef", SHORT, wait=False))):
            with pytest.raises(QueueFullError):
                await call
        waiting = asyncio.create_task(twin.generate(["ef", "gh"], SHORT))
        engine.gate.open()
        assert [r.finish_reason for r in await waiting] == ["length", "length"]
        assert all(handle.done for handle in handles)

    run(main())


def test_errors(hash_engine):
    engine = hash_engine()

    async def main():
        twin, prompts = AsyncEngine(engine), ["ab", "", [engine.model.NAN]]
        for call in (twin.generate(prompts, SHORT), anext(twin.stream(prompts, SHORT))):
            with pytest.raises(PromptError, match="prompt 2"):
                await call
        results = await twin.generate(prompts, SHORT, errors="return")
        assert [r.finish_reason for r in results] == ["length", "error", "error"]
        await twin.close()
        with pytest.raises(EngineClosedError):
            await twin.generate("ab")

    run(main())


def test_an_event_loop_that_is_gone_does_not_stop_the_engine(hash_engine):
    """A loop that is closed without ending its tasks."""
    engine = hash_engine(batch_size=2, gated=True)
    loop = asyncio.new_event_loop()
    task = loop.create_task(anext(AsyncEngine(engine).stream("ab", SHORT)))
    loop.run_until_complete(loop.run_in_executor(None, engine.gate.halted))
    assert not task.done()
    task._log_destroy_pending = False  # or asyncio logs it into whichever test runs when it is collected
    loop.close()
    engine.gate.open()
    assert engine.generate("cd", SHORT)[0].finish_reason == "length"


def test_load_and_close(bundle):
    """A keyword goes before an option."""
    params, told = SamplingParams(max_new_tokens=8), list[str]()

    async def main():
        options = LoadOptions(threads=1, batch_size=1, max_waiting=3, on_finish=lambda result: told.append(result.text))
        async with await AsyncEngine.load(bundle, options, batch_size=2) as twin:
            assert (twin.engine.batch_size, twin.engine.usage.max_waiting) == (2, 3)
            (result,) = await twin.generate("def main(", params)
            assert "".join([chunk.text async for chunk in twin.stream("def main(", params)]) == result.text
            assert await twin.drain(60)
        assert twin.engine.health().state == "closed"
        assert told == [result.text] * 2

    run(main())
