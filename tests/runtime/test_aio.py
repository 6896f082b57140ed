"""The asyncio engine can still be imported from where it was."""

import asyncio

import specbuild
from specbuild.runtime import SamplingParams, aio


def test_it_is_the_same_class():
    assert aio.AsyncEngine is specbuild.AsyncEngine
    assert aio.__all__ == ["AsyncEngine"]


def test_it_generates(hash_engine):
    engine, params = hash_engine(), SamplingParams(max_new_tokens=4)
    (result,) = asyncio.run(asyncio.wait_for(aio.AsyncEngine(engine).generate("ab", params), 60))
    assert result.token_ids == engine.generate("ab", params)[0].token_ids
