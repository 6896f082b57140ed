"""Scores: what a text's tokens are worth under a model, computed when nothing else is to do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import Log, running

from specbuild.runtime import AsyncEngine, Engine, SamplingParams
from specbuild.runtime.errors import EngineClosedError, ExecutionError
from specbuild.serve import scoring
from specbuild.serve.admission import Admission
from specbuild.serve.models import ServedModel
from specbuild.serve.scoring import WAITING, Score, Scorer, score


def scorer_of(engine: Any, log: Any) -> tuple[Scorer, ServedModel, list[Score]]:
    model = ServedModel(("m",), Path("m"), AsyncEngine(engine), {}, Admission(1, 4))
    return Scorer(model, log), model, []


def test_a_score_is_the_mean_of_the_logprobs_that_decoding_reports(engine: Engine) -> None:
    (result,) = engine.generate(["def main("], SamplingParams(max_new_tokens=8, logprobs=0))
    found = score(engine, engine.encode("def main("), result.token_ids, engine)
    mean = np.mean([each.logprob for each in result.logprobs or ()])
    assert found.logprob == pytest.approx(mean, abs=1e-4)
    assert 0 < found.entropy < np.log(engine.manifest.models["target"].vocab_size)
    assert found.divergence == pytest.approx(0, abs=1e-6)


def test_texts_wait_until_nothing_else_runs(engine: Engine, log: Log) -> None:
    scorer, model, found = scorer_of(engine, log)

    async def run() -> None:
        async with running(scorer.run()):
            with model.admission.room(1):
                assert scorer.offer([1, 2], [3], found.append)
                assert not scorer.offer([1, 2], [], found.append), "nothing to score"
                await asyncio.sleep(0.1)
                assert not found
            while not found:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert found[0].divergence is None


def test_what_waits_is_bounded_and_one_that_fails_fails_alone(
    engine: Engine, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[Any] = [ExecutionError("NaN"), Score(-1, 1, None), EngineClosedError("closed")]

    def scored(*_: Any) -> Any:
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(scoring, "score", scored)
    scorer, _, found = scorer_of(engine, log)
    assert [scorer.offer([1], [2], found.append) for _ in range(WAITING + 1)] == [True] * WAITING + [False]
    asyncio.run(asyncio.wait_for(scorer.run(), 30))
    assert found == [Score(-1, 1, None)]
    assert [line["message"] for line in log.lines] == ["a text could not be scored"]
