"""Drift of served texts: the reference window, alarms and what they say, the sample for distill."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ended
import pytest
from fastapi.testclient import TestClient
from serving import Log

from specbuild.runtime.errors import OptionError
from specbuild.serve.arms import Draw
from specbuild.serve.drift import Drift, DriftOptions
from specbuild.serve.scoring import Score

SIZE = 500


def drift_of(log: Log, file: Path, **given: Any) -> Drift:
    return Drift(ended.models("m"), DriftOptions(reference=file, size=SIZE, **given), log)  # type: ignore[arg-type]


def traffic(drift: Drift, count: int, chance: float = 0.7, seed: int = 1, **more: Any) -> None:
    """Texts whose drafts of four come true with that chance."""
    rng = random.Random(seed)
    model = drift._models["m"]
    for _ in range(count):
        rounds = tuple(next((d for d in range(4) if rng.random() > chance), 4) for _ in range(12))
        text = ended.result(tokens=rng.randint(5, 50), reason=rng.choice(["stop", "length"]), accepted=rounds)
        drift.ended(ended.generation(model, text, **more))
    ended.settle(drift)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"size": 10}, "drift_size"),
        ({"score": 2}, "drift_score"),
        ({"sample_share": -1}, "drift_sample_share"),
        ({"reference": Path("no/such/file")}, "no folder"),
        ({"sample": Path("no/such/file")}, "no folder"),
    ],
)
def test_what_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        DriftOptions(**{"reference": Path("file")} | given)


def test_a_stale_draft_is_told_with_what_to_do(log: Log, tmp_path: Path) -> None:
    drift = drift_of(log, tmp_path / "reference.json")
    traffic(drift, SIZE + 200)
    assert not log.lines
    traffic(drift, 500, chance=0.55, seed=2)
    stale = [line for line in log.lines if line["message"].startswith("the draft is stale")]
    assert {line["signal"] for line in stale} >= {"acceptance", "acceptance_1"}
    assert all(line["recent"] < line["reference"] for line in stale)
    assert any("specbuild distill" in line["message"] for line in log.lines)
    assert drift.watched["m"].alarms["acceptance"] > 0
    assert drift.watched["m"].alarms["tokens"] == 0
    told = {sample.labels["signal"]: sample.value for sample in next(iter(drift.collect())).samples}
    assert told["acceptance"] > 0.25 > told["tokens"]


def test_the_reference_is_kept_and_belongs_to_its_bundle(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "reference.json"
    traffic(drift_of(log, file), SIZE - 100)
    again = drift_of(log, file)
    assert (len(again.watched["m"].collected["tokens"]), again.watched["m"].signals) == (SIZE - 100, {}), "not full"
    traffic(again, 100, seed=3)
    again = drift_of(log, file)
    assert again.watched["m"].signals.keys() >= {"tokens", "cut", "acceptance", "acceptance_4"}
    traffic(again, 500, chance=0.55, seed=2)
    assert log.lines
    monkeypatch.setattr(ended, "DIGEST", "e" * 64)
    with pytest.raises(OptionError, match="something else"):
        drift_of(log, file)


def test_what_a_killed_server_has_collected_is_nearly_all_kept(log: Log, tmp_path: Path) -> None:
    file = tmp_path / "reference.json"
    drift = drift_of(log, file)
    for number in range(SIZE // 2 + 1):
        drift.tell("m", {"tokens": float(number)})
    kept = drift_of(log, file).watched["m"].collected["tokens"]
    assert len(kept) == SIZE // 2
    assert not drift_of(log, file).watched["m"].collected["cut"]


@pytest.mark.parametrize("part", ["models", "filling"])
@pytest.mark.parametrize("models", [[], {"m": {"colour": [1.0]}}, {"m": {"tokens": []}}, {"m": {"tokens": ["x"]}}])
def test_a_reference_that_is_none_is_refused(log: Log, tmp_path: Path, part: str, models: Any) -> None:
    file = tmp_path / "reference.json"
    file.write_text(json.dumps({"drift": {"m": ended.DIGEST}, "models": {}, part: models}))
    with pytest.raises(OptionError, match="is no state"):
        drift_of(log, file)


def test_a_canarys_candidates_and_failures_are_left_out(log: Log, tmp_path: Path) -> None:
    drift = drift_of(log, tmp_path / "reference.json")
    traffic(drift, 5, draw=Draw(True, 0.5, 0))
    traffic(drift, 5, status=499)
    assert not drift.watched["m"].collected["tokens"]
    traffic(drift, 5, draw=Draw(False, 0.5, 0))
    assert len(drift.watched["m"].collected["tokens"]) == 5


def test_texts_are_sampled_where_asked_for_and_a_full_disk_ends_that(log: Log, tmp_path: Path) -> None:
    sample = tmp_path / "folder" / "live.jsonl"
    sample.parent.mkdir()
    drift = drift_of(log, tmp_path / "reference.json", sample=sample, sample_share=0.5)
    traffic(drift, 60)
    assert 15 < len(sample.read_text().splitlines()) < 45
    sample.unlink()
    sample.parent.rmdir()
    traffic(drift, 20)
    assert [line["message"] for line in log.lines] == ["no more texts are sampled"]


def test_scores_are_signals(log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drift = drift_of(log, tmp_path / "reference.json", score=1.0)
    monkeypatch.setattr(drift._scorers["m"], "offer", lambda prompt, tokens, tell: tell(Score(-1.5, 2.0, None)))
    traffic(drift, 3)
    collected = drift.watched["m"].collected
    assert (collected["logprob"], collected["entropy"]) == ([-1.5] * 3, [2.0] * 3)


def test_a_server_watches_its_texts(make_client: Callable[..., TestClient], tmp_path: Path) -> None:
    client = make_client(drift=DriftOptions(reference=tmp_path / "reference.json"))
    asked = {"prompt": "def main(", "max_tokens": 8, "logprobs": 0}
    assert client.post("/v1/completions", json=asked).status_code == 200
    (drift,) = client.service.watchers  # type: ignore[attr-defined]
    ended.settle(drift)
    collected = drift.watched["pycode"].collected
    assert collected["tokens"] == [8]
    assert collected["logprob"][0] < 0, "known for nothing where a client asks for it"
    assert 'drift_alarms_total{model_name="pycode",signal="tokens"} 0.0' in client.get("/metrics").text


def test_it_runs_until_it_is_cancelled(log: Log, tmp_path: Path) -> None:
    async def run() -> None:
        task = asyncio.create_task(drift_of(log, tmp_path / "reference.json", score=0.5).run())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
