"""Grammars: a new one waits for no slow one."""

import asyncio
from contextlib import contextmanager
from threading import Event
from types import SimpleNamespace

import pytest

from specbuild.runtime import StructuredOutputs
from specbuild.serve.errors import ApiError
from specbuild.serve.request.grammars import GrammarCompiler

MAX = 3
SLOW, NEW = (StructuredOutputs(regex=text) for text in ("slow", "new"))


@contextmanager
def slow_ones(count):
    """A compiler with an engine, where so many slow grammars are being compiled."""
    ended = Event()

    def constraint(outputs):
        assert outputs != SLOW or ended.wait(60)
        return outputs.regex

    engine = SimpleNamespace(constraint=constraint)
    compiler = GrammarCompiler(MAX, wait_seconds=0.01)
    slow = [asyncio.ensure_future(compiler.constraint(engine, SLOW)) for _ in range(count)]
    try:
        yield compiler, engine, slow
    finally:
        ended.set()


def test_a_grammar_waits_for_no_slow_one():
    async def ask():
        with slow_ones(MAX - 1) as (compiler, engine, slow):
            await asyncio.sleep(0)
            assert await asyncio.wait_for(compiler.constraint(engine, NEW), 30) == "new"
        assert await asyncio.gather(*slow) == ["slow"] * len(slow)

    asyncio.run(ask())


def test_beyond_what_may_compile_a_new_one_is_refused():
    async def ask():
        with slow_ones(MAX) as (compiler, engine, slow):
            await asyncio.sleep(0)
            slow.pop().cancel()  # its client has left, and it compiles on
            with pytest.raises(ApiError) as refused:
                await compiler.constraint(engine, NEW)
            assert (refused.value.status, refused.value.code) == (429, "grammars_busy")
        await asyncio.gather(*slow)
        assert await compiler.constraint(engine, NEW) == "new"

    asyncio.run(ask())
