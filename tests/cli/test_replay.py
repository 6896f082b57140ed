"""`specbuild replay`: 0 where the tokens came again, 1 where others did, 2 where the receipt is of something else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime import Bundle, Chat, Engine, Prompt, SamplingParams
from specbuild.runtime.bundle.bundle import file_record
from specbuild.runtime.bundle.manifest import MANIFEST
from specbuild.runtime.engine.receipt import sha256
from specbuild.serve.oracle import without_prompt

from .conftest import CHAT_TEMPLATE, Outcome

Specbuild = Callable[..., Outcome]
TEXT, FILE = "import os\n", "chat_template.jinja"
MESSAGES = [{"role": "user", "content": "def main():"}]


@pytest.fixture(scope="module")
def chatty(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference pair's bundle with a chat template."""
    path = Path(shutil.copytree(bundle, tmp_path_factory.mktemp("replay") / "b"))
    (path / FILE).write_text(CHAT_TEMPLATE, encoding="utf-8")
    manifest = Bundle.open(path).manifest
    files = {**manifest.files, FILE: file_record(path / FILE)}
    (path / MANIFEST).write_text(replace(manifest, chat_template=FILE, files=files).to_json(), encoding="utf-8")
    return path


def receipt_of(bundle: Path, prompt: Prompt, **params: Any) -> dict[str, Any]:
    asked = SamplingParams(**{"max_new_tokens": 12, "temperature": 0.8, "seed": 5} | params)
    with Engine.load(bundle) as engine:
        (result,) = engine.generate([prompt], asked)
        return engine.receipt(engine.tokenizer.encode(prompt), asked, result).to_dict()


@pytest.fixture(scope="module")
def receipt(bundle: Path) -> dict[str, Any]:
    return receipt_of(bundle, TEXT)


@pytest.fixture
def written(tmp_path: Path, receipt: dict[str, Any]) -> Callable[..., Path]:
    """`written(body, **fields)`: a file of a receipt, in which these fields are others."""

    def write(body: dict[str, Any] | None = None, **fields: Any) -> Path:
        path = tmp_path / "receipt.json"
        path.write_text(json.dumps((body or receipt) | fields), encoding="utf-8")
        return path

    return write


def test_what_came_again_is_proven(specbuild: Specbuild, bundle: Path, written: Any) -> None:
    outcome = specbuild("replay", bundle, written(), "-p", TEXT)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == "proven: plain decoding and speculation give the 12 tokens\n"
    outcome = specbuild("replay", bundle, written(), "-p", TEXT, "--json")
    told = {"proven": True, "plain": True, "speculation": True, "whole": True, "same_class": True}
    assert (outcome.status, json.loads(outcome.out)) == (0, told | {"num_output_tokens": 12})


def test_a_response_has_one_for_each_choice(
    specbuild: Specbuild, bundle: Path, receipt: dict[str, Any], tmp_path: Path
) -> None:
    response = tmp_path / "response.json"
    response.write_text(json.dumps({"choices": [{"index": 1, "receipt": receipt}, {"index": 0}]}))
    assert specbuild("replay", bundle, response, "-p", TEXT, "--choice", 1).status == 0
    assert "choice 0 of the response has no receipt" in specbuild("replay", bundle, response, "-p", TEXT).refusal()


def test_what_a_shadow_oracle_kept_may_have_the_prompt(
    specbuild: Specbuild, bundle: Path, receipt: dict[str, Any], written: Any
) -> None:
    with Engine.load(bundle) as engine:
        prompt = engine.tokenizer.encode(TEXT)
    kept = {"receipt": receipt, "plain_token_ids": [1], "position": 0}
    outcome = specbuild("replay", bundle, written(kept | {"prompt_token_ids": prompt}))
    assert (outcome.status, outcome.out[:7]) == (0, "proven:")
    assert specbuild("replay", bundle, written(kept), "-p", TEXT).status == 0
    for body, given, words in (
        (kept, (), "give the prompt by one of"),
        (kept | {"prompt_token_ids": prompt}, ("-p", TEXT), "has the prompt: give no other"),
        (kept | {"prompt_token_ids": ["x"]}, (), "token ids"),
        ({"plain_token_ids": [1]}, ("-p", TEXT), "this is no receipt"),
    ):
        assert words in specbuild("replay", bundle, written(body), *given).refusal()


