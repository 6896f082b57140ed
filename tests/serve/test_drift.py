"""Drift of served texts: the reference window, alarms and what they say, the sample for distill."""

import asyncio
import json
import random
import shutil

import ended
import pytest
from serving import running

from specbuild.builder.quantize.texts import lines
from specbuild.runtime.errors import OptionError, OutputError
from specbuild.serve.drift.text_sample import Sample
from specbuild.serve.drift.watch import Drift, DriftOptions
from specbuild.serve.request.generation import Draw

SIZE = 500
MODELS = ended.models("m")


@pytest.fixture
def drift_of(log, tmp_path):
    """`drift_of(**DriftOptions)`: a watch whose reference is one file."""

    def make(models=MODELS, **given):
        return Drift(models, DriftOptions(reference=tmp_path / "reference.json", size=SIZE, **given), log)

    return make


def traffic(drift, count, chance=0.7, seed=1, **more):
    """Texts whose drafts of four come true with that chance."""
    rng = random.Random(seed)
    for _ in range(count):
        rounds = tuple(next((d for d in range(4) if rng.random() > chance), 4) for _ in range(12))
        text = ended.result(tokens=rng.randint(5, 50), reason=rng.choice(["stop", "length"]), accepted=rounds)
        drift.ended(ended.generation(MODELS.all[0], text, **more))
    ended.settle(drift)


def collected(drift, signal="tokens"):
    return drift.watched[MODELS.all[0].name].collected[signal]


@pytest.mark.slow
def test_a_stale_draft_is_told_with_what_to_do(log, drift_of):
    drift = drift_of()
    traffic(drift, SIZE + 200)
    assert not log.lines
    traffic(drift, 500, chance=0.55, seed=2)
    stale = [line for line in log.lines if line["message"].startswith("the draft is stale")]
    assert {line["signal"] for line in stale} == {"acceptance"}
    assert all(line["recent"] < line["reference"] for line in stale)
    assert any("specbuild distill" in line["message"] for line in log.lines)
    told = {sample.labels["signal"]: sample.value for sample in next(iter(drift.collect())).samples}
    assert told["acceptance"] > 0.25 > told["tokens"]


def test_the_reference_is_kept_and_belongs_to_its_bundle(log, drift_of, monkeypatch):
    traffic(drift_of(), SIZE - 100)
    again = drift_of()
    assert (len(collected(again)), again.watched["m"].signals) == (SIZE - 100, {}), "not full"
    traffic(again, 100, seed=3)
    again = drift_of()
    assert again.watched["m"].signals.keys() == {"tokens", "cut", "acceptance"}
    traffic(again, 500, chance=0.55, seed=2)
    assert log.lines
    monkeypatch.setattr(ended, "DIGEST", "e" * 64)
    with pytest.raises(OptionError, match="something else"):
        drift_of(models=ended.models("m"))


def test_what_a_killed_server_has_collected_is_nearly_all_kept(drift_of):
    drift = drift_of()

    async def run():
        async with running(drift.run()):
            for _ in range(SIZE // 2 + 1):
                drift.ended(ended.generation(MODELS.all[0], ended.result()))
            await drift.settled()
            assert len(collected(drift_of())) == SIZE // 2

    asyncio.run(run())


@pytest.mark.parametrize("part", ["models", "filling"])
@pytest.mark.parametrize("models", [[], {"m": {"colour": [1.0]}}, {"m": {"tokens": []}}, {"m": {"tokens": ["x"]}}])
def test_a_reference_that_is_none_is_refused(drift_of, tmp_path, part, models):
    told = {"drift": {"m": ended.DIGEST}, "models": {}, part: models}
    (tmp_path / "reference.json").write_text(json.dumps(told))
    with pytest.raises(OptionError, match="is no state"):
        drift_of()


@pytest.mark.parametrize(
    ("more", "count"), [({"draw": Draw(True, 0.5, 0)}, 0), ({"status": 499}, 0), ({"draw": Draw(False, 0.5, 0)}, 5)]
)
def test_a_canarys_candidates_and_failures_are_left_out(drift_of, more, count):
    traffic(drift := drift_of(), 5, **more)
    assert len(collected(drift)) == count


def test_texts_are_sampled_where_asked_for_and_a_lost_folder_ends_that(log, drift_of, tmp_path):
    sample = tmp_path / "folder" / "live.jsonl"
    sample.parent.mkdir()
    drift = drift_of(sample=sample, sample_share=0.5)
    traffic(drift, 60)
    assert 15 < len(sample.read_text().splitlines()) < 45
    shutil.rmtree(sample.parent)
    traffic(drift, 20)
    assert [line["message"] for line in log.lines] == ["no more texts are sampled"]


def test_a_sample_has_texts_for_distill_in_files_that_stay_small(tmp_path):
    engine = ended.Engine()
    sample = Sample(tmp_path / "live.jsonl", limit=150)
    for token in range(10):
        sample.add(engine, "m", [token], [3])
    assert {path.name for path in tmp_path.iterdir()} == {"live.jsonl", "live-before.jsonl"}
    assert all(path.stat().st_size <= 150 for path in tmp_path.iterdir())
    assert list(lines(sample.path, None))[-1] == "9 3"
    assert sample.path.stat().st_mode & 0o077 == 0
    with pytest.raises(OutputError, match="another place"):
        Sample(tmp_path / "no" / "live.jsonl").add(engine, "m", [1], [2])


def test_a_server_watches_its_texts(make_client, tmp_path):
    client = make_client(drift=DriftOptions(reference=tmp_path / "reference.json"))
    client.ask(max_tokens=8, logprobs=0)
    (drift,) = client.service.watchers
    ended.settle(drift)
    found = drift.watched["pycode"].collected
    assert found["tokens"] == [8]
    assert found["logprob"][0] < 0, "known for nothing where a client asks for it"
    assert client.series()['specbuild:drift_alarms_total{model_name="pycode",signal="tokens"}'] == 0.0


def test_it_runs_until_it_is_cancelled(drift_of):
    async def run():
        async with running(drift_of().run()):
            await asyncio.sleep(0.01)

    asyncio.run(run())
