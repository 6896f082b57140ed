"""The batch: a line out for each line in, in order, whatever is wrong with one of them."""

import json

import pytest

from specbuild.runtime import Engine, SamplingParams


@pytest.mark.slow
def test_a_line_for_each_line(example, bundle, tmp_path, capsys):
    prompts = [f"def f{i}(" for i in range(70)]  # more than the window
    lines = [json.dumps({"prompt": prompt, "max_new_tokens": 4}) for prompt in prompts]
    bad = ["{", "5", "{}", '{"prompt": ""}', '{"prompt": "x", "top_k": -1}', '{"prompt": "x", "tempratur": 1}']
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*lines[:35], *bad, *lines[35:]]) + "\n", encoding="utf-8")
    assert example("batch").main(str(bundle), str(source), str(target)) == 1
    out = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [each["finish_reason"] for each in out[35:41]] == ["error"] * 6
    for each, word in zip(out[35:41], ("JSON", "JSON object", "prompt", "empty", "top_k", "tempratur"), strict=True):
        assert word in each["error"]
    with Engine.load(bundle, batch_size=4) as engine:
        want = engine.generate(prompts, SamplingParams(max_new_tokens=4))
    assert [each["token_ids"] for each in out[:35] + out[41:]] == [result.token_ids for result in want]
    assert "6 lines failed" in capsys.readouterr().err
    source.write_text("\n".join(lines[:3]) + "\n", encoding="utf-8")
    assert example("batch").main(str(bundle), str(source), str(target)) == 0
    assert len(target.read_text(encoding="utf-8").splitlines()) == 3


def test_no_more_is_read_than_the_window(example, bundle):
    batch, read = example("batch"), list[int]()

    def lines():
        for i in range(200):
            read.append(i)
            yield '{"prompt": "x", "max_new_tokens": 1}'

    with Engine.load(bundle) as engine:
        for done, result in enumerate(batch.results(engine, lines())):
            assert result["finish_reason"] == "length"
            assert len(read) <= done + 1 + batch.WINDOW
