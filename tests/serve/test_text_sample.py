"""The sample of live texts for `specbuild distill`: a share of them, in files of bounded size that the owner reads."""

import shutil

import ended
import pytest

from specbuild.builder.quantize.texts import lines
from specbuild.runtime.errors import OutputError
from specbuild.serve.text_sample import TextSample

(MODEL,) = ended.models("m").all


def traffic(sample, count, **more):
    for _ in range(count):
        sample.ended(ended.generation(MODEL, ended.result(), **more))


def test_a_share_of_texts_is_written_and_a_lost_folder_ends_that(log, tmp_path):
    path = tmp_path / "folder" / "live.jsonl"
    path.parent.mkdir()
    sample = TextSample(path, 0.5, log)
    traffic(sample, 60)
    traffic(sample, 60, status=499)
    ended.settle(sample)
    assert 15 < len(path.read_text().splitlines()) < 45
    shutil.rmtree(path.parent)
    traffic(sample, 20)
    ended.finish(sample)
    assert [line["message"] for line in log.lines] == ["no more texts are sampled"]


def test_files_stay_small_and_are_texts_for_distill(log, tmp_path):
    engine, sample = ended.Engine(), TextSample(tmp_path / "live.jsonl", 1.0, log, limit=150)
    for token in range(10):
        sample.add(engine, "m", [token, 3])
    assert {path.name for path in tmp_path.iterdir()} == {"live.jsonl", "live-before.jsonl"}
    assert all(path.stat().st_size <= 150 for path in tmp_path.iterdir())
    assert list(lines(sample.path, None))[-1] == "9 3"
    assert sample.path.stat().st_mode & 0o077 == 0
    with pytest.raises(OutputError, match="another place"):
        TextSample(tmp_path / "no" / "live.jsonl", 1.0, log).add(engine, "m", [1, 2])


def test_a_server_samples_its_texts(make_client, tmp_path):
    client = make_client(text_sample=tmp_path / "live.jsonl", text_sample_share=1.0)
    text = client.ask(max_tokens=8)["choices"][0]["text"]
    (sample,) = client.service.watchers
    ended.settle(sample)
    (line,) = lines(sample.path, None)
    assert line.endswith(text)
