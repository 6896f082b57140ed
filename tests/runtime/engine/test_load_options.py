"""Options say what they are, are refused in one line where they cannot be meant, and reach an engine by either way."""

import dataclasses
import math
import os
import re
import typing
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from engine_checks import SHORT
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.bundle.backend import BACKENDS
from specbuild.runtime.bundle.bundle import Bundle, file_record
from specbuild.runtime.bundle.manifest import MANIFEST, EngineRecord
from specbuild.runtime.engine.load_options import LoadKeywords, LoadOptions
from specbuild.runtime.errors import OptionError, PromptError

FIELDS = [field.name for field in dataclasses.fields(LoadOptions)]
MOST = max(64, os.cpu_count() or 1)  # threads, as the error says
NOTHING = st.booleans() | st.binary() | st.lists(st.none()) | st.sampled_from([math.nan, math.inf, object()])
FLAWED = NOTHING | st.text() | st.floats()
WRONG = {
    "drafter": FLAWED.filter(lambda value: value not in ("model", "ngram")),
    **{name: FLAWED | st.none() | st.integers(max_value=0) for name in ("batch_size", "max_waiting")},
    "threads": FLAWED | st.integers(max_value=0) | st.integers(min_value=MOST + 1),
    "gpu_weights_percent": NOTHING | st.text() | st.floats(max_value=0, exclude_max=True) | st.integers(min_value=2),
    "limits": FLAWED | st.none(),
    **{name: st.integers() | st.text() for name in ("resident",)},
    **{name: st.integers() | st.text() | st.none() for name in ("prefix_caching", "live_timings")},
    "kv_cache_tokens": FLAWED,
    "on_finish": FLAWED,
    "stall_timeout": NOTHING | st.text() | st.floats(max_value=0) | st.integers(max_value=0),
    **{name: FLAWED | st.integers(max_value=1) for name in ("max_model_len", "max_num_batched_tokens")},
    "chat_template": st.integers() | st.binary(),
}


def test_keywords_are_the_fields_and_each_is_explained_once():
    """`load` takes each of them by its name, of the same type, and none has to be given."""
    assert typing.get_type_hints(LoadKeywords) == typing.get_type_hints(LoadOptions)
    assert (LoadKeywords.__optional_keys__, LoadKeywords.__required_keys__) == (set(FIELDS), set())
    explained = re.findall(r"^ *(\w+): ", LoadOptions.__doc__ or "", re.MULTILINE)
    assert sorted(explained) == sorted(FIELDS)


@pytest.mark.parametrize("name", sorted(FIELDS))
@settings(max_examples=25)
@given(data=st.data())
def test_what_cannot_be_meant_is_refused_when_it_is_made(name, data):
    """Also where options are made from others."""
    value = data.draw(WRONG[name])
    for make in (LoadOptions, lambda **given: dataclasses.replace(LoadOptions(), **given)):
        with pytest.raises(OptionError, match=name.removeprefix("draft_").replace("_size", "")):
            make(**{name: value})


@pytest.fixture
def bundle_for(manifest_of):
    """`bundle_for(backend, **manifest's)`: a bundle of two sequences with a draft, of which there is a manifest."""

    def make(backend="onnxruntime", draft=True, **fields):
        return Bundle(Path("some.bundle"), manifest_of(draft={} if draft else None, backend=backend, **fields))

    return make


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_option_that_a_backend_has_not_is_refused(bundle_for, backend):
    """In one line, which says whose it is; `gpu_weights_percent` 0 is said, too. What every backend has is taken."""
    some = {"threads": 2, "resident": True}
    some |= {"gpu_weights_percent": 0.0, "max_num_batched_tokens": 8}
    bundle = bundle_for(backend)
    assert {name for each in BACKENDS.values() for name in each.load_options} == set(some)
    for name, value in some.items():
        LoadOptions(**{name: None}).check(bundle)
        options, able = LoadOptions(**{name: value}), [a for a, b in BACKENDS.items() if name in b.load_options]
        if backend in able:
            options.check(bundle)
            continue
        with pytest.raises(
            OptionError, match=f"^some.bundle runs on {backend}, which has no {name}: drop it"
        ) as caught:
            options.check(bundle)
        assert ", ".join(able) in str(caught.value)
    LoadOptions(resident=False, drafter="model", batch_size=2, max_model_len=64).check(bundle)


PAGED = {
    "backend": "tensorrt",
    "engines": {"target/model.plan": EngineRecord("10.1", [], "plugin", "1", False, None, 0, {}, block_size=32)},
}


DRAFTLESS = {"draft": False}


