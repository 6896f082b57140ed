"""`specbuild generate`: its objects, streams and parameters, what it refuses, and what it never imports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
PROMPT = "def main(argv):\n    "
METRICS = [
    "queue_time",
    "ttft",
    "tpot",
    "e2el",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_cached_tokens",
    "seed",
    "speculation",
]
STATISTICS = [
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "num_unsettled_steps",
    "num_recomputed_tokens",
    "decisions",
]
SAMPLED = ["--temperature", 1, "-n", 12]


def objects(outcome: Any) -> list[dict[str, Any]]:
    assert outcome.status == 0, outcome.err
    return [json.loads(line) for line in outcome.out.splitlines()]


def lines(tmp_path: Path, *requests: dict[str, Any]) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
    return path


def test_an_object_per_prompt(specbuild: Command, bundle: Path) -> None:
    outcome = specbuild("generate", bundle, "-p", PROMPT, "-n", 16, "--json")
    assert outcome.err == ""
    (result,) = objects(outcome)
    assert list(result) == ["index", "sample", "text", "token_ids", "finish_reason", "stop_reason", "metrics"]
    metrics = result["metrics"]
    assert list(metrics) == [*METRICS, "speculative_decoding"]
    assert list(metrics["speculative_decoding"]) == STATISTICS
    assert (len(result["token_ids"]), result["finish_reason"], metrics["num_output_tokens"]) == (16, "length", 16)
    assert 0 <= metrics["queue_time"] < metrics["ttft"] <= metrics["e2el"]
    stats = metrics["speculative_decoding"]
    assert sum(stats["acceptance_histogram"]) == stats["num_spec_steps"] > 0
    accepted = sum(count * times for count, times in enumerate(stats["acceptance_histogram"]))
    assert accepted == stats["num_accepted_draft_tokens"]
    assert stats["mean_acceptance_length"] == pytest.approx(1 + accepted / stats["num_spec_steps"])


def test_a_prompt_is_read_from_where_a_cache_has_it(specbuild: Command, bundle: Path) -> None:
    """A text that goes on; and not where it is not wanted. The tokens are the same."""
    (first,) = objects(specbuild("generate", bundle, "-p", PROMPT, "-n", 16, "--json"))
    prompts = ("-p", PROMPT, "-p", PROMPT + first["text"] + "\n\n", "-n", 16)
    reused, fresh = (
        objects(specbuild("generate", bundle, *prompts, flag, "--json"))
        for flag in ("--enable-prefix-caching", "--no-enable-prefix-caching")
    )
    cached = [result["metrics"]["num_cached_tokens"] for result in (*reused, *fresh)]
    assert cached[0] == cached[2] == cached[3] == 0
    prompt = reused[1]["metrics"]["num_prompt_tokens"]
    assert reused[0]["metrics"]["num_prompt_tokens"] + 12 <= cached[1] < prompt
    assert [result["token_ids"] for result in reused] == [result["token_ids"] for result in fresh]
    shown = specbuild("generate", bundle, *prompts, "--stats").err
    assert f"{prompt + fresh[0]['metrics']['num_prompt_tokens']} tokens, of which {cached[1]} were in a cache" in shown


def test_tokens_of_linear_caches(specbuild: Command, bundle: Path) -> None:
    line = specbuild("generate", bundle, "-p", PROMPT, "--kv-cache-tokens", 512).refusal()
    assert "the bundle's caches are not paged: drop kv_cache_tokens, or build it with --block-size" in line


def test_objects_come_in_the_prompts_order(specbuild: Command, bundle: Path) -> None:
    prompts = [PROMPT, "import os\n", "x", "class Reader:\n"]
    flags = [flag for prompt in prompts for flag in ("-p", prompt)]
    together = objects(specbuild("generate", bundle, *flags, "-n", 10, "-b", 3, "--json"))
    alone = [objects(specbuild("generate", bundle, "-p", p, "-n", 10, "--json"))[0] for p in prompts]
    assert [result["text"] for result in together] == [result["text"] for result in alone]
    assert len({result["text"] for result in alone}) == len(prompts)


def test_one_prompt_streams_its_text(specbuild: Command, bundle: Path) -> None:
    for prompt in (PROMPT, "日本語のテキスト = '"):
        (result,) = objects(specbuild("generate", bundle, "-p", prompt, "-n", 40, "--json"))
        outcome = specbuild("generate", bundle, "-p", prompt, "-n", 40)
        assert (outcome.status, outcome.out, outcome.err) == (0, result["text"] + "\n", "")


def test_several_prompts_are_titled(specbuild: Command, bundle: Path) -> None:
    results = objects(specbuild("generate", bundle, "-p", PROMPT, "-p", "x", "-n", 8, "--json"))
    outcome = specbuild("generate", bundle, "-p", PROMPT, "-p", "x", "-n", 8)
    assert outcome.out == "".join(f"=== {n} ===\n{result['text']}\n" for n, result in enumerate(results, 1))


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_statistics_go_to_stderr(specbuild: Command, bundle: Path, json_flag: list[str]) -> None:
    arguments = ["generate", bundle, "-p", PROMPT, "-n", 8, "--seed", 1, *json_flag]
    plain, outcome = specbuild(*arguments), specbuild(*arguments, "--stats")
    assert len(outcome.out.splitlines()) == len(plain.out.splitlines())
    assert json_flag or outcome.out == plain.out
    assert plain.err == ""
    for word in ("tokens/s", "time to first token", "mean acceptance length", "drafted"):
        assert word in outcome.err
        assert word not in outcome.out


def test_a_seed_is_reported_and_repeats(specbuild: Command, bundle: Path) -> None:
    first, second = (objects(specbuild("generate", bundle, "-p", PROMPT, *SAMPLED, "--json"))[0] for _ in range(2))
    seeds = [result["metrics"]["seed"] for result in (first, second)]
    assert seeds[0] != seeds[1]
    assert first["token_ids"] != second["token_ids"]
    again = objects(specbuild("generate", bundle, "-p", PROMPT, *SAMPLED, "--seed", seeds[0], "--json"))[0]
    assert (again["token_ids"], again["metrics"]["seed"]) == (first["token_ids"], seeds[0])


@pytest.mark.parametrize(
    "flags",
    [
        ["--no-speculation"],
        ["--tree", "chain:3"],
        ["--tree", "topk:3,2"],
        ["--drafter", "ngram"],
        ["--drafter", "model", "--tree", "best:9"],
        ["-b", 4, "-t", 1],
        ["--max-draft-tokens", 2],
        ["--num-speculative-tokens-per-batch-size", '{"1-2": 1}'],
    ],
)
def test_no_flag_of_speculation_changes_the_tokens(specbuild: Command, bundle: Path, flags: list[Any]) -> None:
    arguments = ["generate", bundle, "-p", PROMPT, *SAMPLED, "--top-p", 0.95, "--seed", 7, "--json"]
    (expected,) = objects(specbuild(*arguments))
    (result,) = objects(specbuild(*arguments, *flags))
    assert result["token_ids"] == expected["token_ids"]
    tree = flags[-1] if "--tree" in flags else "off" if "--no-speculation" in flags else "best:5"
    assert result["metrics"]["speculation"] == tree
    assert (result["metrics"]["speculative_decoding"]["num_spec_steps"] == 0) >= (tree == "off")


@pytest.mark.parametrize(
    "flags",
    [
        ["--seed", 8],
        ["--temperature", 0],
        ["--top-k", 1],
        ["--top-p", 0.01],
        ["--min-p", 1],
        ["--repetition-penalty", 5],
        ["--frequency-penalty", 5],
        ["--presence-penalty", 5],
    ],
)
def test_every_sampling_flag_counts(specbuild: Command, bundle: Path, flags: list[Any]) -> None:
    arguments = ["generate", bundle, "-p", PROMPT, "--temperature", 1.2, "-n", 30, "--seed", 7, "--json"]
    (expected,) = objects(specbuild(*arguments))
    (result,) = objects(specbuild(*arguments, *flags))
    assert result["token_ids"] != expected["token_ids"]


def test_stop_and_ignore_eos(specbuild: Command, tiny_bundle: Path, bundle: Path) -> None:
    (whole,) = objects(specbuild("generate", bundle, "-p", PROMPT, "-n", 40, "--json"))
    stop = whole["text"][5:8]
    (stopped,) = objects(specbuild("generate", bundle, "-p", PROMPT, "-n", 40, "--stop", stop, "--json"))
    assert stopped["text"] == whole["text"][: whole["text"].index(stop)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    ended = ["generate", tiny_bundle, "-p", "x", "--prompts", "-", "--json"]
    request = json.dumps({"prompt": "x", "logit_bias": {"0": 1000}, "max_new_tokens": 5}).encode()
    (result,) = objects(specbuild(*ended[:2], *ended[4:], "--prompts", "-", stdin=request))
    assert (result["token_ids"], result["finish_reason"], result["text"]) == ([0], "stop", "")
    (result,) = objects(specbuild(*ended[:2], *ended[4:], "--prompts", "-", "--ignore-eos", stdin=request))
    assert (result["token_ids"], result["finish_reason"]) == ([0] * 5, "length")


def test_samples_of_a_prompt(specbuild: Command, bundle: Path) -> None:
    arguments = ["generate", bundle, "-p", PROMPT, "-p", "x", *SAMPLED, "--seed", 5]
    results = objects(specbuild(*arguments, "--n", 2, "-b", 3, "--json"))
    assert [result["metrics"]["seed"] for result in results] == [5, 6, 5, 6]
    assert [(result["index"], result["sample"]) for result in results] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    alone = [objects(specbuild(*arguments[:-1], seed, "--json")) for seed in (5, 6)]
    expected = [result["token_ids"] for pair in zip(*alone, strict=True) for result in pair]
    assert [result["token_ids"] for result in results] == expected
    titles = [line for line in specbuild(*arguments, "--n", 2).out.splitlines() if line.startswith("=== ")]
    assert titles == ["=== 1.1 ===", "=== 1.2 ===", "=== 2.1 ===", "=== 2.2 ==="]


def test_log_probabilities(specbuild: Command, bundle: Path) -> None:
    (result,) = objects(specbuild("generate", bundle, "-p", PROMPT, "-n", 5, "--logprobs", 2, "--json"))
    assert [each["token_id"] for each in result["logprobs"]] == result["token_ids"]
    for each in result["logprobs"]:  # greedy: the emitted token is the best
        assert each["top"][0] == {"token_id": each["token_id"], "logprob": each["logprob"]}
        assert 0 > each["logprob"] > each["top"][1]["logprob"]
    (result,) = objects(specbuild("generate", bundle, "-p", PROMPT, "-n", 5, "--logprobs", 0, "--json"))
    assert [each["top"] for each in result["logprobs"]] == [[]] * 5


def test_a_deadline_leaves_what_there_is(specbuild: Command, bundle: Path) -> None:
    arguments = ["generate", bundle, "-p", "x", "-n", 900, "--ignore-eos", "--json", "--deadline"]
    (none,) = objects(specbuild(*arguments, 1e-9))
    assert (none["finish_reason"], none["token_ids"]) == ("deadline", [])
    (whole,) = objects(specbuild(*arguments, 1e9))
    assert whole["finish_reason"] == "length"


def test_a_lines_fields_override_the_flags(specbuild: Command, bundle: Path, tmp_path: Path) -> None:
    file = lines(
        tmp_path,
        {"prompt": PROMPT},
        {"prompt": PROMPT, "max_new_tokens": 3},
        {"prompt": PROMPT, "seed": 5, "speculation": "off"},
        {"prompt": PROMPT, "temperature": 0, "speculation": "chain:2"},
    )
    arguments = ["--prompts", file, *SAMPLED, "--seed", 4, "-b", 4, "--json"]
    results = objects(specbuild("generate", bundle, *arguments))
    assert [len(result["token_ids"]) for result in results] == [12, 3, 12, 12]
    assert [result["metrics"]["seed"] for result in results] == [4, 4, 5, 4]
    assert [result["metrics"]["speculation"] for result in results] == ["best:5", "best:5", "off", "chain:2"]
    assert results[1]["token_ids"] == results[0]["token_ids"][:3]
    assert len({tuple(result["token_ids"]) for result in results}) == 4
    (other,) = objects(specbuild("generate", bundle, "-p", PROMPT, *SAMPLED, "--seed", 5, "--json"))
    assert results[2]["token_ids"] == other["token_ids"]


def test_standard_input(specbuild: Command, bundle: Path, prompts: list[str]) -> None:
    asked = [prompts[4], prompts[1]]
    text = "\n\n".join(json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in asked) + "\r\n"
    piped = objects(specbuild("generate", bundle, "--prompts", "-", "-n", 6, "--json", stdin=text.encode()))
    flags = [flag for prompt in asked for flag in ("-p", prompt)]
    given = objects(specbuild("generate", bundle, *flags, "-n", 6, "--json"))
    assert [result["token_ids"] for result in piped] == [result["token_ids"] for result in given]


def test_spec_benchs_turns(specbuild: Command, bundle: Path, tmp_path: Path) -> None:
    request = {"question_id": 81, "category": "coding", "turns": [PROMPT], "reference": []}
    outcome = specbuild("generate", bundle, "--prompts", lines(tmp_path, request), "-n", 6, "--json")
    assert outcome.err == ""
    (expected,) = objects(specbuild("generate", bundle, "-p", PROMPT, "-n", 6, "--json"))
    assert objects(outcome)[0]["token_ids"] == expected["token_ids"]


def test_later_turns_are_not_dropped_in_silence(specbuild: Command, bundle: Path, tmp_path: Path) -> None:
    file = lines(tmp_path, {"turns": [PROMPT, "and now in C", "thanks"]})
    outcome = specbuild("generate", bundle, "--prompts", file, "-n", 6, "--json")
    assert objects(outcome)
    assert "2 later turns" in outcome.err


def test_messages_go_through_the_chat_template(specbuild: Command, tiny_bundle: Path, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    file = lines(tmp_path, {"messages": messages})
    (chat,) = objects(specbuild("generate", tiny_bundle, "--prompts", file, "-n", 6, "--json"))
    text = "<system>be brief\n<user>hi\n<assistant>"
    (plain,) = objects(specbuild("generate", tiny_bundle, "-p", text, "-n", 6, "--json"))
    assert chat["token_ids"] == plain["token_ids"]
    assert chat["metrics"]["num_prompt_tokens"] == plain["metrics"]["num_prompt_tokens"]


def test_raw_text_for_a_chat_model_is_said_to_be_that(specbuild: Command, tiny_bundle: Path) -> None:
    told = specbuild("generate", tiny_bundle, "-p", "x", "-n", 2)
    assert told.err == f"specbuild: -p is raw text, without the chat template: specbuild chat {tiny_bundle} chats\n"
    assert specbuild("generate", tiny_bundle, "-p", "x", "-n", 2, "--json").err == ""


def test_max_tokens_is_a_name_of_max_new_tokens(specbuild: Command, bundle: Path, tmp_path: Path) -> None:
    (short,) = objects(specbuild("generate", bundle, "-p", PROMPT, "--max-tokens", 3, "--json"))
    assert len(short["token_ids"]) == 3
    file = lines(tmp_path, {"prompt": PROMPT}, {"prompt": PROMPT, "max_tokens": 2})
    for flag in ("--max-tokens", "--max-new-tokens"):
        results = objects(specbuild("generate", bundle, "--prompts", file, flag, 4, "--json"))
        assert [len(result["token_ids"]) for result in results] == [4, 2]
    line = specbuild("generate", bundle, "-p", "x", "-n", 3, "--max-tokens", 3).refusal()
    assert "max_tokens and max_new_tokens are one parameter" in line


def test_messages_without_a_template(specbuild: Command, bundle: Path, tmp_path: Path) -> None:
    file = lines(tmp_path, {"messages": [{"role": "user", "content": "hi"}]})
    outcome = specbuild("generate", bundle, "--prompts", file)
    assert (outcome.status, outcome.out) == (1, "\n")
    assert "prompt 1: the prompt has messages, but this model has no chat template" in outcome.err


def test_a_text_that_fills_the_bundle_ends(specbuild: Command, tiny_bundle: Path) -> None:
    (result,) = objects(specbuild("generate", tiny_bundle, "-p", "x", "-n", 1000, "--ignore-eos", "--json"))
    metrics = result["metrics"]
    assert metrics["num_prompt_tokens"] + metrics["num_output_tokens"] == 64
    assert result["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", ""], ["prompt 1", "empty"]),
        (["-p", "x" * 3000], ["prompt 1", "tokens", "--max-seq-len"]),
        (["-p", "x", "-p", "y" * 3000], ["prompt 2"]),
        (["-p", "a\udcffb"], ["prompt 1", "Unicode"]),
        (["-p", "x", "--temperature", "-1"], ["temperature", "-1"]),
        (["-p", "x", "--temperature", "nan"], ["temperature"]),
        (["-p", "x", "--temperature", "hot"], ["temperature", "hot"]),
        (["-p", "x", "--top-p", "2"], ["top", "2"]),
        (["-p", "x", "--top-p", "0"], ["top", "0"]),
        (["-p", "x", "--top-k", "-1"], ["top", "-1"]),
        (["-p", "x", "--min-p", "1.5"], ["min", "1.5"]),
        (["-p", "x", "--seed", "-1"], ["seed", "-1"]),
        (["-p", "x", "-n", "0"], ["max", "0"]),
        (["-p", "x", "--stop", ""], ["stop"]),
        (["-p", "x", "--tree", "bogus"], ["bogus", "chain:K"]),
        (["-p", "x", "--tree", "chain:64"], ["chain:64", "63"]),
        (["-p", "x", "--tree", "chain:" + "9" * 5000], ["chain:"]),
        (["-p", "x", "--no-speculation", "--tree", "chain:2"], ["--no-speculation"]),
        (["-p", "x", "--no-speculation", "--drafter", "ngram"], ["--no-speculation"]),
        (["-p", "x", "--drafter", "oracle"], ["oracle", "ngram"]),
        (["-p", "x", "--max-draft-tokens", "-1"], ["max_draft_tokens", "-1"]),
        (["-p", "x", "--max-draft-tokens", "2", "--tree", "best:3"], ["best:3", "max_draft_tokens", "2"]),
        (["-p", "x", "--min-expected-speedup", "0.5"], ["min_expected_speedup", "0.5"]),
        (["-p", "x", "--min-expected-speedup", "1.5"], ["min_expected_speedup", "specbuild tune"]),
        (["-p", "x", "--min-expected-speedup", "2", "--tree", "best:3"], ["--min-expected-speedup", "--tree"]),
        (["-p", "x", "--num-speculative-tokens-per-batch-size", "[[1]]"], ["num_speculative_tokens_per_batch_size"]),
        (["-p", "x", "-b", "5"], ["batch size 5", "--max-batch-size"]),
        (["-p", "x", "-b", "0"], ["batch size 0"]),
        (["-p", "x", "--threads", "0"], ["threads"]),
        (["-p", "x", "--n", "0"], ["n must be"]),
        (["-p", "x", "--logprobs", "-1", "--json"], ["logprobs", "-1"]),
        (["-p", "x", "--logprobs", "1"], ["--logprobs", "--json"]),
        (["-p", "x", "--deadline", "0"], ["deadline", "0"]),
        (["-p", "x", "--deadline", "nan"], ["deadline", "nan"]),
        (["-p", "x", "--bogus"], ["--bogus"]),
        (["-p", "x", "--prompts", "y.jsonl"], ["-p", "--prompts"]),
        ([], ["-p", "--prompts"]),
        (["--prompts", "/nonesuch/y.jsonl"], ["/nonesuch/y.jsonl"]),
        (["--prompts", "/"], ["/", "director"]),
    ],
)
def test_refused(specbuild: Command, bundle: Path, arguments: list[str], words: list[str]) -> None:
    line = specbuild("generate", bundle, *arguments).refusal()
    assert [word for word in words if word not in line] == [], line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "x"', ["not JSON"]),
        (b'"x"', ["object"]),
        (b"\xff\xfe", ["not JSON"]),
        (b"[" * 100_000, ["not JSON"]),
        (b'{"prompt": "x", "tempratur": 1}', ["tempratur", "temperature"]),
        (b'{"prompt": "x", "category": "c"}', ["category"]),
        (b'{"max_new_tokens": 3}', ["prompt"]),
        (b'{"prompt": "x", "turns": ["y"]}', ["prompt", "turns"]),
        (b'{"prompt": 5}', ["prompt", "string"]),
        (b'{"turns": []}', ["turns"]),
        (b'{"turns": ["a", 5]}', ["turns"]),
        (b'{"messages": ["hi"]}', ["messages"]),
        (b'{"prompt": "x", "max_new_tokens": "3"}', ["max_new_tokens"]),
        (b'{"prompt": "x", "max_new_tokens": 3.5}', ["max_new_tokens"]),
        (b'{"prompt": "x", "seed": true}', ["seed"]),
        (b'{"prompt": "x", "temperature": null}', ["temperature"]),
        (b'{"prompt": "x", "temperature": NaN}', ["not JSON"]),
        (b'{"prompt": "x", "temperature": 1' + b"0" * 400 + b"}", ["temperature"]),
        (b'{"prompt": "x", "top_p": 2}', ["top_p"]),
        (b'{"prompt": "x", "stop": 5}', ["stop"]),
        (b'{"prompt": "x", "logit_bias": [1]}', ["logit_bias"]),
        (b'{"prompt": "x", "logit_bias": {"one": 1}}', ["logit_bias", "one"]),
        (b'{"prompt": "x", "speculation": 5}', ["speculation"]),
        (b'{"prompt": "x", "ignore_eos": "yes"}', ["ignore_eos"]),
        (b'{"prompt": "x", "min_tokens": 200}', ["min_tokens is 200"]),
        (b'{"prompt": "x", "n": 0, "temperature": 1}', ["n must be"]),
        (b'{"prompt": "x", "logprobs": 21}', ["logprobs", "20"]),
        (b'{"prompt": "x", "deadline": 0}', ["deadline"]),
        (b'{"prompt": "x", "deadline": "soon"}', ["deadline", "soon"]),
        (b'{"prompt": "x", "tools": []}', ["unknown field", "tools"]),
        (b'{"messages": [{"role": "user"}], "tools": "f"}', ["tools"]),
        (b'{"messages": [{"role": "user"}], "chat_template_kwargs": 5}', ["chat_template_kwargs"]),
        (b'{"messages": [{"role": "user"}], "chat_template_kwargs": {"messages": 5}}', ["template variables"]),
    ],
)
def test_a_bad_line_is_named(specbuild: Command, bundle: Path, tmp_path: Path, line: bytes, words: list[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "fine"}\n\n' + line + b"\n")
    message = specbuild("generate", bundle, "--prompts", file, "-n", 2).refusal()
    assert f"{file}:3:" in message
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": ""}', ["prompt 2", "empty"]),
        (b'{"prompt": "' + b"x" * 3000 + b'"}', ["prompt 2", "tokens"]),
        (b'{"prompt": "x", "speculation": "chain:64"}', ["prompt 2", "chain:64", "63"]),
        (b'{"prompt": "x", "logit_bias": {"4096": 1}}', ["prompt 2", "logit_bias", "4096"]),
    ],
)
def test_what_only_the_bundle_can_refuse(
    specbuild: Command, bundle: Path, tmp_path: Path, line: bytes, words: list[str]
) -> None:
    """One line of a file that cannot run is that line's error; the others run."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "fine"}\n' + line + b'\n{"prompt": "fine"}\n')
    outcome = specbuild("generate", bundle, "--prompts", file, "-n", 2, "--json")
    assert outcome.status == 1
    (message,) = outcome.err.splitlines()
    assert [word for word in ("specbuild:", *words) if word not in message] == [], message
    first, failed, last = [json.loads(line) for line in outcome.out.splitlines()]
    assert first["token_ids"] == last["token_ids"] != []
    assert (failed["finish_reason"], failed["text"], failed["token_ids"]) == ("error", "", [])
    assert (failed["index"], failed["sample"], failed["metrics"]) == (1, 0, None), "nothing ran, nothing was measured"
    assert [word for word in words[1:] if word not in failed["error"]] == [], failed
    assert specbuild("generate", bundle, "--prompts", file, "-n", 2).status == 1


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_a_file_without_prompts(specbuild: Command, bundle: Path, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    assert f"{file} has no prompts" in specbuild("generate", bundle, "--prompts", file).refusal()


def flip(path: Path, where: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * where)] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("where", [0.0, 0.37, 0.9999])
@pytest.mark.parametrize(
    "name", ["target/weights.bin", "draft/weights.bin", "target/batch1.onnx", "tokenizer.json", "report.json"]
)
def test_a_flipped_bit(specbuild: Command, bundle_copy: Path, name: str, where: float) -> None:
    flip(bundle_copy / name, where)
    line = specbuild("generate", bundle_copy, "-p", "x").refusal()
    assert str(bundle_copy / name) in line
    assert "again" in line


