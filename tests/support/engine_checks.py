"""What tests of an engine over a hash model ask again and again: that it is at rest, and what a quiet one would say."""

from specbuild.runtime import SamplingParams

LONG = SamplingParams(max_new_tokens=100)
SHORT = SamplingParams(max_new_tokens=6)


def at_rest(engine):
    """Nothing active, nothing waiting, every slot free."""
    scheduler = engine.scheduler
    with scheduler.exclusive():
        assert sorted(scheduler.free) == list(range(engine.batch_size))
        assert (scheduler.active, list(scheduler.waiting), list(scheduler.overflow)) == ([], [], [])


def expected(hash_engine, prompt, params=LONG):
    """A quiet engine's tokens."""
    (result,) = hash_engine().generate(prompt, params)
    assert result.error is None
    tokens = result.token_ids
    return tokens
