"""Options say what they are, are refused in one line where they cannot be meant, and reach an engine by either way."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engine_checks import SHORT
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime import Engine, Result, SamplingParams
from specbuild.runtime.backends.executor import StepInput
from specbuild.runtime.bundle.backend import BACKENDS
from specbuild.runtime.bundle.bundle import Bundle, file_record
from specbuild.runtime.bundle.manifest import MANIFEST, EngineRecord, Manifest
from specbuild.runtime.engine.load_options import MAX_THREADS, LoadKeywords, LoadOptions
from specbuild.runtime.errors import OptionError, PromptError
from specbuild.runtime.speculation.draft_limits import Limits

FIELDS = [field.name for field in dataclasses.fields(LoadOptions)]
MOST = max(MAX_THREADS, os.cpu_count() or 1)
NOTHING = st.booleans() | st.binary() | st.lists(st.none()) | st.sampled_from([math.nan, math.inf, object()])
FLAWED = NOTHING | st.text() | st.floats()
WRONG: dict[str, st.SearchStrategy[Any]] = {
    "drafter": FLAWED.filter(lambda value: value not in ("model", "ngram")),
    **{name: FLAWED | st.none() | st.integers(max_value=0) for name in ("batch_size", "max_waiting")},
    **{
        name: FLAWED | st.integers(max_value=0) | st.integers(min_value=MOST + 1)
        for name in ("threads", "draft_threads")
    },
    "gpu_weights_percent": NOTHING | st.text() | st.floats(max_value=0, exclude_max=True) | st.integers(min_value=2),
    "limits": FLAWED | st.none(),
    **{name: st.integers() | st.text() for name in ("resident", "overlap")},
    **{name: st.integers() | st.text() | st.none() for name in ("prefix_caching", "live_timings")},
    "kv_cache_tokens": FLAWED,
    "on_finish": FLAWED,
    "stall_timeout": NOTHING | st.text() | st.floats(max_value=0) | st.integers(max_value=0),
    **{name: FLAWED | st.integers(max_value=1) for name in ("max_model_len", "max_num_batched_tokens")},
    "chat_template": st.integers() | st.binary(),
}


def test_keywords_are_the_fields_and_each_is_explained_once() -> None:
    """`load` takes each of them by its name, of the same type, and none has to be given."""
    assert typing.get_type_hints(LoadKeywords) == typing.get_type_hints(LoadOptions)
    assert (LoadKeywords.__optional_keys__, LoadKeywords.__required_keys__) == (set(FIELDS), set())
    explained = re.findall(r"^ *(\w+): ", LoadOptions.__doc__ or "", re.MULTILINE)
    assert sorted(explained) == sorted(FIELDS)


@pytest.mark.parametrize("name", sorted(FIELDS))
@given(data=st.data())
def test_what_cannot_be_meant_is_refused_when_it_is_made(name: str, data: Any) -> None:
    """Also where options are made from others."""
    value = data.draw(WRONG[name])
    for make in (LoadOptions, lambda **given: dataclasses.replace(LoadOptions(), **given)):
        with pytest.raises(OptionError) as caught:
            make(**{name: value})
        assert name.removeprefix("draft_").replace("_size", "") in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("drafter", [None, "model", "ngram"]),
        ("batch_size", [1, 10**6]),
        ("threads", [None, 1, MOST]),
        ("max_waiting", [1, 10**6]),
        ("gpu_weights_percent", [None, 0, 0.5, 1.0]),
        ("stall_timeout", [None, 0.1, 5]),
    ],
)
def test_the_ends_of_what_can_be_meant(name: str, values: list[Any]) -> None:
    assert [getattr(LoadOptions(**{name: value}), name) for value in values] == values


@pytest.fixture
def bundle_for(manifest_of: Callable[..., Manifest]) -> Callable[..., Bundle]:
    """`bundle_for(backend, **manifest's)`: a bundle of two sequences with a draft, of which there is a manifest."""

    def make(backend: str = "onnxruntime", draft: Any = True, **fields: Any) -> Bundle:
        return Bundle(Path("some.bundle"), manifest_of(draft={} if draft else None, backend=backend, **fields))

    return make


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_option_that_a_backend_has_not_is_refused(bundle_for: Callable[..., Bundle], backend: str) -> None:
    """In one line, which says whose it is; `gpu_weights_percent` 0 is said, too. What every backend has is taken."""
    some = {"threads": 2, "draft_threads": 2, "overlap": True, "resident": True}
    some |= {"gpu_weights_percent": 0.0, "max_num_batched_tokens": 8}
    bundle = bundle_for(backend)
    assert {name for each in BACKENDS.values() for name in each.load_options} == set(some)
    for name, value in some.items():
        LoadOptions(**{name: None}).check(bundle)
        options, able = LoadOptions(**{name: value}), [a for a, b in BACKENDS.items() if name in b.load_options]
        if backend in able:
            options.check(bundle)
            continue
        with pytest.raises(OptionError) as caught:
            options.check(bundle)
        have = f"({', '.join(able)} {'has' if len(able) == 1 else 'have'} it)"
        assert str(caught.value) == f"some.bundle runs on {backend}, which has no {name}: drop it {have}"
    every: dict[str, Any] = {"resident": False, "overlap": False, "drafter": "model", "batch_size": 2}
    every |= {"prefix_caching": False, "limits": Limits(max_draft_tokens=2), "on_finish": print, "max_model_len": 64}
    LoadOptions(**every, max_waiting=3, stall_timeout=5.0, chat_template="{{ messages }}").check(bundle)


PAGED = {
    "backend": "tensorrt",
    "engines": {"target/model.plan": EngineRecord("10.1", [], "plugin", "1", False, None, 0, {}, block_size=32)},
}


@pytest.mark.parametrize(
    ("given", "fields", "told"),
    [
        ({"batch_size": 3}, {}, "batch size 3 is not in 1…2, what some.bundle was built for"),
        ({"max_model_len": 65}, {}, "max_model_len 65 is more than 64, what some.bundle was built for"),
        ({"drafter": "model"}, {"draft": False}, "some.bundle has no draft: use the ngram drafter"),
        ({"overlap": True}, {"draft": False}, "no draft that drafts token by token, and so ahead: drop overlap"),
        ({"draft_threads": 1}, {"draft": False}, "was built without a draft: drop draft_threads"),
        ({"drafter": "ngram", "overlap": True}, {}, "the ngram drafter has no model: drop overlap"),
        ({"drafter": "ngram", "draft_threads": 2}, {}, "the ngram drafter has no model: drop overlap"),
        ({"kv_cache_tokens": 64}, {}, "the bundle's caches are not paged: drop kv_cache_tokens"),
        *[({"kv_cache_tokens": n}, PAGED, "must be 32…144 for this bundle, not") for n in (0, 31, 145)],
        ({"max_num_batched_tokens": 3, "batch_size": 2}, {}, "is 3: give at least 2 for each of 2 sequences"),
        *[({"kv_cache_tokens": n}, PAGED, None) for n in (None, 32, 144)],
        ({"max_num_batched_tokens": 4, "batch_size": 2}, {}, None),
        ({"drafter": "ngram", "overlap": False}, {"draft": False}, None),
        ({"overlap": True, "draft_threads": 1}, {}, None),
    ],
)
def test_what_a_bundle_cannot_do_is_refused(
    bundle_for: Callable[..., Bundle], given: dict[str, Any], fields: dict[str, Any], told: str | None
) -> None:
    bundle = bundle_for(**fields)
    if told is None:
        LoadOptions(**given).check(bundle)
        return
    with pytest.raises(OptionError, match=told) as caught:
        LoadOptions(**given).check(bundle)
    assert "\n" not in str(caught.value)


def test_nothing_is_loaded_that_cannot_be(bundle_copy: Path) -> None:
    """The check comes before any file is read."""
    (bundle_copy / "target" / "weights.bin").unlink()
    with pytest.raises(OptionError, match="which has no resident"):
        Engine.load(bundle_copy, LoadOptions(resident=True))
    with pytest.raises(OptionError, match="unknown drafter"):
        Engine.load(bundle_copy, drafter="eagle")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="treads"):
        Engine.load(bundle_copy, treads=2)  # type: ignore[call-arg]


def test_what_an_engine_is_loaded_with(bundle: Path) -> None:
    """A keyword goes before an option."""
    told = list[Result]()
    options = LoadOptions(batch_size=4, threads=1, max_waiting=3, prefix_caching=False, on_finish=told.append)
    with Engine.load(bundle, options, batch_size=2) as engine:
        assert (engine.batch_size, engine.scheduler.max_waiting, options.batch_size) == (2, 3, 4)
        results = engine.generate(["def main(", "import "], SHORT)
        assert engine.usage.reusable_tokens == 0
        assert engine.drain(60)
    assert sorted(result.text for result in told) == sorted(result.text for result in results)


@pytest.fixture
def spied(bundle: Path) -> Iterator[Callable[..., tuple[Engine, list[int]]]]:
    """`spied(**options)`: an engine of four sequences, and the nodes of each of its target's steps."""
    with ExitStack() as stack:

        def load(**given: Any) -> tuple[Engine, list[int]]:
            engine = stack.enter_context(Engine.load(bundle, batch_size=4, **given))
            steps, target = list[int](), engine._loop.target
            run = target.step

            def step(inputs: Sequence[StepInput]) -> Any:
                steps.append(sum(len(each.tokens) for each in inputs))
                return run(inputs)

            target.step = step  # type: ignore[method-assign]
            return engine, steps

        yield load


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_step_has_more_tokens_than_may_be_and_no_text_is_another(
    spied: Callable[..., tuple[Engine, list[int]]], prompts: list[str], temperature: float
) -> None:
    """Four at once, long prompts among them; trees whose side branches are computed again in later steps."""
    asked = ["\n".join(prompts)[:2000], "def main(", *prompts[-4:], prompts[-1] * 3]
    params = [SamplingParams(40, temperature=temperature, seed=index) for index in range(len(asked))]
    engine, free = spied()
    expected = [result.token_ids for result in engine.generate(asked, params)]
    for most in (8, 24, 300):
        engine, steps = spied(max_num_batched_tokens=most)
        results = engine.generate(asked, params)
        assert [result.token_ids for result in results] == expected
        (alone,) = engine.generate(asked[0], params[0])
        assert alone.token_ids == expected[0]
        assert most // 2 < max(steps) <= most, most
        if most > 8:
            assert all(result.metrics.speculative_decoding.num_draft_tokens for result in results)
    assert max(free) > 100


