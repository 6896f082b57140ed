"""The workload: prompts by name and file, trees and concurrencies in a list, and what is refused."""

import json

import pytest

from specbuild.measure.bench.workload import concurrencies, contenders, load
from specbuild.runtime import Bundle, SamplingParams
from specbuild.runtime.errors import OptionError, PromptError

DEFAULTS = {"max_new_tokens": 7}


@pytest.fixture
def manifest(bundle):
    return Bundle.open(bundle).manifest


def write(tmp_path, *lines):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def test_fewer_prompts_are_spread_over_the_file(tmp_path):
    path = write(tmp_path, *({"prompt": str(i)} for i in range(10)))
    assert [each.prompt for each in load(path, None, 4, 0, DEFAULTS)] == ["0", "2", "5", "7"]
    assert [each.prompt for each in load(path, None, None, 0, DEFAULTS)] == [str(i) for i in range(10)]
    with pytest.raises(OptionError, match="--num-prompts 33 is more than the 32 prompts of"):
        load("pycode", None, 33, 0, DEFAULTS)


def test_seeds_count_up_and_a_line_s_own_stays(tmp_path):
    """What would change the measuring is left out."""
    own = {"prompt": "b", "seed": 5, "temperature": 1.0, "n": 3, "logprobs": 2, "deadline": 0.001}
    path = write(tmp_path, {"prompt": "a"}, own, {"prompt": "c"})
    assert [each.params for each in load(path, None, None, 2**64 - 1, DEFAULTS)] == [
        SamplingParams(max_new_tokens=7, seed=2**64 - 1),
        SamplingParams(max_new_tokens=7, seed=5, temperature=1.0),
        SamplingParams(max_new_tokens=7, seed=1),
    ]


def test_spec_bench(tmp_path):
    question = {"question_id": 81, "category": "writing", "turns": ["one", "two"]}
    path = write(tmp_path, question, question | {"category": "math"})
    found = load("spec_bench", path, None, 0, DEFAULTS)
    assert [(each.prompt, each.category) for each in found] == [("one", "writing"), ("one", "math")]
    assert {each.turns for each in found} == {("one", "two")}
    assert load(path, None, None, 0, DEFAULTS) == found
    with pytest.raises(OptionError, match="--dataset-path"):
        load("spec_bench", None, None, 0, DEFAULTS)
    with pytest.raises(OptionError, match="--prompts spec_bench"):
        load("pycode", path, None, 0, DEFAULTS)
    with pytest.raises(PromptError, match=":2: not a question of Spec-Bench"):
        load("spec_bench", write(tmp_path, question, {"prompt": "x"}), None, 0, DEFAULTS)


def test_a_list_of_trees_may_have_commas_in_it(manifest):
    for text in ("chain:4,best:16,topk:2,3", "chain:4 best:16; topk:2,3", " chain:4,best:16,chain:4,topk:2,3 "):
        assert contenders(text, manifest) == ["off", "auto", "chain:4", "best:16", "topk:2,3"]
    assert contenders(None, manifest) == ["off", "auto"]
    for text in ("", "star:3", "chain:4,", "topk:2", "chain:4,5", "topk:2,3,4", "off", "chain:64"):
        with pytest.raises(OptionError, match="tree"):
            contenders(text, manifest)


def test_concurrencies(manifest):
    assert concurrencies("4,1,2,1", manifest) == [1, 2, 4]
    with pytest.raises(OptionError, match="concurrency 5 is more than the 4 sequences"):
        concurrencies("1,5", manifest)
    for text in ("", "0", "1,", "1 2", "-1", "a", "1.5", "²"):
        with pytest.raises(OptionError, match="whole numbers"):
            concurrencies(text, manifest)