@pytest.mark.parametrize("name", ["target/weights.bin", "target/batch1.onnx", "tokenizer.json", "manifest.json"])
def test_a_missing_or_cut_file(specbuild: Command, bundle_copy: Path, name: str) -> None:
    path = bundle_copy / name
    path.write_bytes(path.read_bytes()[:-1000])
    assert str(path) in specbuild("generate", bundle_copy, "-p", "x").refusal()
    path.unlink()
    assert name in specbuild("generate", bundle_copy, "-p", "x").refusal()


def change(manifest: Path, **fields: Any) -> None:
    body = json.loads(manifest.read_text(encoding="utf-8"))
    manifest.write_text(json.dumps(body | fields), encoding="utf-8")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schema_version": 4}, ["schema_version 4", "update specbuild"]),
        ({"schema_version": 1}, ["older specbuild", "again"]),
        ({"schema_version": "1"}, ["schema_version"]),
        ({"exactness_bound": 1.0}, ["changed after the build"]),
        ({"surprise": 1}, ["changed after the build"]),
        ({"tokenizer": "../tokenizer.json"}, ["changed after the build"]),
        ({"files": 5}, ["manifest.json", "again"]),
        ({"models": {}}, ["manifest.json", "again"]),
    ],
)
def test_a_changed_manifest(specbuild: Command, bundle_copy: Path, fields: dict[str, Any], words: list[str]) -> None:
    change(bundle_copy / "manifest.json", **fields)
    line = specbuild("generate", bundle_copy, "-p", "x").refusal()
    assert [word for word in words if word not in line] == [], line