def test_a_tree_that_no_step_has_room_for_is_refused(bundle: Path) -> None:
    with Engine.load(bundle, batch_size=4, max_num_batched_tokens=16) as engine:
        assert engine.generate("x", SamplingParams(8, speculation="chain:3"))[0].finish_reason == "length"
        with pytest.raises(OptionError, match="tree chain:4 drafts 4 nodes, max_draft_tokens allows 3: ask for fewer"):
            engine.generate("x", SamplingParams(8, speculation="chain:4"))


def test_a_text_ends_where_max_model_len_is(bundle: Path) -> None:
    """Prompt and output together; a prompt that leaves no room for a token is refused."""
    with Engine.load(bundle) as engine:
        (free,) = engine.generate("def main(", SamplingParams(60, ignore_eos=True))
        prompt = engine.encode("def main(")
    with Engine.load(bundle, max_model_len=32) as engine:
        for speculation in ("off", "auto", "chain:4"):
            params = SamplingParams(60, ignore_eos=True, speculation=speculation)
            (result,) = engine.generate("def main(", params)
            assert (len(prompt) + len(result.token_ids), result.finish_reason) == (32, "length")
            assert result.token_ids == free.token_ids[: 32 - len(prompt)]
        assert len(engine.generate([5] * 31, SamplingParams(9))[0].token_ids) == 1
        for call in (engine.generate, engine.encode, engine.submit):
            with pytest.raises(PromptError, match="32 tokens, this model takes 32 with at least"):
                call([5] * 32)  # type: ignore[operator]