@pytest.mark.parametrize(
    ("given", "fields", "told"),
    [
        ({"batch_size": 3}, {}, "batch size 3 is not in 1…2, what some.bundle was built for"),
        ({"max_model_len": 65}, {}, "max_model_len 65 is more than 64, what some.bundle was built for"),
        ({"drafter": "model"}, DRAFTLESS, "some.bundle has no draft: use the ngram drafter"),
        ({"kv_cache_tokens": 64}, {}, "the bundle's caches are not paged: drop kv_cache_tokens"),
        *[({"kv_cache_tokens": n}, PAGED, "must be 32…144 for this bundle, not") for n in (31, 145)],
        ({"max_num_batched_tokens": 3, "batch_size": 2}, {}, "is 3: give at least 2 for each of 2 sequences"),
        *[({"kv_cache_tokens": n}, PAGED, None) for n in (None, 32, 144)],
        ({"max_num_batched_tokens": 4, "batch_size": 2}, {}, None),
        ({"drafter": "ngram"}, DRAFTLESS, None),
    ],
)
def test_what_a_bundle_cannot_do_is_refused(bundle_for, given, fields, told):
    refused = pytest.raises(OptionError, match=told) if told else nullcontext()
    with refused:
        LoadOptions(**given).check(bundle_for(**fields))


def test_nothing_is_loaded_that_cannot_be(bundle_copy):
    """The check comes before any file is read."""
    (bundle_copy / "target" / "weights.bin").unlink()
    wrong = {"drafter": "eagle", "resident": True}
    for name, value in wrong.items():
        with pytest.raises(OptionError, match=name):
            Engine.load(bundle_copy, **{name: value})
    with pytest.raises(TypeError, match="treads"):
        Engine.load(bundle_copy, treads=2)


@pytest.mark.slow
def test_a_step_has_no_more_tokens_than_may_be_and_no_text_is_another(bundle, prompts):
    """Trees that no step has room for are refused, the others are cut."""
    asked, params = ["\n".join(prompts)[:1000], "def main(", prompts[-1]], SamplingParams(16, temperature=0.9, seed=1)
    with Engine.load(bundle, batch_size=4) as engine:
        expected = engine.generate(asked, params)
    for most in (8, 24):
        with Engine.load(bundle, batch_size=4, max_num_batched_tokens=most) as engine:
            found = engine.generate(asked, params)
            assert [each.token_ids for each in found] == [each.token_ids for each in expected]
            drafted = engine.generate("x", replace(params, speculation=f"chain:{most // 4 - 1}"))[0].metrics
            assert drafted
            assert drafted.speculative_decoding.num_draft_tokens > 0
            with pytest.raises(OptionError, match=f"max_draft_tokens allows {most // 4 - 1}: ask for fewer"):
                engine.generate("x", replace(params, speculation=f"chain:{most // 4}"))


@pytest.mark.slow
def test_a_text_ends_where_max_model_len_is(bundle):
    """Prompt and output together; a prompt that leaves no room for a token is refused."""
    params = SamplingParams(60, ignore_eos=True)
    with Engine.load(bundle) as engine:
        (free,), prompt = engine.generate("def main(", params), engine.encode("def main(")
    with Engine.load(bundle, max_model_len=32) as engine:
        for speculation in ("off", "chain:4"):
            (result,) = engine.generate("def main(", replace(params, speculation=speculation))
            assert (result.token_ids, result.finish_reason) == (free.token_ids[: 32 - len(prompt)], "length")
        assert len(engine.generate([5] * 31, SamplingParams(9))[0].token_ids) == 1
        for call in (engine.generate, engine.encode, engine.submit):
            with pytest.raises(PromptError, match="32 tokens, this model takes 32 with at least"):
                call([5] * 32)


@pytest.mark.parametrize("own", [None, b"{% if %}"], ids=["none", "broken"])
def test_a_chat_template_is_in_place_of_the_bundles(bundle_copy, own):
    """Whether the bundle has one, even one that is none."""
    if own is not None:
        (bundle_copy / "chat.jinja").write_bytes(own)
        manifest = Bundle.open(bundle_copy).manifest
        files = {**manifest.files, "chat.jinja": file_record(bundle_copy / "chat.jinja")}
        changed = replace(manifest, chat_template="chat.jinja", files=files)
        (bundle_copy / MANIFEST).write_text(changed.to_json(), encoding="utf-8")
    messages = [{"role": "user", "content": "def f("}]
    with Engine.load(bundle_copy, chat_template="# {{ messages[0]['content'] }}") as engine:
        assert engine.encode(messages) == engine.encode("# def f(")
        assert engine.generate(messages, SHORT)[0].token_ids == engine.generate("# def f(", SHORT)[0].token_ids


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages", "{% nonsense %}\n\n", "{{ x | no_such }}", "\ud800"])
def test_a_chat_template_that_is_none_is_refused_when_it_is_loaded(bundle, template):
    with pytest.raises(OptionError, match=r"^(?!.*the bundle's).*template"):
        Engine.load(bundle, chat_template=template)


def test_texts_become_tokens_and_texts_again(bundle):
    text = "größe = '🙂'"
    with Engine.load(bundle) as engine:
        tokens = engine.encode(text)
        end = [*tokens, engine.manifest.eos_token_ids[0]]
        assert engine.encode(tokens) == tokens
        assert engine.decode(end) == text
        assert engine.decode(end, skip_special_tokens=False) == f"{text}<|endoftext|>"
        for prompt in ("", [], [4096], [-1], "x" * 100_000):
            with pytest.raises(PromptError):
                engine.encode(prompt)
