"""Whatever is wrong on a command line is refused in one line that names it, and nothing is left behind."""

import json
import re
import shlex
from pathlib import Path

import click
import pytest
from commands import COMMANDS, options_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledgers import machine, request, written

from specbuild.serve.telemetry import logs

NEEDED = {  # what a command needs besides the flag that is wrong
    "build": "--target {tiny} -o new --dry-run",
    "generate": "{bundle} -p x",
    "serve": "{bundle} --check",
    "distill": "{tiny} -o new --sequence-length 24",
    "pair": "{tiny} {tiny}",
    "cost": "{ledger}",
}
SAME = {"max_tokens": "max_new_tokens", "max_num_seqs": "batch_size"}
NUMBERS = [
    (name, option)
    for name, command in COMMANDS.items()
    if name != "replay"  # reads its receipt first
    for option in options_of(command)
    if isinstance(option.type, click.types.IntParamType | click.types.FloatParamType | click.Choice)
]
REFUSED = r"""
generate | BUNDLE
generate {bundle} | -p TEXT or with --prompts FILE
generate {bundle} -p x --prompts y.jsonl | -p TEXT or with --prompts FILE
generate {bundle} -p '' | the prompt is empty
generate {bundle} -p x -p {long} | prompt 2
generate {bundle} -p {odd} | Unicode
generate {bundle} -p x --stop '' | stop
generate {bundle} -p x -n 3 --max-tokens 3 | max_tokens and max_new_tokens are one parameter
generate {bundle} -p x --logprobs 1 | add --json
generate {bundle} -p x --tree bush:3 | chain:K
generate {bundle} -p x --tree chain:64 | 63
generate {bundle} -p x --no-speculation --tree chain:2 | --no-speculation leaves nothing
generate {bundle} -p x --no-speculation --drafter ngram | --no-speculation leaves nothing
generate {bundle} -p x --no-speculation --prediction f | --no-speculation leaves nothing for --prediction to do
generate {bundle} -p x --drafter model --prediction f | --drafter model drafts from no --prediction
generate {bundle} -p x --prediction nowhere.txt | cannot be read
generate {bundle} -p x --max-draft-tokens 2 --tree best:3 | max_draft_tokens
generate {bundle} -p x --min-expected-speedup 1.5 | specbuild tune
generate {bundle} -p x --min-expected-speedup 2 --tree best:3 | drop --min-expected-speedup, or --tree
generate {bundle} -p x --num-speculative-tokens-per-batch-size [[1]] | num_speculative_tokens_per_batch_size
generate {bundle} -p x -b 5 | --max-batch-size
generate {bundle} -p x --kv-cache-tokens 512 | caches are not paged
generate {bundle} -p x --resident | runs on onnxruntime, which has no
generate {bundle} -p x --gpu-weights-percent 0.5 | runs on onnxruntime, which has no
generate {tiny_bundle} -p x --drafter model | has no draft
generate {bundle} -p x --json-schema none.json | none.json cannot be read
generate {bundle} -p x --regex 'a(' | unclosed group
generate {bundle} -p x --regex a --choice b | has regex and choice
generate {bundle} -p x --regex a --ignore-eos | ignore_eos
generate {bundle} --prompts none.jsonl | none.jsonl cannot be read
generate {bundle} --prompts bad.jsonl | bad.jsonl:2: not JSON
generate {bundle} --prompts empty.jsonl | empty.jsonl has no prompts
chat {bundle} | has no chat template
chat {tiny_bundle} --tree best:0 | best:0
inspect {bundle} --device-loop | runs on a CPU: its rounds are no graph
inspect {bundle} --quality | nothing is quantized in this bundle
verify {bundle} --hf none | none does not exist
verify {bundle} --prompts blank.jsonl | the prompt is empty
tune {bundle} --batch-sizes 1,two | give whole numbers with commas
tune {bundle} --batch-sizes 0 | every size is at least 1
tune {bundle} --batch-sizes 999 | batch size 999
tune {bundle} --prompts blank.jsonl | blank.jsonl:3: the prompt is empty
tune {bundle} --prompts long.jsonl | long.jsonl:1: leaves no room for 16 tokens
profile {bundle} --tree chain:64 | verifies at most 63
profile {tiny_bundle} --context 65 | --context 65 is more than the 64 tokens
profile {bundle} -p '' | prompt
bench {bundle} --num-prompts 33 | more than the 32 prompts of pycode
bench {bundle} --num-prompts 2 --concurrency 4 | never make a concurrency of 4
bench {tiny_bundle} --concurrency 2 | concurrency 2 is more than the 1 sequences
bench {bundle} --concurrency '1;2' | not a list of whole numbers
bench {bundle} --trees star:3 | unknown tree 'star:3'
bench {bundle} --trees chain:64 | verifies at most 63
bench {tiny_bundle} --drafter model | has no draft
bench {bundle} --prompts spec_bench | --dataset-path
bench {bundle} --dataset-path x | --prompts spec_bench
bench {bundle} --prompts blank.jsonl | blank.jsonl:3: the prompt is empty
bench {bundle} -o none/result.json | none/result.json cannot be written
bench {bundle} --html . | is not a file
bench {bundle} -o x --html ./x | one file
pair {tiny} none | none does not exist
pair {tiny} {tiny} --prompts none.jsonl | none.jsonl cannot be read
cost | LEDGER
cost none.jsonl | cannot be read
cost {ledger} --by colour | colour
cost {ledger} --focus none/x.csv | cannot be written
cost {ledger} --html none/x.html | cannot be written
cost {ledger} --price-per-hour=-1 | an amount from 0 on
canary localhost | no URL
serve | BUNDLE
serve {bundle} {bundle} | one name
serve a={bundle} b={bundle} --served-model-name c | NAME=BUNDLE
serve {bundle} --host 203.0.113.1 | cannot listen
serve {bundle} --port 70000 | port
serve {bundle} --allowed-origins https://a | --allowed-origins is a list in JSON
serve {bundle} --chat-template none.jinja | none.jinja
serve {bundle} --chat-template broken.jinja | chat template
serve {bundle} --max-model-len 999999 | --max-seq-len
serve {bundle} --max-num-batched-tokens 3 --max-num-seqs 4 | max_num_batched_tokens
serve {bundle} --max-num-seqs 999 | batch size 999
serve {bundle} --api-key ' ' | API key
serve {bundle} --ssl-certfile c.pem | --ssl-keyfile
serve {bundle} --reasoning-end '</nothing>' | no token of
serve {bundle} --currency euro | EUR
serve {bundle} --owner a=b | --ledger
serve {bundle} --ledger none/l.jsonl | none/l.jsonl
serve {bundle} --canary-weight 5 | --canary-weight does nothing without --canary
serve {bundle} --text-sample none/x | in no folder that exists
serve {bundle} --num-replicas 2 | --num-replicas does nothing without --ray
serve {bundle} --ray --num-replicas 2 --autoscale 1,2 | give one of them
serve {bundle} --ray --autoscale 4 | MIN,MAX
build -o new | --target
build --target {tiny} | --output
build --target {tiny} -o new extra | extra
build --target {tiny} -o new --tree chain:64 | verifies at most 63
build --target {tiny} -o new --buckets 1,2,many | buckets must be whole numbers
build --target {tiny} -o new --draft-precision int8 | --draft-precision needs a draft
build --target {tiny} -o new --backend abacus | onnxruntime
build --target {tiny} -o new --tune --backend onnxruntime-cuda | drop --tune
build --target {tiny} -o new --kv-cache-dtype fp8 | or drop --kv-cache-dtype
build --target {tiny} -o new --max-seq-len 129 | 128
build --target {tiny}/config.json -o new | is a file
build --target {tiny} -o /proc/nope/deeper | /proc/nope/deeper
build --target {tiny} -o . | give
build --target {tiny} -o {name} | too long
build --target {tiny} -o bad.jsonl/b | bad.jsonl/b
build --target {tiny} -o bad.jsonl --force | not a folder
"""  # what is wrong, and what is said of it


