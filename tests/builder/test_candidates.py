"""`best` by building: what is chosen runs, and the report has a row for each precision."""

import json

import pytest

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.pipeline import build
from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.errors import OptionError


@pytest.mark.nightly
def test_a_build_takes_the_best(make_sharp_checkpoint, tmp_path, specbuild, monkeypatch):
    model = str(make_sharp_checkpoint(tmp_path / "model", num_hidden_layers=1))
    options = QuantizeOptions(calib_size=4, max_kl=10.0)
    config = BuildConfig(model, tmp_path / "b", precision="best:SIZE", max_batch_size=1, tune=False, quantize=options)
    target = build(config)["quality"]["models"]["target"]
    rows = {row["precision"]: row for row in target["compared"]["precisions"]}
    assert list(rows) == sorted(rows, key=lambda name: rows[name]["bytes"])
    assert set(rows) == {"int4", "int8", "fp32"}
    assert all(set(row["steps"]) == {"1", "2", "8", "32"} for row in rows.values())
    assert target["compared"]["chosen"] == next(iter(rows))
    assert target["weight_bytes"] == rows[target["compared"]["chosen"]]["bytes"]
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["precision"] == "best:size"
    with Engine.load(tmp_path / "b") as engine:
        assert engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))[0].token_ids
    monkeypatch.setenv("COLUMNS", "300")
    told = specbuild("inspect", tmp_path / "b", "--quality").out
    assert "best:size chose" in told


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"precision": "best:size", "backend": "tensorrt"}, "best:size times steps here"),
        ({"precision": "best:all"}, "has no precision 'best': .*, or of a whole model auto, best:size"),
        ({"precision": "int8", "draft": "self:best:size"}, "best:size is for the target: give --draft self:int4"),
        ({"precision": "int8", "draft": "d", "draft_precision": "best:kl"}, "best:kl is for the target"),
    ],
)
def test_where_it_cannot(tmp_path, fields, message):
    with pytest.raises(OptionError, match=message):
        BuildConfig("model", tmp_path / "b", **fields)
