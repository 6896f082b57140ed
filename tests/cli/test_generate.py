"""`specbuild generate`: its objects, streams and parameters, and how prompts of a file end."""

import json
import re

import pytest

PROMPT = "def main(argv):\n    "
SAMPLED = ["--temperature", 1.2, "-n", 30, "--seed", 7]


def objects(outcome):
    assert outcome.status == 0, outcome.err
    return [json.loads(line) for line in outcome.out.splitlines()]


@pytest.fixture
def generate(specbuild, bundle):
    """`generate(*arguments)`: the objects of `specbuild generate --json`, of PROMPT unless prompts are given."""

    def run(*arguments, stdin=b""):
        prompt = [] if {"-p", "--prompts"} & {*map(str, arguments)} else ["-p", PROMPT]
        return objects(specbuild("generate", bundle, *prompt, *arguments, "--json", stdin=stdin))

    return run


@pytest.fixture
def lines(tmp_path):
    """`lines(*requests)`: a prompt file of these."""

    def write(*requests):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
        return path

    return write


def tokens(results):
    return [result["token_ids"] for result in results]


def test_an_object_per_prompt(generate):
    (result,) = generate("-n", 16, "--logprobs", 2)
    assert list(result) == [*"index sample text token_ids finish_reason stop_reason metrics logprobs".split()]
    metrics = result["metrics"]
    assert (len(result["logprobs"]), result["finish_reason"], metrics["num_output_tokens"]) == (16, "length", 16)
    assert 0 <= metrics["queue_time"] < metrics["ttft"] <= metrics["e2el"]
    stats = metrics["speculative_decoding"]
    assert sum(stats["acceptance_histogram"]) == stats["num_spec_steps"] > 0
    accepted = sum(length * count for length, count in enumerate(stats["acceptance_histogram"]))
    assert accepted == stats["num_accepted_draft_tokens"]
    sampled, other = (generate("--temperature", 1, "-n", 12)[0] for _ in range(2))
    seed = sampled["metrics"]["seed"]
    assert seed != other["metrics"]["seed"]
    assert tokens(generate("--temperature", 1, "-n", 12, "--seed", seed)) == [sampled["token_ids"]]


def test_prompts_and_samples_come_in_order_and_are_what_they_are_alone(specbuild, bundle, generate):
    prompts, sampled = [PROMPT, "import os\n", "日本語 = '"], ["--temperature", 1, "-n", 12]
    flags = [flag for prompt in prompts for flag in ("-p", prompt)]
    together = generate(*flags, *sampled, "--n", 2, "--seed", 5, "-b", 3)
    assert [(result["index"], result["sample"]) for result in together] == [(i, s) for i in range(3) for s in (0, 1)]
    alone = [tokens(generate(*flags, *sampled, "--seed", seed)) for seed in (5, 6)]  # one after another
    assert tokens(together) == [ids for samples in zip(*alone, strict=True) for ids in samples]
    file = "\n\n".join(json.dumps({"prompt": prompt}) for prompt in prompts) + "\r\n"
    assert tokens(generate("--prompts", "-", *sampled, "--seed", 5, stdin=file.encode())) == alone[0]
    shown = specbuild("generate", bundle, *flags, *sampled, "--n", 2, "--seed", 5).out
    assert shown == "".join(f"=== {r['index'] + 1}.{r['sample'] + 1} ===\n{r['text']}\n" for r in together)


@pytest.mark.slow
def test_one_prompt_streams_its_text_and_statistics_go_to_stderr(specbuild, bundle, generate):
    for prompt in (PROMPT, "日本語のテキスト = '"):
        (result,) = generate("-p", prompt, "-n", 40)
        outcome = specbuild("generate", bundle, "-p", prompt, "-n", 40)
        assert (outcome.status, outcome.out, outcome.err) == (0, result["text"] + "\n", "")
    shown = specbuild("generate", bundle, "-p", prompt, "-n", 40, "--stats")
    assert shown.out == outcome.out
    for word in ("tokens/s", "time to first token", "mean acceptance length", "drafted"):
        assert word in shown.err


@pytest.mark.slow
def test_no_flag_of_speculation_changes_the_tokens(generate):
    (expected,) = generate(*SAMPLED, "--top-p", 0.95)
    for flags, tree in {
        ("--no-speculation",): "off",
        ("--tree", "chain:3"): "chain:3",
        ("--drafter", "ngram", "--tree", "topk:3,2"): "topk:3,2",
        ("--drafter", "model", "--tree", "best:9"): "best:9",
        ("-b", 4, "-t", 1): "best:5",
        ("--max-draft-tokens", 2): "best:5",
        ("--num-speculative-tokens-per-batch-size", '{"1-2": 1}'): "best:5",
    }.items():
        (result,) = generate(*SAMPLED, "--top-p", 0.95, *flags)
        assert result["token_ids"] == expected["token_ids"], flags
        assert result["metrics"]["speculation"] == tree
        assert (result["metrics"]["speculative_decoding"]["num_spec_steps"] == 0) >= (tree == "off")


