"""`specbuild replay`: 0 where the tokens came again, 1 where others did, 2 where the receipt is of something else."""

import json

import pytest

from specbuild.runtime import Chat, Engine, SamplingParams
from specbuild.runtime.engine.receipt import sha256
from specbuild.serve.shadow.shadow_check import without_prompt

TEXT = "import os\n"
MESSAGES = [{"role": "user", "content": "def main():"}]


def receipt_of(bundle, prompt, **params):
    asked = SamplingParams(**{"max_new_tokens": 12, "temperature": 0.8, "seed": 5} | params)
    with Engine.load(bundle) as engine:
        (result,) = engine.generate([prompt], asked)
        return engine.receipt(engine.tokenizer.encode(prompt), asked, result).to_dict()


@pytest.fixture(scope="module")
def receipt(bundle):
    return receipt_of(bundle, TEXT)


@pytest.fixture(scope="module")
def prompt(bundle):
    with Engine.load(bundle) as engine:
        return engine.tokenizer.encode(TEXT)


@pytest.fixture
def replay(specbuild, bundle, tmp_path):
    """`replay(body, *flags)`: the outcome for a file with this body, of the reference pair's bundle."""

    def run(body, *flags, of=bundle):
        path = tmp_path / "receipt.json"
        path.write_bytes(body if isinstance(body, bytes) else json.dumps(body).encode())
        return specbuild("replay", of, path, *flags)

    return run


def test_what_came_again_is_proven(replay, receipt, bundle):
    outcome = replay(receipt, "-p", TEXT)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == "proven: plain decoding and speculation give the 12 tokens\n"
    told = {"proven": True, "plain": True, "speculation": True, "whole": True, "same_class": True}
    assert json.loads(replay(receipt, "-p", TEXT, "--json").out) == told | {"num_output_tokens": 12}
    cut_off = replay(receipt_of(bundle, TEXT, deadline=1e-9), "-p", TEXT)
    assert (cut_off.status, "the first 0 tokens" in cut_off.out) == (0, True)


def test_other_tokens_are_a_failure(replay, receipt):
    outcome = replay(receipt | {"seed": 6}, "-p", TEXT)
    assert (outcome.status, outcome.err, outcome.out.count("\n")) == (1, "", 1)
    assert outcome.out.startswith("DIFFERENT: plain decoding and speculation did not give the 12 tokens")
    assert json.loads(replay(receipt | {"seed": 6}, "-p", TEXT, "--json").out)["proven"] is False
    hotter = receipt["parameters"] | {"temperature": 2}
    assert "not those of its hash" in replay(receipt | {"parameters": hotter}, "-p", TEXT).refusal()


def test_a_response_has_one_for_each_choice(replay, receipt):
    response = {"choices": [{"index": 1, "receipt": receipt}, {"index": 0}]}
    assert replay(response, "-p", TEXT, "--choice", 1).status == 0
    assert "choice 0 of the response has no receipt" in replay(response, "-p", TEXT).refusal()


def test_what_a_shadow_oracle_kept_may_have_the_prompt(replay, receipt, prompt):
    kept = {"receipt": receipt, "plain_token_ids": [1], "position": 0}
    whole = kept | {"prompt_token_ids": prompt}
    assert replay(whole).out.startswith("proven:")
    assert replay(kept, "-p", TEXT).status == 0
    for body, given, words in (
        (kept, (), "give the prompt by one of"),
        (whole, ("-p", TEXT), "has the prompt: give no other"),
        (kept | {"prompt_token_ids": ["x"]}, (), "token ids"),
        ({"plain_token_ids": [1]}, ("-p", TEXT), "this is no receipt"),
    ):
        assert words in replay(body, *given).refusal()


