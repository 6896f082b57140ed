"""Options say what they are, are refused in one line where they cannot be meant, and reach an engine by either way."""

from __future__ import annotations

import asyncio
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

from specbuild.runtime import AsyncEngine, Engine, Result, SamplingParams
from specbuild.runtime.backends.executor import StepInput
from specbuild.runtime.bundle.backend import BACKENDS
from specbuild.runtime.bundle.bundle import Bundle, file_record
from specbuild.runtime.bundle.manifest import MANIFEST, EngineRecord, Manifest
from specbuild.runtime.engine import engine as engine_module
from specbuild.runtime.engine.load_options import MAX_THREADS, MAX_WAITING, LoadKeywords, LoadOptions
from specbuild.runtime.errors import OptionError, PromptError
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits

FIELDS = [field.name for field in dataclasses.fields(LoadOptions)]
MOST = max(MAX_THREADS, os.cpu_count() or 1)
SAID: dict[str, Any] = {  # options that not every backend has, said
    "threads": 2,
    "draft_threads": 2,
    "overlap": True,
    "resident": True,
    "gpu_weights_percent": 0.0,
    "max_num_batched_tokens": 8,
}
WHO = {name: [each for each, backend in BACKENDS.items() if name in backend.load_options] for name in SAID}
OTHERS: dict[str, Any] = {  # every other option, otherwise than by default
    "drafter": "model",
    "batch_size": 2,
    "max_waiting": 3,
    "prefix_caching": False,
    "limits": Limits(max_draft_tokens=2),
    "on_finish": print,
    "stall_timeout": 5.0,
    "max_model_len": 16,
    "chat_template": "{{ messages }}",
    "live_timings": False,
}


def one_line(error: pytest.ExceptionInfo[OptionError]) -> str:
    """The message, which is."""
    assert "\n" not in str(error.value)
    return str(error.value)


def test_keywords_are_the_fields() -> None:
    """`load` takes each of them by its name, of the same type, and none has to be given."""
    assert typing.get_type_hints(LoadKeywords) == typing.get_type_hints(LoadOptions)
    assert list(LoadKeywords.__annotations__) == FIELDS
    assert (LoadKeywords.__optional_keys__, LoadKeywords.__required_keys__) == (set(FIELDS), set())


def test_every_field_is_explained_once() -> None:
    assert LoadOptions.__doc__
    explained = re.findall(r"^ *(\w+): ", LoadOptions.__doc__, re.MULTILINE)
    assert sorted(explained) == sorted(FIELDS)


def test_what_is_for_some_backends_alone_is_said_so() -> None:
    assert LoadOptions.__doc__
    _, some = LoadOptions.__doc__.split("Some are for bundles of some backends alone:")
    explained = re.findall(r"^ *(\w+): ", some, re.MULTILINE)
    assert set(explained) == {*SAID, "kv_cache_tokens"}


def test_backends_know_options_that_there_are() -> None:
    assert {name for backend in BACKENDS.values() for name in backend.load_options} == set(SAID)
    assert set(FIELDS) == {*SAID, *OTHERS, "kv_cache_tokens"}


def test_nothing_has_to_be_said() -> None:
    found = dataclasses.asdict(dataclasses.replace(LoadOptions(), limits=NO_LIMITS)) | {"limits": LoadOptions().limits}
    assert found.pop("limits") is NO_LIMITS
    assert found == {
        **dict.fromkeys(["drafter", "threads", "draft_threads", "resident", "gpu_weights_percent", "kv_cache_tokens"]),
        **{"batch_size": 1, "max_waiting": MAX_WAITING, "prefix_caching": True},
        **dict.fromkeys(["max_model_len", "max_num_batched_tokens", "chat_template", "overlap", "on_finish"]),
        "stall_timeout": 60.0,
        "live_timings": True,
    }


