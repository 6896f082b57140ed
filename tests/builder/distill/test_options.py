"""A distillation's options refuse what cannot be, and say what must stay the same when it goes on."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.builder.distill.options import GENERATE, DistillConfig
from specbuild.runtime.errors import InputError, OptionError

PLAIN = DistillConfig("t", Path("folder/draft"))


def test_the_target_writes_where_there_is_no_text():
    text = (Path("a.txt"),)
    assert PLAIN.to_generate == GENERATE
    assert replace(PLAIN, text=text).to_generate == 0
    assert replace(PLAIN, text=text, generate=70).to_generate == replace(PLAIN, generate=70).to_generate == 70


@pytest.mark.parametrize(("asked", "target", "size"), [(None, 4096, 2048), (None, 128_000, 32_000), (64, 4096, 64)])
def test_a_drafts_head_has_a_quarter_of_large_vocabularies(asked, target, size):
    assert replace(PLAIN, draft_vocab_size=asked).vocabulary(target) == size
    with pytest.raises(OptionError, match=r"^--draft-vocab-size 65 is more than the target's 64 tokens$"):
        replace(PLAIN, draft_vocab_size=65).vocabulary(64)


def test_what_may_differ_when_a_training_goes_on():
    """Contents of files are told apart by their digests, and a draft's name and how often it is kept do not matter."""
    other = {"kind": "parallel", "divergence": "tv", "device": "cpu", "dtype": "fp32", "target": "u"}
    other |= {"output": Path("o"), "text": (Path("a"),), "init": "random", "learning_rate": 0.5, "on_policy": 0.25}
    free = set()
    for each in fields(DistillConfig):
        value = getattr(PLAIN, each.name)
        if each.name not in other:
            other[each.name] = not value if isinstance(value, bool) else (value or 5) + 1
        if replace(PLAIN, **{each.name: other[each.name]}).identity() == PLAIN.identity():
            free.add(each.name)
    assert free == {"output", "target", "text", "init", "resume", "force", "save_every", "compile"}
    assert json.loads(json.dumps(PLAIN.to_dict()))["output"] == "folder/draft"
    assert PLAIN.work == Path("folder/draft.training")


WRONG = {
    **dict.fromkeys(("kind", "divergence", "device", "dtype"), st.text("xyz")),
    **dict.fromkeys(("num_kv_heads", "generate", "save_every"), st.integers(max_value=0)),
    "depth": st.integers(max_value=0) | st.integers(min_value=17),
    "sequence_length": st.integers(max_value=23),
    "on_policy": st.floats(max_value=0, exclude_max=True) | st.floats(min_value=1, exclude_min=True),
    "learning_rate": st.floats(max_value=0) | st.floats(min_value=1, exclude_min=True) | st.just(float("nan")),
    "seed": st.integers(max_value=-1) | st.integers(min_value=1 << 63),
}


@given(st.sampled_from(sorted(WRONG)).flatmap(lambda name: WRONG[name].map(lambda value: (name, value))))
def test_what_cannot_be_is_refused_by_its_option(wrong):
    name, value = wrong
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')}") as caught:
        replace(PLAIN, **{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sequence_length": 24, "depth": 5}, "--sequence-length must be at least 28"),
        ({"kind": "eagle3", "on_policy": 0.5}, "drop --on-policy"),
        ({"kind": "eagle3", "num_heads": 2}, "drop --num-heads"),
        ({"kind": "eagle3", "init": "random"}, "drop --init"),
        ({"output": Path("..")}, "cannot be a draft's name"),
    ],
)
def test_what_does_not_go_together_is_refused(options, named):
    with pytest.raises(InputError, match=named):
        replace(PLAIN, **options)
    assert replace(PLAIN, kind="eagle3", intermediate_size=20).shape == {"intermediate_size": 20}