def test_a_prompt_that_is_known_by_a_keyed_hash_alone(replay, receipt, prompt, tmp_path):
    """As the oracle keeps it: the replay asks for the prompt, and knows it by the key beside the file."""
    defect = {"receipt": receipt, "plain_token_ids": [1], "position": 0, "prompt_token_ids": prompt}
    kept = without_prompt(defect, b"a key")
    assert not {sha256(prompt), "prompt_token_ids"} & {*json.dumps(kept).split('"')}
    key = tmp_path / kept["key"]
    assert f"the key {key} of " in replay(kept, "-p", TEXT).refusal()
    key.write_text(b"a key".hex() + "\n")
    assert replay(kept, "-p", TEXT).out.startswith("proven:")
    moved = key.rename(tmp_path / "moved")
    assert replay(kept, "-p", TEXT, "--key", moved).status == 0
    (tmp_path / "none").write_text("x")
    for body, name, words in (
        (kept, "none", "cannot be read"),
        (kept | {"prompt_hmac_sha256": 1}, "moved", "has no keyed hash"),
        (kept | {"key": "../moved"}, None, "names no key"),
        (receipt, "moved", "drop --key"),
    ):
        flags = ("--key", tmp_path / name) if name else ()
        assert words in replay(body, *flags, "-p", TEXT).refusal()
    assert "none of the 1 prompts is the receipt's" in replay(kept, "--key", moved, "-p", "x").refusal()


def test_the_prompt_is_found_in_a_file(replay, receipt, tmp_path):
    """Whatever other prompts are there, some of which no bundle takes."""
    lines = [{"prompt": "x" * 100_000}, {"prompt": "import sys", "seed": 3}, {"messages": MESSAGES}, {"prompt": TEXT}]
    file = tmp_path / "prompts.jsonl"
    for chosen, words in ((lines, "proven"), (lines[:3], "none of the 3 prompts"), (lines[1:2], "another prompt")):
        file.write_text("".join(json.dumps(line) + "\n" for line in chosen))
        outcome = replay(receipt, "--prompts", file)
        assert words in (outcome.out if words == "proven" else outcome.refusal())


@pytest.mark.parametrize("beside", [{}, {"add_generation_prompt": False, "chat_template_kwargs": {"x": 1}}])
def test_messages(replay, chatty, tmp_path, beside):
    """As they are, or in an object with what stands beside them."""
    chat = Chat(MESSAGES, None, beside.get("add_generation_prompt", True), beside.get("chat_template_kwargs", {}))
    body, file = receipt_of(chatty, chat), tmp_path / "messages.json"
    for content, words in (
        ({"messages": MESSAGES, **beside}, "proven"),
        (MESSAGES, "another prompt" if beside else "proven"),
        ({"messages": MESSAGES, "temperature": 1}, "unknown field 'temperature'"),
        ({}, "messages must be"),
    ):
        file.write_text(json.dumps(content))
        outcome = replay(body, "--messages", file, of=chatty)
        assert words in (outcome.out if words == "proven" else outcome.refusal())


def test_another_class_may_be_tried(replay, receipt):
    body = receipt | {"exactness": receipt["exactness"] | {"digest": "0" * 64}}
    assert "--any-class" in replay(body, "-p", TEXT).refusal()
    outcome = replay(body, "-p", TEXT, "--any-class")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.endswith("the 12 tokens, in another exactness class\n")


def test_refused(replay, receipt, chatty, monkeypatch):
    for body, flags, words in (
        (receipt, [], "one of --prompt, --prompts and --messages"),
        (receipt, ["-p", "x", "--prompts", "-"], "one of --prompt"),
        (receipt, ["-p", "x"], "another prompt"),
        (receipt, ["--messages", "/nonesuch"], "/nonesuch"),
        (receipt, ["-p", TEXT, "-b", "9"], "batch size 9"),
        (b"\xff", ["-p", TEXT], "cannot be read as JSON"),
        ([1], ["-p", TEXT], "this is no receipt"),
        ({"choices": []}, ["-p", TEXT], "has no receipt"),
    ):
        assert words in replay(body, *flags).refusal()
    monkeypatch.setattr(Engine, "load", None)  # another bundle is told before it is loaded
    assert "another bundle" in replay(receipt, "-p", TEXT, "--any-class", of=chatty).refusal()