@pytest.mark.parametrize("own", [None, b"OWN {{ messages[0]['content'] }}", b"{% if %}"], ids=["none", "own", "broken"])
def test_a_chat_template_is_in_place_of_the_bundles(bundle_copy: Path, own: bytes | None) -> None:
    """Whether the bundle has one, even one that is none."""
    if own is not None:
        (bundle_copy / "chat.jinja").write_bytes(own)
        manifest = Bundle.open(bundle_copy).manifest
        files = {**manifest.files, "chat.jinja": file_record(bundle_copy / "chat.jinja")}
        changed = dataclasses.replace(manifest, chat_template="chat.jinja", files=files)
        (bundle_copy / MANIFEST).write_text(changed.to_json(), encoding="utf-8")
    messages = [{"role": "user", "content": "def f("}]
    with Engine.load(bundle_copy, chat_template="# {{ messages[0]['content'] }}") as engine:
        assert engine.decode(engine.encode(messages)) == "# def f("
        assert engine.generate(messages, SHORT)[0].token_ids == engine.generate("# def f(", SHORT)[0].token_ids


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages", "{% nonsense %}\n\n", "{{ x | no_such }}", "\ud800"])
def test_a_chat_template_that_is_none_is_refused_when_it_is_loaded(bundle: Path, template: str) -> None:
    with pytest.raises(OptionError, match=r"^(?!.*the bundle's).*template") as caught:
        Engine.load(bundle, chat_template=template)
    assert "\n" not in str(caught.value)


def test_texts_become_tokens_and_texts_again(bundle: Path) -> None:
    with Engine.load(bundle) as engine:
        tokens = engine.encode("größe = '🙂'")
        assert engine.decode(tokens) == "größe = '🙂'"
        assert engine.encode(tokens) == tokens
        end = [*tokens, engine.manifest.eos_token_ids[0]]
        assert engine.decode(end) == "größe = '🙂'"
        assert engine.decode(end, skip_special_tokens=False) == "größe = '🙂'<|endoftext|>"
        assert engine.decode([]) == ""
        for prompt in ("", [], [4096], [-1], "x" * 100_000):
            with pytest.raises(PromptError):
                engine.encode(prompt)