@pytest.mark.slow
def test_a_prediction_in_a_file_is_drafted_from(specbuild, bundle, generate, tmp_path):
    (expected,), file = generate("-n", 40), tmp_path / "guess.txt"
    file.write_text(expected["text"], encoding="utf-8")
    (result,) = generate("-n", 40, "--prediction", file)
    assert result["token_ids"] == expected["token_ids"]
    counts = result["metrics"]["speculative_decoding"]
    assert counts["num_accepted_prediction_tokens"] > 20
    shown = specbuild("generate", bundle, "-p", PROMPT, "-n", 40, "--prediction", file, "--stats").err
    assert f"of {counts['num_prediction_tokens']} tokens came true" in shown


@pytest.mark.slow
def test_every_sampling_flag_counts(generate):
    expected = generate(*SAMPLED)
    for flag, value in {
        "--seed": 8,
        "--temperature": 0,
        "--top-k": 1,
        "--top-p": 0.01,
        "--min-p": 1,
        "--repetition-penalty": 5,
        "--frequency-penalty": 5,
        "--presence-penalty": 5,
    }.items():
        assert tokens(generate(*SAMPLED, flag, value)) != tokens(expected), flag


@pytest.mark.slow
def test_what_ends_a_text(specbuild, generate, tiny_bundle):
    (whole,) = generate("-n", 40)
    (stopped,) = generate("-n", 40, "--stop", stop := whole["text"][5:8])
    assert stopped["text"] == whole["text"][: whole["text"].index(stop)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    (late,) = generate("-n", 900, "--ignore-eos", "--deadline", 1e-9)
    assert (late["finish_reason"], late["token_ids"]) == ("deadline", [])
    request = json.dumps({"prompt": "x", "logit_bias": {"0": 1000}}).encode()
    command = ["generate", tiny_bundle, "--prompts", "-", "-n", 1000, "--json"]
    ended, full = (objects(specbuild(*command, *more, stdin=request))[0] for more in ((), ("--ignore-eos",)))
    assert (ended["token_ids"], ended["finish_reason"], full["finish_reason"]) == ([0], "stop", "length")
    assert len(full["token_ids"]) + full["metrics"]["num_prompt_tokens"] == 64, "what the bundle was built for"


def test_later_turns_are_not_dropped_in_silence(specbuild, bundle, lines):
    file = lines({"turns": [PROMPT, "and now in C", "thanks"]})
    outcome = specbuild("generate", bundle, "--prompts", file, "-n", 6)
    assert outcome.err == "specbuild: only the first of each line's turns is run; 2 later turns are not\n"


def test_messages_go_through_the_chat_template(specbuild, tiny_bundle, lines):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    chat = specbuild("generate", tiny_bundle, "--prompts", lines({"messages": messages}), "-n", 6)
    plain = specbuild("generate", tiny_bundle, "-p", "<system>be brief\n<user>hi\n<assistant>", "-n", 6)
    assert (chat.out, chat.err) == (plain.out, "")
    assert plain.err == f"specbuild: -p is raw text, without the chat template: specbuild chat {tiny_bundle} chats\n"


def test_a_line_that_cannot_run_is_its_own_error(specbuild, bundle, lines):
    bad = {
        "empty": {"prompt": ""},
        "chain:64": {"prompt": "x", "speculation": "chain:64"},
        "has messages, but this model has no chat template": {"messages": [{"role": "user", "content": "hi"}]},
    }
    file = lines({"prompt": "fine"}, *bad.values(), {"prompt": "fine"})
    outcome = specbuild("generate", bundle, "--prompts", file, "-n", 2, "--json")
    first, *failed, last = [json.loads(line) for line in outcome.out.splitlines()]
    assert outcome.status == specbuild("generate", bundle, "--prompts", file, "-n", 2).status == 1
    assert first["token_ids"] == last["token_ids"] != []
    for number, (word, result, line) in enumerate(zip(bad, failed, outcome.err.splitlines(), strict=True), 1):
        assert (result["index"], result["finish_reason"], result["metrics"]) == (number, "error", None)
        assert word in result["error"]
        assert line == f"specbuild: prompt {number + 1}: {result['error']}"


def test_texts_of_a_schema_a_regex_a_grammar_or_a_choice(generate, lines, tmp_path):
    """By flags, and by the field of a prompt file, which goes before them."""
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": ["alpha", "beta"]}')
    grammar.write_text('start: "ab" "cd"')
    requests = {"prompt": PROMPT}, {"prompt": PROMPT, "structured_outputs": {"choice": ["no", "never"]}}
    flags = {"--json-schema": schema, "--regex": "[0-9]{3}", "--choice": "yes", "--grammar": grammar}
    for (flag, value), form in zip(flags.items(), ['"(alpha|beta)"', "[0-9]{3}", "yes", "abcd"], strict=True):
        first, second = generate("--prompts", lines(*requests), flag, value, "-n", 24, "--max-draft-tokens", 4)
        assert re.fullmatch(form, first["text"])
        assert second["text"] in ("no", "never")