def test_a_prompt_that_is_known_by_a_keyed_hash_alone(
    specbuild: Specbuild, bundle: Path, receipt: dict[str, Any], written: Any, tmp_path: Path
) -> None:
    """As the oracle keeps it: the replay asks for the prompt, and knows it by the key beside the file."""
    with Engine.load(bundle) as engine:
        prompt = engine.tokenizer.encode(TEXT)
    defect = {"receipt": receipt, "plain_token_ids": [1], "position": 0, "prompt_token_ids": prompt}
    kept = without_prompt(defect, b"a key")
    told = json.dumps(kept)
    assert sha256(prompt) not in told
    assert "prompt_token_ids" not in told
    key = tmp_path / kept["key"]
    assert f"the key {key} of " in specbuild("replay", bundle, written(kept), "-p", TEXT).refusal()
    key.write_text(b"a key".hex() + "\n")
    outcome = specbuild("replay", bundle, written(kept), "-p", TEXT)
    assert (outcome.status, outcome.out[:7]) == (0, "proven:"), outcome
    moved = key.rename(tmp_path / "moved")
    assert specbuild("replay", bundle, written(kept), "-p", TEXT, "--key", moved).status == 0
    (other := tmp_path / "other").write_text("00")
    for body, given, words in (
        (kept, ("--key", moved), "give the prompt by one of"),
        (kept, ("--key", moved, "-p", "import re"), "none of the 1 prompts is the receipt's"),
        (kept, ("--key", other, "-p", TEXT), "none of the 1 prompts is the receipt's"),
        (kept | {"key": "../moved"}, ("-p", TEXT), "names no key"),
        (kept | {"prompt_hmac_sha256": 1}, ("-p", TEXT), "has no keyed hash"),
        (kept | {"receipt": 1}, ("--key", moved, "-p", TEXT), "this is no receipt"),
        (receipt, ("--key", moved, "-p", TEXT), "drop --key"),
    ):
        assert words in specbuild("replay", bundle, written(body), *given).refusal()
    other.write_text("x")
    assert "cannot be read" in specbuild("replay", bundle, written(kept), "-p", TEXT, "--key", other).refusal()


def test_what_was_cut_off_is_proven_as_far_as_it_came(specbuild: Specbuild, bundle: Path, written: Any) -> None:
    outcome = specbuild("replay", bundle, written(receipt_of(bundle, TEXT, deadline=1e-9)), "-p", TEXT)
    assert (outcome.status, outcome.out.split(": ")[0]) == (0, "proven")
    assert "the first 0 tokens" in outcome.out


def test_other_tokens_are_a_failure(specbuild: Specbuild, bundle: Path, written: Any) -> None:
    outcome = specbuild("replay", bundle, written(seed=6), "-p", TEXT)
    assert (outcome.status, outcome.err) == (1, "")
    assert outcome.out.startswith("DIFFERENT: plain decoding and speculation did not give the 12 tokens")
    assert outcome.out.count("\n") == 1
    outcome = specbuild("replay", bundle, written(output_sha256="0" * 64), "-p", TEXT, "--json")
    assert (outcome.status, json.loads(outcome.out)["proven"]) == (1, False)