def test_options_do_not_change() -> None:
    options = LoadOptions()
    for name in FIELDS:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options, name, None)
    with pytest.raises(TypeError):
        LoadOptions("model")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("drafter", "eagle", "unknown drafter 'eagle': use model or ngram"),
        ("drafter", "", "unknown drafter '': use model or ngram"),
        ("drafter", False, "unknown drafter False: use model or ngram"),
        ("drafter", ["model"], "unknown drafter ['model']: use model or ngram"),
        *[
            ("batch_size", value, f"batch size {value!r}: give a whole number of at least 1")
            for value in (0, -1, 1.0, True, "2", None)
        ],
        *[
            (name, value, f"threads must be 1…{MOST}, not {value!r}")
            for name in ("threads", "draft_threads")
            for value in (0, -2, MOST + 1, 2.0, True, "2")
        ],
        *[
            ("max_waiting", value, f"max_waiting must be a whole number of at least 1, not {value!r}")
            for value in (0, -1, 1.5, True, "9", None)
        ],
        *[
            ("gpu_weights_percent", value, f"gpu_weights_percent is of 0…1, not {value}")
            for value in (-0.1, 1.01, 50, math.nan, math.inf)
        ],
        *[("limits", value, f"limits must be Limits, not {value!r}") for value in (None, 8, {"max_draft_tokens": 8})],
        *[("resident", value, f"resident must be true, false or None, not {value!r}") for value in (1, "no")],
        *[("prefix_caching", value, f"prefix_caching must be true or false, not {value!r}") for value in (None, "off")],
        *[("overlap", value, f"overlap must be true, false or None, not {value!r}") for value in (1, "yes")],
        *[
            ("kv_cache_tokens", value, f"kv_cache_tokens must be a whole number or None, not {value!r}")
            for value in (64.0, True, "64")
        ],
        *[("gpu_weights_percent", value, f"gpu_weights_percent is of 0…1, not {value!r}") for value in ("0.5", True)],
        ("on_finish", 3, "on_finish must be a function of a result, not 3"),
        *[
            ("stall_timeout", value, f"stall_timeout must be seconds above 0, or None, not {value!r}")
            for value in (0, -1.0, math.inf, math.nan, "5", True)
        ],
        *[
            (name, value, f"{name} must be a whole number of at least 2, not {value!r}")
            for name in ("max_model_len", "max_num_batched_tokens")
            for value in (0, 1, -4, 8.0, True, "8")
        ],
        *[("chat_template", value, f"chat_template must be a text or None, not {value!r}") for value in (5, b"x")],
    ],
)
def test_what_cannot_be_meant_is_refused_when_it_is_made(name: str, value: Any, message: str) -> None:
    """Also where options are made from others."""
    with pytest.raises(OptionError) as caught:
        LoadOptions(**{name: value})
    assert one_line(caught) == message
    with pytest.raises(OptionError):
        dataclasses.replace(LoadOptions(), **{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("drafter", [None, "model", "ngram"]),
        ("batch_size", [1, 10**6]),
        ("threads", [None, 1, MOST]),
        ("draft_threads", [None, 1, MOST]),
        ("max_waiting", [1, 10**6]),
        ("gpu_weights_percent", [None, 0, 0.0, 0.5, 1, 1.0]),
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
@pytest.mark.parametrize("name", SAID)
def test_an_option_that_a_backend_has_not_is_refused(
    bundle_for: Callable[..., Bundle], backend: str, name: str
) -> None:
    """In one line, which says whose it is; `gpu_weights_percent` 0 is said, too."""
    options, able = LoadOptions(**{name: SAID[name]}), WHO[name]
    if backend in able:
        options.check(bundle_for(backend))
        return
    with pytest.raises(OptionError) as caught:
        options.check(bundle_for(backend))
    have = f"({', '.join(able)} {'has' if len(able) == 1 else 'have'} it)"
    assert one_line(caught) == f"some.bundle runs on {backend}, which has no {name}: drop it {have}"


@pytest.mark.parametrize(
    ("backend", "name", "have"),
    [
        ("tensorrt", "threads", "(onnxruntime has it)"),
        ("onnxruntime", "resident", "(onnxruntime-cuda, tensorrt, tensorrt-rtx have it)"),
        ("onnxruntime-cuda", "gpu_weights_percent", "(tensorrt, tensorrt-rtx have it)"),
    ],
)
def test_who_has_an_option(bundle_for: Callable[..., Bundle], backend: str, name: str, have: str) -> None:
    with pytest.raises(OptionError, match=re.escape(have)):
        LoadOptions(**{name: SAID[name]}).check(bundle_for(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_said_is_refused_by_nobody(bundle_for: Callable[..., Bundle], backend: str) -> None:
    LoadOptions().check(bundle_for(backend))
    LoadOptions(**dict.fromkeys(SAID, None)).check(bundle_for(backend))
    LoadOptions(resident=False, overlap=False).check(bundle_for(backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OTHERS)
def test_what_every_backend_has_is_refused_by_none(bundle_for: Callable[..., Bundle], backend: str, name: str) -> None:
    LoadOptions(**{name: OTHERS[name]}).check(bundle_for(backend))


def test_more_sequences_than_a_bundle_was_built_for_are_refused(bundle_for: Callable[..., Bundle]) -> None:
    LoadOptions(batch_size=2).check(bundle_for())
    with pytest.raises(OptionError) as caught:
        LoadOptions(batch_size=3).check(bundle_for())
    assert one_line(caught) == (
        "batch size 3 is not in 1…2, what some.bundle was built for: build it with --max-batch-size"
    )


@pytest.mark.parametrize("drafter", [None, "ngram", "model"])
def test_a_model_that_is_not_there_does_not_draft(bundle_for: Callable[..., Bundle], drafter: Any) -> None:
    options = LoadOptions(drafter=drafter)
    options.check(bundle_for())
    if drafter != "model":
        options.check(bundle_for(draft=False))
        return
    with pytest.raises(OptionError) as caught:
        options.check(bundle_for(draft=False))
    assert one_line(caught) == ("some.bundle has no draft: use the ngram drafter, or build it with --draft")


def test_tokens_are_of_paged_caches_alone(bundle_for: Callable[..., Bundle]) -> None:
    with pytest.raises(OptionError, match="the bundle's caches are not paged: drop kv_cache_tokens") as caught:
        LoadOptions(kv_cache_tokens=64).check(bundle_for())
    one_line(caught)


@pytest.mark.parametrize(
    ("tokens", "fits"), [(None, True), (32, True), (144, True), (31, False), (145, False), (0, False)]
)
def test_tokens_of_paged_caches(bundle_for: Callable[..., Bundle], tokens: Any, fits: bool) -> None:
    """At least a page of 32 rows, and no more than two texts of 72."""
    plan = EngineRecord("10.1", [], "plugin", "1", False, None, 0, {}, block_size=32)
    bundle, options = bundle_for("tensorrt", engines={"target/model.plan": plan}), LoadOptions(kv_cache_tokens=tokens)
    if fits:
        options.check(bundle)
        return
    with pytest.raises(OptionError) as caught:
        options.check(bundle)
    assert one_line(caught) == f"kv_cache_tokens must be 32…144 for this bundle, not {tokens}"


def test_nothing_is_loaded_that_cannot_be(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check comes before any file is read."""
    monkeypatch.setattr(Bundle, "verified", lambda self: pytest.fail("it reads the files"))
    with pytest.raises(OptionError, match="which has no resident"):
        Engine.load(bundle, LoadOptions(resident=True))
    with pytest.raises(OptionError, match="unknown drafter"):
        Engine.load(bundle, drafter="eagle")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="treads"):
        Engine.load(bundle, treads=2)  # type: ignore[call-arg]


class Composed(Exception):  # noqa: N818
    """In place of loading a bundle's models."""

    def __init__(self, bundle: Bundle, options: LoadOptions) -> None:
        self.options = options


@pytest.fixture(params=["engine", "twin"])
def asked(request: pytest.FixtureRequest, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadOptions]:
    """`asked(*load's)`: the options with which an engine, or its twin for asyncio, would load the bundle."""

    def compose(bundle: Bundle, options: LoadOptions) -> None:
        raise Composed(bundle, options)

    def load(*options: LoadOptions, **given: Any) -> object:
        if request.param == "engine":
            return Engine.load(bundle, *options, **given)
        return asyncio.run(AsyncEngine.load(bundle, *options, **given))

    def ask(*options: LoadOptions, **given: Any) -> LoadOptions:
        with pytest.raises(Composed) as caught:
            load(*options, **given)
        return caught.value.options

    monkeypatch.setattr(engine_module, "compose", compose)
    return ask


def test_options_are_given_at_once_or_one_by_one(asked: Callable[..., LoadOptions]) -> None:
    assert asked() == LoadOptions()
    every = OTHERS | SAID | {"kv_cache_tokens": 64}
    assert asked(**every) == asked(LoadOptions(**every)) == LoadOptions(**every)
    for name, value in every.items():
        assert asked(**{name: value}) == LoadOptions(**{name: value}), name


def test_a_keyword_goes_before_an_option(asked: Callable[..., LoadOptions]) -> None:
    options = LoadOptions(batch_size=4, threads=2, drafter="ngram")
    assert asked(options, batch_size=2) == LoadOptions(batch_size=2, threads=2, drafter="ngram")
    assert asked(options, threads=None, drafter=None) == LoadOptions(batch_size=4)
    assert options == LoadOptions(batch_size=4, threads=2, drafter="ngram"), "they are not changed"


def test_what_an_engine_is_loaded_with(bundle: Path) -> None:
    told = list[Result]()
    options = LoadOptions(batch_size=4, threads=1, max_waiting=3, prefix_caching=False, on_finish=told.append)
    with Engine.load(bundle, options, batch_size=2) as engine:
        assert (engine.batch_size, engine.scheduler.max_waiting) == (2, 3)
        results = engine.generate(["def main(", "import "], SHORT)
        assert engine.usage.reusable_tokens == 0
        assert engine.drain(60)
    assert sorted(result.text for result in told) == sorted(result.text for result in results)


def test_what_a_twin_is_loaded_with(bundle: Path) -> None:
    told = list[Result]()

    async def main() -> list[Result]:
        loaded = await AsyncEngine.load(bundle, LoadOptions(threads=1, batch_size=2), on_finish=told.append)
        async with loaded as twin:
            assert (twin.engine.batch_size, twin.engine.scheduler.max_waiting) == (2, MAX_WAITING)
            results = await twin.generate("def main(", SHORT)
            assert await twin.drain(60)
            return results

    (result,) = asyncio.run(asyncio.wait_for(main(), 120))
    assert [each.token_ids for each in told] == [result.token_ids]


def test_what_no_draft_can_do_is_refused(bundle_for: Callable[..., Bundle]) -> None:
    for given in ({"overlap": True}, {"draft_threads": 2}):
        with pytest.raises(OptionError, match="the ngram drafter has no model: drop overlap and draft_threads"):
            LoadOptions(drafter="ngram", **given)
    LoadOptions(drafter="ngram", overlap=False)
    opened = bundle_for("onnxruntime")
    models = {"target": opened.manifest.models["target"]}
    alone = Bundle(opened.folder, dataclasses.replace(opened.manifest, models=models))
    with pytest.raises(OptionError, match="no draft that drafts token by token, and so ahead: drop overlap"):
        LoadOptions(overlap=True).check(alone)
    with pytest.raises(OptionError, match="was built without a draft: drop draft_threads"):
        LoadOptions(draft_threads=1).check(alone)
    LoadOptions(overlap=True, draft_threads=1).check(opened)


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


@pytest.mark.slow
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


def test_a_tree_that_no_step_has_room_for_is_refused(spied: Callable[..., tuple[Engine, list[int]]]) -> None:
    engine, steps = spied(max_num_batched_tokens=16)
    assert engine.generate("x", SamplingParams(8, speculation="chain:3"))[0].finish_reason == "length"
    with pytest.raises(OptionError, match="tree chain:4 drafts 4 nodes, max_draft_tokens allows 3: ask for fewer"):
        engine.generate("x", SamplingParams(8, speculation="chain:4"))
    assert max(steps) <= 16


def test_a_text_ends_where_max_model_len_is(bundle: Path) -> None:
    """Prompt and output together; a prompt that leaves no room for a token is refused."""
    with Engine.load(bundle) as engine:
        assert engine.max_model_len == engine.manifest.max_seq_len == 1024
        (free,) = engine.generate("def main(", SamplingParams(60, ignore_eos=True))
        prompt = engine.encode("def main(")
    with Engine.load(bundle, max_model_len=32) as engine:
        assert engine.max_model_len == 32
        for speculation in ("off", "auto", "chain:4"):
            params = SamplingParams(60, ignore_eos=True, speculation=speculation)
            (result,) = engine.generate("def main(", params)
            assert (len(prompt) + len(result.token_ids), result.finish_reason) == (32, "length")
            assert result.token_ids == free.token_ids[: 32 - len(prompt)]
        assert len(engine.generate([5] * 31, SamplingParams(9))[0].token_ids) == 1
        for call in (engine.generate, engine.encode, engine.submit):
            with pytest.raises(PromptError, match="32 tokens, this model takes 32 with at least") as caught:
                call([5] * 32)  # type: ignore[operator]
            assert "\n" not in str(caught.value)


def test_more_than_a_bundle_was_built_for_is_refused(bundle_for: Callable[..., Bundle]) -> None:
    LoadOptions(max_model_len=64).check(bundle_for())
    with pytest.raises(OptionError) as caught:
        LoadOptions(max_model_len=65).check(bundle_for())
    assert one_line(caught) == (
        "max_model_len 65 is more than 64, what some.bundle was built for: build it with --max-seq-len"
    )


@pytest.mark.parametrize(("most", "batch_size", "fits"), [(2, 1, True), (8, 4, True), (7, 4, False), (3, 2, False)])
def test_a_step_has_room_for_two_tokens_of_each(most: int, batch_size: int, fits: bool) -> None:
    if fits:
        LoadOptions(max_num_batched_tokens=most, batch_size=batch_size)
        return
    with pytest.raises(OptionError) as caught:
        LoadOptions(max_num_batched_tokens=most, batch_size=batch_size)
    assert one_line(caught) == (f"max_num_batched_tokens is {most}: give at least 2 for each of {batch_size} sequences")


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
    with pytest.raises(OptionError) as caught:
        Engine.load(bundle, chat_template=template)
    assert "template" in one_line(caught)
    assert "the bundle's" not in one_line(caught)


def test_samples_without_temperature_are_one_text(bundle: Path) -> None:
    """As many as are asked for, whatever is drafted; with it each has its own seed."""
    with Engine.load(bundle, batch_size=2) as engine:
        (alone,) = engine.generate("def main(", SamplingParams(12))
        for speculation in ("off", "auto"):
            found = engine.generate(["def main(", "x"], SamplingParams(12, n=3, seed=5, speculation=speculation))
            assert [result.token_ids for result in found[:3]] == [alone.token_ids] * 3
            assert len(found) == 6
        sampled = engine.generate("def main(", SamplingParams(12, n=3, seed=5, temperature=1.0))
        assert len({tuple(result.token_ids) for result in sampled}) == 3


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
