"""`specbuild distill`: a draft from a shell, and every bad input as one line."""

import json
import shutil

import pytest
from commands import COMMANDS, options_of

from specbuild.builder.distill import pipeline

FEW = ("--sequence-length", 24, "--depth", 2, "--generate", 96, "--batch-size", 2, "--steps", 2, "--seed", 3)


@pytest.mark.slow
def test_a_draft_is_made_and_described(specbuild, tiny, tmp_path):
    draft = tmp_path / "draft"
    outcome = specbuild("distill", tiny, "--out", draft, "--dtype", "fp32", *FEW)
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].startswith(f"{draft}: 0.2M parameters, 2048 tokens in its head")
    assert "acceptance length" in lines[1]
    assert lines[3] == f"  next: specbuild build --target {tiny} --draft {draft} -o {draft}.bundle"
    outcome = specbuild("distill", tiny, "--out", draft, "--force", "--json", *FEW)
    assert json.loads(outcome.out)["options"]["seed"] == 3
    assert not (tmp_path / "draft.training").exists()


@pytest.fixture
def configs(monkeypatch):
    """What the command asks of the training, which does not run."""
    asked = []
    monkeypatch.setattr(pipeline, "distill", lambda config, progress: asked.append(config) or {})
    return asked


def test_every_option_reaches_the_training(specbuild, tiny, tmp_path, configs):
    """Each has another value than its default, and is found in what is asked for."""
    other = {"kind": "parallel", "divergence": "tv", "init": "random", "device": "cpu", "dtype": "fp32"}
    other |= {"text": str(tiny), "on_policy": 0.25, "learning_rate": 0.5, "sequence_length": 99}
    needed = ["distill", tiny, "--out", tmp_path / "draft", "--json"]
    specbuild(*needed)
    names = {str(option.name) for option in options_of(COMMANDS["distill"])} - {"output", "quiet", "as_json"}
    for number, name in enumerate(sorted(names)):
        default = getattr(configs[0], name)
        value = other.get(name, True if default is False else 7 + number)
        specbuild(*needed, f"--{name.replace('_', '-')}", *([] if value is True else [value]))
        found = getattr(configs[-1], name)
        assert default != found in (value, (tiny,)), name


BAD = """
nowhere -o draft | does not exist
{tiny} -o draft --sequence-length 10 | at least 16
{tiny} -o draft --layers 9 | --init random
{tiny} -o draft --device cuda | drop --device cuda
{tiny} -o draft --text bad.jsonl | bad.jsonl:1
{tiny} -o draft --init foreign | another tokenizer
{tiny} -o draft --init folder | is empty
{tiny} -o draft --init damaged | does not fit its config.json
{tiny} -o bad.jsonl | not a folder
{tiny} -o damaged --force | not a draft that specbuild made
"""  # tests/builder/distill has the options that do not go together


@pytest.fixture
def work(tiny, tmp_path, monkeypatch):
    """The working folder, with texts and folders that are no drafts of this target."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text("{\n")
    (tmp_path / "folder").mkdir()
    for name in ("foreign", "damaged"):
        shutil.copytree(tiny, tmp_path / name)
    tokenizer = json.loads((tmp_path / "foreign" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "foreign" / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((tmp_path / "damaged" / "config.json").read_text())
    (tmp_path / "damaged" / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    return tmp_path


@pytest.mark.parametrize("case", BAD.strip().splitlines())
def test_bad_input_is_one_line(specbuild, tiny, work, case):
    line, message = case.split(" | ")
    target, *arguments = line.format(tiny=tiny).split()
    before = sorted(path.name for path in work.iterdir())
    outcome = specbuild("distill", target, *(FEW[:4] if "--text" in arguments else FEW), *arguments)
    assert message in outcome.refusal()
    assert sorted(path.name for path in work.iterdir()) == before
