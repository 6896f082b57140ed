"""A training as a whole: the same by its seed and after every interruption, and it learns."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from specbuild.builder.distill.pipeline import distill
from specbuild.runtime.errors import InputError, OptionError


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    ours, theirs = weights(one), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.nightly
def test_it_learns_what_it_is_shown(asked):
    config = asked(steps=60, eval_every=20, learning_rate=1e-2, generate=480, init="random", draft_vocab_size=4096)
    report = distill(config)
    first, last = report["curve"][1]["loss"], report["curve"][-1]["loss"]
    assert last < 0.8 * first
    assert report["acceptance_length"] == max(point["acceptance_length"] for point in report["curve"])
    assert (config.output / "tokenizer.json").is_file()
    assert list((config.output / "runs").iterdir())
    assert json.loads((config.output / "training.json").read_text()) == report


@pytest.mark.slow
def test_a_draft_can_be_gone_on_with(asked, tmp_path):
    first = asked(steps=2)
    distill(first)
    more = {"output": tmp_path / "parallel", "kind": "parallel", "draft_vocab_size": None}
    parallel = asked(init=str(first.output), steps=2, **more)
    assert distill(parallel)["began_as"] == {str(first.output): 12}
    written = json.loads((parallel.output / "config.json").read_text())
    assert (written["pard_token"], written["vocab_size"], len(written["draft_tokens"])) == (4096, 4097, 64)
    with pytest.raises(InputError, match="mask token"):
        distill(asked(output=tmp_path / "no", init=str(parallel.output), draft_vocab_size=None))
    assert not (tmp_path / "no.training").exists()


@pytest.mark.nightly
def test_killed_it_goes_on_and_ends_with_the_same_weights(asked, tmp_path):
    config = asked(steps=60, eval_every=30, save_every=5, device="cpu")
    killed = replace(config, output=tmp_path / "killed")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in config.to_dict().items()
             if name in ("generate", "sequence_length", "depth", "steps", "batch_size", "eval_every", "save_every",
                         "dtype", "device", "draft_vocab_size")]  # fmt: skip
    command = [sys.executable, "-c", "from specbuild.cli import main; main()", "distill", config.target]
    process = subprocess.Popen([*command, "--out", str(killed.output), *flags], stderr=subprocess.DEVNULL)
    while not (killed.work / "state.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not killed.output.exists()
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert distill(replace(killed, resume=True))["steps"] == 60
    distill(config)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state), "nobody else's random numbers are drawn"
    assert same(config.output, killed.output)
    other = replace(config, output=tmp_path / "other", seed=1)
    distill(other)
    assert not same(config.output, other.output)


def test_what_cannot_be_learned_from_leaves_nothing(asked):
    config = asked(generate=1)
    with pytest.raises(OptionError, match="too few to learn from"):
        distill(config)
    assert not config.work.exists()


def test_a_gpu_that_is_not_there_is_refused(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="drop --device cuda"):
        distill(asked(device="cuda"))