@pytest.fixture
def places(bundle, tiny, tiny_bundle, tmp_path, monkeypatch):
    """What stands in braces; the working folder has prompt files."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(logs, "install", lambda log: None)
    Path("broken.jinja").write_text("{% if %}")
    Path("empty.jsonl").write_text("\n\n  \n")
    Path("bad.jsonl").write_text('{"prompt": "x"}\n{\n')
    Path("blank.jsonl").write_text('{"prompt": "x"}\n\n{"prompt": ""}\n')
    Path("long.jsonl").write_text(json.dumps({"prompt": " x" * 1018}))
    return {
        "bundle": bundle,
        "tiny": tiny,
        "tiny_bundle": tiny_bundle,
        "ledger": written(tmp_path / "l.jsonl", [machine(), request(1)]),
        "long": "y" * 3000,
        "odd": "a\udcffb",
        "name": "x" * 250,
    }


@pytest.mark.parametrize("case", REFUSED.strip().splitlines())
def test_what_is_wrong_is_named(specbuild, places, case):
    before, (line, words) = sorted(Path().iterdir()), case.split(" | ")
    told = specbuild(*(word.format_map(places) for word in shlex.split(line))).refusal()
    assert words in told
    assert sorted(Path().iterdir()) == before


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flag=st.sampled_from(NUMBERS),
    value=st.from_regex(r"z[a-z]{0,9}", fullmatch=True) | st.integers(max_value=-(10**9)).map(str) | st.just("nan"),
)
def test_a_wrong_value_is_refused_by_its_flags_name(specbuild, places, flag, value):
    name, option = flag
    needed = NEEDED.get(name, "{bundle}").format_map(places).split()
    told = re.sub("[- ]", "_", specbuild(name, *needed, option.opts[-1], value).refusal())
    names = {each.strip("-").replace("-", "_") for each in (str(option.name), *option.opts)}
    assert any(each in told for each in names | {SAME.get(each, each) for each in names}), told


def test_a_damaged_bundle_is_refused_by_all_that_read_it(specbuild, bundle_copy):
    for name, file in {
        "generate": "draft/weights.bin",
        "inspect": "target/weights.bin",
        "verify": "draft/weights.bin",
        "tune": "report.json",
        "profile": "report.json",
        "bench": "tokenizer.json",
    }.items():
        path = bundle_copy / file
        content, damaged = path.read_bytes(), bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        path.write_bytes(damaged)
        prompt = ["-p", "x"] if name == "generate" else []
        assert f"{path} is not what was built" in specbuild(name, bundle_copy, *prompt).refusal()
        path.write_bytes(content)
