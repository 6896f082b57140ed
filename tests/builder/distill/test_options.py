"""A distillation's options refuse what cannot be, and say what must stay the same when it goes on."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from specbuild.builder.distill.options import GENERATE, KINDS, LAYERS, OTHERS, DistillConfig
from specbuild.runtime.errors import InputError, OptionError

PLAIN = DistillConfig("t", Path("folder/draft"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "tree"}, "unknown --kind 'tree': use chain, parallel, eagle3"),
        ({"divergence": "js"}, "unknown --divergence 'js': use kl, reverse-kl, tv"),
        ({"device": "tpu"}, "unknown --device 'tpu': use auto, cpu, cuda"),
        ({"dtype": "fp16"}, "unknown --dtype 'fp16': use auto, fp32, bf16"),
        ({"num_kv_heads": 0}, "--num-kv-heads must be at least 1, not 0"),
        ({"generate": 0}, "--generate must be at least 1, not 0"),
        ({"save_every": -3}, "--save-every must be at least 1, not -3"),
        ({"depth": 17}, "--depth must be at most 16, not 17"),
        ({"sequence_length": 23}, "--sequence-length must be at least 24, not 23"),
        ({"sequence_length": 24, "depth": 5}, "--sequence-length must be at least 28, not 24"),
        ({"on_policy": 1.5}, "--on-policy is a part of the batches, 0…1, not 1.5"),
        ({"kind": "eagle3", "on_policy": 0.5}, "an EAGLE head cannot write by itself: drop --on-policy"),
        ({"kind": "eagle3", "num_heads": 2}, "an EAGLE head is one layer of the target's width, begun with it: drop "
         "--num-heads"),
        ({"kind": "eagle3", "init": "random"}, "an EAGLE head is one layer of the target's width, begun with it: drop "
         "--init"),
        ({"learning_rate": 0.0}, "--learning-rate must be between 0 and 1, not 0.0"),
        ({"learning_rate": float("nan")}, "--learning-rate must be between 0 and 1, not nan"),
        ({"seed": -1}, "--seed must be 0…2^63 − 1, not -1"),
        ({"output": Path("..")}, ".. cannot be a draft's name: give a folder to create"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        replace(PLAIN, **options)
    assert str(caught.value) == message


def test_an_eagle_heads_mlp_may_be_asked_for() -> None:
    assert replace(PLAIN, kind="eagle3", intermediate_size=20).shape == {"intermediate_size": 20}
    assert replace(PLAIN, layers=2, num_kv_heads=1).shape == {"layers": 2, "num_kv_heads": 1}
    assert PLAIN.shape == {}


def test_the_target_writes_where_there_is_no_text() -> None:
    text = (Path("a.txt"),)
    assert PLAIN.to_generate == GENERATE
    assert replace(PLAIN, text=text).to_generate == 0
    assert replace(PLAIN, text=text, generate=70).to_generate == replace(PLAIN, generate=70).to_generate == 70


@pytest.mark.parametrize(
    ("asked", "target", "size"),
    [(None, 1000, 1000), (None, 4096, 2048), (None, 8192, 2048), (None, 128_000, 32_000), (64, 4096, 64), (9, 9, 9)],
)
def test_a_drafts_head_has_a_quarter_of_large_vocabularies(asked: int | None, target: int, size: int) -> None:
    assert replace(PLAIN, draft_vocab_size=asked).vocabulary(target) == size


def test_a_head_knows_no_more_than_the_target() -> None:
    with pytest.raises(OptionError, match=r"^--draft-vocab-size 65 is more than the target's 64 tokens$"):
        replace(PLAIN, draft_vocab_size=65).vocabulary(64)


def test_what_may_differ_when_a_training_goes_on() -> None:
    """Contents of files are told apart by their digests, and a draft's name and how often it is kept do not matter."""
    other: dict[str, Any] = {"kind": "parallel", "divergence": "tv", "device": "cpu", "dtype": "fp32", "target": "u"}
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


def test_a_kinds_own_defaults_are_options() -> None:
    assert {*OTHERS, *LAYERS} == set(KINDS)
    for kind, own in OTHERS.items():
        assert replace(PLAIN, kind=kind, **own).kind == kind
