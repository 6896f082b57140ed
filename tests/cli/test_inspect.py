"""`specbuild inspect`: manifest and report, after every hash was checked."""

import json

import pytest
from campaign.bundle_copy import put


def test_json_is_manifest_and_report(specbuild, bundle):
    outcome = specbuild("inspect", bundle, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    content = json.loads(outcome.out)
    assert list(content) == ["manifest", "report"]
    for name in content:
        assert content[name] == json.loads((bundle / f"{name}.json").read_text(encoding="utf-8"))


def test_the_table(specbuild, bundle, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    outcome = specbuild("inspect", bundle)
    assert (outcome.status, outcome.err) == (0, "")
    for word in (str(bundle), "onnxruntime, fp32", "1024 tokens", "4 sequences", "best:5", "5.8M", "1.0M", "near-ties"):
        assert word in outcome.out
    assert "token by token, 4096 of the target's 4096 tokens" in outcome.out


def test_the_graph_before_and_after(specbuild, bundle, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    outcome = specbuild("inspect", bundle, "--graph")
    assert (outcome.status, outcome.err) == (0, "")
    lines = [line.split() for line in outcome.out.splitlines()]
    for line in (["operator", "exported", "fused", "lowered"], ["ReduceMean", "13"], ["TreeAttention", "6", "6", "6"]):
        assert line in lines
    for name in ("target:", "draft:"):
        (title,) = (line for line in lines if line and line[0] == name)
        assert "FuseQKV" in title


def test_a_chat_template_is_seen(specbuild, tiny_bundle):
    (line,) = (line for line in specbuild("inspect", tiny_bundle).out.splitlines() if "chat template" in line)
    assert line.split()[-1] == "yes"


def test_the_rounds_of_a_gpu_s_bundle_and_a_report_that_is_none(specbuild, bundle_copy):
    put(bundle_copy, "report.json", b"[]", hashed=True, backend="onnxruntime-cuda")
    found = json.loads(specbuild("inspect", bundle_copy, "--device-loop").out)
    assert (found["backend"], found["tree"]) == ("onnxruntime-cuda", "best:5")
    assert "report.json is no report of a build" in specbuild("inspect", bundle_copy).refusal()


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_export")
def test_what_quantization_cost(specbuild, make_checkpoint, tmp_path):
    """In words for a person, as JSON for a machine, and a clear line where nothing was quantized."""
    model = make_checkpoint(tmp_path / "model", num_hidden_layers=1)
    options = "--precision", "int8", "--draft-precision", "int4", "--max-batch-size", 1, "--max-kl", 9, "--no-tune"
    built = specbuild("build", "--target", model, "--draft", model, "-o", tmp_path / "b", *options)
    assert (built.status, built.err) == (0, "")
    assert "target: 0." in built.out
    shown = specbuild("inspect", tmp_path / "b", "--quality")
    assert (shown.status, shown.err) == (0, "")
    for word in ("nats a token", "perplexity", "acceptance length", "down_proj", "int8:", "int4:"):
        assert word in shown.out
    told = json.loads(specbuild("inspect", tmp_path / "b", "--quality", "--json").out)
    assert told == json.loads((tmp_path / "b" / "report.json").read_text(encoding="utf-8"))["quality"]