def test_a_link_that_leaves_the_bundle(specbuild: Command, bundle_copy: Path, tmp_path: Path) -> None:
    (bundle_copy / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (bundle_copy / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    assert "leaves the bundle" in specbuild("generate", bundle_copy, "-p", "x").refusal()


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"a": 1}', "\x00"])
def test_a_broken_manifest(specbuild: Command, tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    assert str(tmp_path / "manifest.json") in specbuild("generate", tmp_path, "-p", "x").refusal()


def test_a_missing_bundle(specbuild: Command, tmp_path: Path) -> None:
    assert str(tmp_path / "none") in specbuild("generate", tmp_path / "none", "-p", "x").refusal()
    assert "manifest.json" in specbuild("generate", tmp_path, "-p", "x").refusal()
    assert "BUNDLE" in specbuild("generate").refusal()


def test_a_draft_that_is_not_there(specbuild: Command, tiny_bundle: Path) -> None:
    line = specbuild("generate", tiny_bundle, "-p", "x", "--drafter", "model").refusal()
    assert "has no draft" in line


@pytest.mark.parametrize("command", ["build", "inspect", "generate", "verify", "doctor"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(specbuild: Command, command: str, flag: str) -> None:
    outcome = specbuild(command, flag)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith(f"Usage: specbuild {command} ")
    assert "--json" in outcome.out


def test_help_of_the_whole(specbuild: Command) -> None:
    outcome = specbuild("--help")
    assert outcome.status == 0
    for command in ("build", "inspect", "generate", "verify", "doctor"):
        assert f"\n  {command} " in outcome.out
    assert specbuild("--version").out.startswith("specbuild")


def test_no_command_shows_the_help_as_it_is(specbuild: Command) -> None:
    outcome = specbuild()
    assert outcome.status == 2
    assert outcome.out + outcome.err == specbuild("--help").out


def test_an_unknown_command(specbuild: Command) -> None:
    assert "bogus" in specbuild("bogus").refusal()


HEAVY = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors")
REPORT = f"print('heavy', [name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"


def test_the_runtime_imports_nothing_heavy() -> None:
    code = f"import sys, specbuild.runtime; {REPORT}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "heavy []\n"


@pytest.mark.parametrize("arguments", [["generate", "BUNDLE", "-p", "x", "-n", "4", "--stats"], ["inspect", "BUNDLE"]])
def test_the_light_commands_work_without_what_is_heavy(bundle: Path, arguments: list[str]) -> None:
    block = f"sys.modules.update(dict.fromkeys({HEAVY}))"
    code = f"import sys; {block}; from specbuild.cli import main; main()"
    command = [sys.executable, "-c", code, *[str(bundle) if a == "BUNDLE" else a for a in arguments]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr


def test_generate_imports_nothing_heavy(bundle: Path) -> None:
    call = "try:\n main()\nexcept SystemExit: pass\n"
    code = f"import sys\nfrom specbuild.cli import main\n{call}{REPORT}"
    command = [sys.executable, "-c", code, "generate", str(bundle), "-p", "x", "-n", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "heavy []\n"


def test_a_reader_that_has_enough(bundle: Path) -> None:
    script = f"{sys.executable} -c 'from specbuild.cli import main; main()' generate '{bundle}' -p x -n 200"
    done = subprocess.run(f"{script} | head -c 5", shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["alpha", "beta"]}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


def test_texts_of_a_schema_a_regex_a_grammar_or_a_choice(specbuild: Command, bundle: Path, tmp_path: Path) -> None:
    """By flags, and by the field of a prompt file, which goes before them."""
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMA), encoding="utf-8")
    grammar.write_text('start: ("ab" | "cd")+ "!"', encoding="utf-8")
    how = ["-n", 24, "--json", "--max-draft-tokens", 4]
    requests = [
        {"prompt": PROMPT},
        {"prompt": PROMPT, "structured_outputs": {"regex": "[0-9]{3}"}},
        {"prompt": PROMPT, "temperature": 1, "seed": 3, "structured_outputs": {"choice": ["no", "never"]}},
    ]
    first, second, third = objects(
        specbuild("generate", bundle, "--prompts", lines(tmp_path, *requests), "--json-schema", schema, *how)
    )
    assert json.loads(first["text"]).keys() == {"name", "count"}
    assert first["finish_reason"] == "stop"
    assert " " not in first["text"]
    assert len(second["text"]) == 3
    assert second["text"].isdecimal()
    assert third["text"] in ("no", "never")
    (fourth,) = objects(specbuild("generate", bundle, "-p", PROMPT, "--grammar", grammar, *how))
    assert set(fourth["text"].replace("ab", "").replace("cd", "")) == {"!"} or fourth["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--json-schema", "nowhere.json"], "nowhere.json cannot be read (No such file or directory)"),
        (["--regex", "a("], "unclosed group"),
        (["--regex", "a", "--choice", "b"], "structured_outputs has regex and choice"),
        (["--regex", "a", "--ignore-eos"], "ignore_eos"),
    ],
)
def test_what_no_text_can_be_held_to(specbuild: Command, bundle: Path, flags: list[str], told: str) -> None:
    outcome = specbuild("generate", bundle, "-p", PROMPT, *flags)
    assert outcome.status == 2
    assert told in outcome.err
    assert len(outcome.err.splitlines()) == 1
