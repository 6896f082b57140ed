"""Flags and commands that other engines' users type: each works, or one line says what to use here."""

import re

import click
import pytest
from commands import COMMANDS, FLAGS, GROUP
from hypothesis import given
from hypothesis import strategies as st

from specbuild.cli import flag_hints
from specbuild.runtime.errors import OptionError

OTHERS = """
-m --model -c --ctx-size -np --parallel -ngl --n-gpu-layers -a --alias --log-level --temp -v --verbose -md -fa -ub -tb
-hf -ctk --cache-type-v -s --seed -n --n-predict -p --prompt -f -sys -cnv -i -j -jf --grammar-file -r --mlock --no-mmap
-sm -ts -mg -dev --device -cb --jinja --draft --draft-max --draft-min --chat-template-file -to --metrics --lora --numa
--tensor-parallel-size -tp -pp --gpu-memory-utilization --dtype --quantization --kv-cache-dtype --max-num-seqs
--max-model-len --enforce-eager --trust-remote-code --served-model-name --speculative-config --num-speculative-tokens
--enable-prefix-caching --enable-chunked-prefill --block-size --swap-space --disable-log-requests --tokenizer --revision
--download-dir --load-format --host --port --max-concurrency --dataset-name --request-rate --checkpoint_dir --output_dir
--max_batch_size --max_seq_len --max_input_len --max_num_tokens --gemm_plugin --paged_kv_cache --workers --log_level
--speculative_decoding_mode --max_draft_len --weight_streaming --input_timing_cache --tokens_per_block --max_beam_width
""".split()


def parsed(name, *arguments):
    """The values that a command gets; nothing is run."""
    return COMMANDS[name].make_context(name, list(arguments), parent=GROUP).params


def outcome(name, *arguments):
    """What is said of a command's arguments, "" if they can be parsed."""
    try:
        parsed(name, *arguments)
    except OptionError as error:
        return str(error)
    except click.NoSuchOption as error:
        return flag_hints.unknown(error)
    except click.UsageError as error:
        return error.format_message()
    return ""


@given(
    name=st.sampled_from(list(COMMANDS)),
    flag=st.sampled_from(OTHERS),
    form=st.sampled_from([["{}"], ["{}", "4"], ["{}=4"]]),
)
def test_a_flag_of_another_engine_works_or_one_line_says_what_to_use(name, flag, form):
    said, dashed = outcome(name, "x", *(part.format(flag) for part in form)), flag.replace("_", "-")
    if dashed in FLAGS[name]:
        assert "there is no" not in said
        return
    assert said.startswith(f"there is no {dashed} here: "), said
    assert "\n" not in said
    for ours in re.findall(r" (--[a-z-]+)", said.partition(": ")[2]):
        assert any(ours in flags for flags in FLAGS.values()), said
    for ours, places in re.findall(r"(--[a-z-]+) of (\w+(?:(?:, | or )\w+\b)*)", said):
        for place in set(re.split(", | or ", places)) & {*FLAGS}:
            assert ours in FLAGS[place], said


@pytest.mark.slow
@given(
    name=st.sampled_from(list(COMMANDS)),
    flag=st.sampled_from(["--hepl", "--hel", "--hlp"]) | st.from_regex(r"--zz[a-z]{7,9}", fullmatch=True),
)
def test_an_unknown_flag_is_answered_with_the_help_that_lists_all(name, flag):
    assert outcome(name, flag).startswith(f"there is no {flag} here: specbuild {name} --help ")


@given(name=st.sampled_from([name for name, flags in FLAGS.items() if "--threads" in flags]), data=st.data())
def test_a_mistyped_flag_is_answered_with_the_one_that_was_meant(name, data):
    flag = data.draw(st.sampled_from(sorted(flag for flag in FLAGS[name] if len(flag) > 8)))
    mistyped = flag[:4] + "z" + flag[4:]
    assert outcome(name, mistyped) == f"there is no {mistyped} here: did you mean {flag}?"


@pytest.mark.parametrize("words", ["--hlp", "doctor --foo", "generate x -np4", "serve x -ngl=9"])
def test_a_wrong_flag_is_refused_on_one_line(specbuild, words):
    assert "did you mean" not in specbuild(*words.split()).refusal().lower()


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("genrate", "did you mean generate?"),
        ("compile", "did you mean build?"),
        ("run", "did you mean generate?"),
        ("xyz", "specbuild --help"),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest(specbuild, word, meant):
    assert meant in specbuild(word, "x").refusal()


def test_a_value_that_looks_like_another_engines_flag_is_a_value():
    assert parsed("generate", "x", "-p", "-ngl")["texts"] == ("-ngl",)


NAMES = """
generate --draft-max --max-draft-tokens
generate --repeat-penalty --repetition-penalty
generate --n-predict --max-new-tokens
generate -np --batch-size
generate -s --seed
chat -sys --system
serve --alias --served-model-name
serve -np --max-num-seqs
serve --chat-template-file --chat-template
bench --max-concurrency --concurrency
build -m --target
build --draft-model --draft
build -c --max-seq-len
build --max_seq_len --max-seq-len
"""


@pytest.mark.parametrize("line", NAMES.strip().splitlines())
def test_names_by_which_others_call_a_flag(line):
    command, theirs, ours = line.split()
    needed = ["--target", "t", "-o", "o"] if command == "build" else ["x"]
    assert parsed(command, *needed, theirs, "7") == parsed(command, *needed, ours, "7") != parsed(command, *needed)
