"""A program of others against a server, in an environment of its own: lm-eval. Minutes."""

import json
import subprocess
import venv

import numpy as np
import pytest

from specbuild.runtime import Engine, TokenLogprobs

pytestmark = pytest.mark.soak
TASK = """\
task: code
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def environment(folder, *packages):
    """The programs of a new environment; skips where no index has the packages."""
    venv.create(folder, with_pip=True)
    command = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{packages[0]} cannot be installed here: {done.stderr.strip().splitlines()[-1][:200]}")
    return folder / "bin"


def test_lm_eval_scores_as_the_engine_does(server, bundle, pair, prompts, tmp_path):
    """Choices between the text that follows and the one that follows another prompt."""
    programs = environment(tmp_path / "lm-eval", "lm-eval[api]", "transformers>=5,<6")
    texts = [text for text in prompts if len(text) > 60 and text.isascii() and not text[0].isdigit()][:8]  # no literals
    rows = [
        {"prompt": text[:40], "choices": [text[40:60], texts[index - 1][40:60]], "answer": 0}
        for index, text in enumerate(texts)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "code.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    where = f"model=pycode,base_url={server.url}/v1/completions,tokenizer={pair / 'target'},num_concurrent=4"
    command = [programs / "lm_eval", "--model", "local-completions", "--model_args", where, "--tasks", "code"]
    command += ["--include_path", tmp_path, "--output_path", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (report,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(report.read_text())["results"]["code"]["acc,none"]
    with Engine.load(bundle) as engine:
        right = [np.argmax([score(engine, row["prompt"], choice) for choice in row["choices"]]) == 0 for row in rows]
    assert found == pytest.approx(np.mean(right))


def score(engine, prompt, text):
    """The logarithm of a text's probability after a prompt."""
    before, whole = len(engine.encode(prompt)), engine.encode(prompt + text)
    rows = engine.text_logits(whole[:-1])
    return sum(TokenLogprobs.of(rows[at - 1], whole[at], 0).logprob for at in range(before, len(whole)))