def test_the_prompt_is_found_in_a_file(specbuild: Specbuild, bundle: Path, written: Any, tmp_path: Path) -> None:
    """Whatever other prompts are there, some of which no bundle takes."""
    lines = [{"prompt": "x" * 100_000}, {"prompt": "import sys", "seed": 3}, {"messages": MESSAGES}, {"prompt": TEXT}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = specbuild("replay", bundle, written(), "--prompts", file)
    assert (outcome.status, outcome.err) == (0, "")
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    assert "none of the 3 prompts" in specbuild("replay", bundle, written(), "--prompts", file).refusal()
    file.write_text(json.dumps(lines[1]))
    assert "another prompt" in specbuild("replay", bundle, written(), "--prompts", file).refusal()


@pytest.mark.parametrize("beside", [{}, {"add_generation_prompt": False, "chat_template_kwargs": {"x": 1}}])
def test_messages(specbuild: Specbuild, chatty: Path, written: Any, tmp_path: Path, beside: dict[str, Any]) -> None:
    """As they are, or in an object with what stands beside them."""
    chat = Chat(MESSAGES, None, beside.get("add_generation_prompt", True), beside.get("chat_template_kwargs", {}))
    body, file = receipt_of(chatty, chat), tmp_path / "messages.json"
    for content in [{"messages": MESSAGES, **beside}, *([] if beside else [MESSAGES])]:
        file.write_text(json.dumps(content))
        outcome = specbuild("replay", chatty, written(body), "--messages", file)
        assert (outcome.status, outcome.err) == (0, ""), outcome
    file.write_text(json.dumps([*MESSAGES, *MESSAGES]))
    assert "another prompt" in specbuild("replay", chatty, written(body), "--messages", file).refusal()
    file.write_text(json.dumps({"messages": MESSAGES, "temperature": 1}))
    assert "unknown field 'temperature'" in specbuild("replay", chatty, written(body), "--messages", file).refusal()
    file.write_text("{}")
    assert "messages must be" in specbuild("replay", chatty, written(body), "--messages", file).refusal()


def test_another_class_may_be_tried(specbuild: Specbuild, bundle: Path, receipt: Any, written: Any) -> None:
    body = receipt | {"exactness": receipt["exactness"] | {"digest": "0" * 64}}
    line = specbuild("replay", bundle, written(body), "-p", TEXT).refusal()
    assert "000000000000…" in line
    assert "--any-class" in line
    outcome = specbuild("replay", bundle, written(body), "-p", TEXT, "--any-class")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.endswith("the 12 tokens, in another exactness class\n")


def test_another_bundle_is_told_before_it_is_loaded(
    specbuild: Specbuild, chatty: Path, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "load", None)
    assert "another bundle" in specbuild("replay", chatty, written(), "-p", TEXT).refusal()
    assert "another bundle" in specbuild("replay", chatty, written(), "-p", TEXT, "--any-class").refusal()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "one of --prompt, --prompts and --messages"),
        (["-p", "x", "--prompts", "-"], "one of --prompt"),
        (["-p", "x"], "another prompt"),
        (["-p", ""], "empty"),
        (["--prompts", "/nonesuch"], "/nonesuch"),
        (["--messages", "/nonesuch"], "/nonesuch"),
        (["-p", TEXT, "-b", "9"], "batch size 9"),
        (["-p", TEXT, "-t", "0"], "threads"),
    ],
)
def test_refused(specbuild: Specbuild, bundle: Path, written: Any, arguments: list[str], words: str) -> None:
    assert words in specbuild("replay", bundle, written(), *arguments).refusal()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read as JSON"),
        (b"\xff", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"{}", "this is no receipt"),
        (b"[1]", "this is no receipt"),
        (b'{"choices": []}', "has no receipt"),
    ],
)
def test_what_is_no_receipt(specbuild: Specbuild, bundle: Path, tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    assert words in specbuild("replay", bundle, path, "-p", TEXT).refusal()


def test_a_receipt_that_was_changed(specbuild: Specbuild, bundle: Path, receipt: Any, written: Any) -> None:
    line = specbuild("replay", bundle, written(parameters=receipt["parameters"] | {"top_k": 3}), "-p", TEXT).refusal()
    assert "not those of its hash" in line
    hotter = receipt["parameters"] | {"temperature": 2}
    path = written(parameters=hotter, parameters_sha256=sha256(hotter))
    assert specbuild("replay", bundle, path, "-p", TEXT).status == 1


def test_a_receipt_that_is_not_there(specbuild: Specbuild, bundle: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        assert str(path) in specbuild("replay", bundle, path, "-p", TEXT).refusal()
