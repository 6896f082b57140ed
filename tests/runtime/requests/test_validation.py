"""Validation makes a sequence of every sample, and says in one line what is wrong with a prompt or its parameters."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_checks import expected
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime import Chat, SamplingParams
from specbuild.runtime.bundle.manifest import Manifest
from specbuild.runtime.errors import ExecutionError, InputError, OptionError, PromptError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.requests.tokenizer import Tokenizer
from specbuild.runtime.requests.validation import Validator
from specbuild.runtime.sampling.structured import StructuredOutputs
from specbuild.runtime.speculation.policy import Policy
from specbuild.runtime.speculation.timings import TimingTable

Make = Callable[..., Validator]
VOCAB, LONGEST = 4096, 64  # of the tokenizer, and of the bundle
SHORT = SamplingParams(max_new_tokens=6)
SAMPLED = SamplingParams(max_new_tokens=6, temperature=1.0)


@pytest.fixture(scope="session")
def chat_tokenizer(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One that knows chats."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}", encoding="utf-8")
    return Tokenizer(pair / "target" / "tokenizer.json", template, {})


@pytest.fixture(scope="session")
def make(manifest_of: Callable[..., Manifest], chat_tokenizer: Tokenizer) -> Make:
    """`make(**Validator arguments)`: a validator of a bundle of 4096 tokens, texts of 64 and buckets up to 8."""

    def make(**arguments: Any) -> Validator:
        given = {"manifest": manifest_of(target={"vocab_size": VOCAB}), "tokenizer": chat_tokenizer}
        given |= {"fits": lambda sequence: None}
        return Validator(**given | arguments)

    return make


def refused(kind: type[InputError], call: Callable[..., object], *arguments: Any) -> str:
    """The one line with which a call is refused, by an error of exactly this kind."""
    with pytest.raises(kind) as caught:
        call(*arguments)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


CHATS = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompts", "texts"),
    [
        ("def f(", ["def f("]),
        ((5, 6, 7), [[5, 6, 7]]),
        (CHATS, ["user:hi;"]),
        (("a", "b"), ["a", "b"]),
        ([CHATS, Chat(CHATS), "a", [7], (5,)], ["user:hi;", "user:hi;", "a", [7], [5]]),
        ((), []),
    ],
)
def test_one_prompt_is_a_list_of_one(make: Make, chat_tokenizer: Tokenizer, prompts: Any, texts: list[Any]) -> None:
    sequences, refused = make().requests(prompts, SHORT, "raise")
    wanted = [text if isinstance(text, list) else chat_tokenizer.encode(text) for text in texts]
    assert [sequence.tokens for sequence in sequences] == wanted
    assert [sequence.index for sequence in sequences] == list(range(len(texts)))
    assert refused == []


WRONG = st.one_of(
    st.sampled_from(
        ["", "a\ud800b", [], [{"content": "no role"}], [{"role": "user"}, 1], None, {"role": "user"}, [None]]
    ),
    st.floats(),
    st.lists(st.booleans() | st.floats(), min_size=1),
    st.lists(st.integers(max_value=-1) | st.integers(min_value=VOCAB), min_size=1),
    st.integers(LONGEST, 2 * LONGEST).map(lambda length: [5] * length),
)


@given(prompt=WRONG)
def test_what_is_wrong_with_a_prompt_is_said(make: Make, prompt: Any) -> None:
    line = refused(PromptError, make().requests, ["a", prompt], SHORT, "raise")
    assert line.startswith("prompt 2: ")
    assert "prompt" in line.removeprefix("prompt 2: ") or "messages" in line


def test_messages_need_a_chat_template(make: Make, tokenizer: Tokenizer) -> None:
    assert "chat template" in refused(PromptError, make(tokenizer=tokenizer).samples, CHATS, SHORT)


@pytest.mark.parametrize(("length", "new", "limit"), [(1, 1, 2), (10, 6, 16), (60, 5, 64), (63, 10**9, 64)])
def test_a_limit_is_what_was_asked_for_and_what_the_bundle_holds(make: Make, length: int, new: int, limit: int) -> None:
    (sequence,) = make().samples([5] * length, SamplingParams(max_new_tokens=new))
    assert (len(sequence.tokens), sequence.limit) == (length, limit)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"speculation": "topk:2,4"}, "tree 'topk:2,4' drafts 8 nodes, this bundle verifies at most 7"),
        ({"logit_bias": {5: 1.0, 10**9: 1.0}}, "logit_bias names a token past the vocabulary of 4096"),
    ],
)
def test_parameters_that_the_bundle_has_no_room_for_are_a_prompt_s_own_error(
    make: Make, params: dict[str, Any], message: str
) -> None:
    wrong = SamplingParams(**params, temperature=1.0, n=2)
    assert refused(OptionError, make().requests, ["a", "b"], [SHORT, wrong], "raise") == f"prompt 2: {message}"
    sequences, chunks = make().requests(["a", "b", "c"], [SHORT, wrong, SHORT], "return")
    assert [sequence.index for sequence in sequences] == [0, 2]
    for sample, chunk in enumerate(chunks):
        assert (chunk.index, chunk.sample, chunk.text, chunk.token_ids, chunk.logprobs) == (1, sample, "", [], None)
        assert chunk.result
        assert (chunk.result.finish_reason, str(chunk.result.error)) == ("error", message)
        assert chunk.result.metrics is None, "nothing ran, so nothing was measured"


def tuned(widest: str = "best:6") -> Policy:
    """A policy of some machine."""
    times = {"verify": [[1, 1.0]], "draft": [[1, 0.1]], "plain": 0.1, "round": 0.1, "level": 0.1}
    chances = {"likely": [-1.0, 0.0], "chance": [0.4, 0.9], "step": 0.7, "reach": [0, 0.7], "lookup": [0.0, 0.3]}
    record = {"schema": 2, "machine": {}, "widest": widest, "times": {"1": times}}
    return Policy(TimingTable.of(record | {"chances": {"greedy": chances, "sampled": chances}}, 8), drafts=True)


@pytest.mark.parametrize(
    ("bound", "default", "own"),
    [(math.inf, "chain:5", "chain:6"), (0.6, "chain:5", "chain:6"), (0, "best:5", "best:6")],
)
def test_auto_grows_chains_where_side_branches_could_not_be_settled(
    make: Make, bound: float, default: str, own: str
) -> None:
    """Who asks for a tree has it."""
    for policy, grown, name in ((None, default, default), (tuned(), own, "auto")):
        validator = make(bound=bound, policy=policy)
        (auto,), (asked,) = (validator.samples("a", SamplingParams(speculation=s)) for s in ("auto", "best:3"))
        assert (str(auto.tree), auto.metrics.speculation, str(asked.tree)) == (grown, name, "best:3")


def test_samples_share_nothing_that_grows(make: Make) -> None:
    prompt = [5, 6]
    one, other = make().samples(prompt, SamplingParams(temperature=1.0, n=2))
    one.emit(7, frozenset())
    assert (one.tokens, other.tokens, prompt) == ([5, 6, 7], [5, 6], [5, 6])
    assert (one.history.tolist(), other.history.tolist()) == ([5, 6, 7], [5, 6])
    for name in ("sampler", "detokenizer", "metrics"):
        assert getattr(one, name) is not getattr(other, name)


def test_who_gives_no_seed_gets_another_one_each_time(make: Make) -> None:
    seeds = {make().samples("a", SHORT)[0].metrics.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**53 for seed in seeds), "that JSON keeps in every language"


def test_whoever_never_gets_a_slot_is_told_once_a_prompt(make: Make) -> None:
    """By an error of its own kind."""
    asked: list[tuple[int, int]] = []

    def fits(sequence: Sequence) -> None:
        asked.append((sequence.index, sequence.sample))
        if len(sequence.tokens) > 3:
            raise ExecutionError("too long")

    validator, prompts = make(fits=fits), [[1, 2], [1, 2, 3, 4], [5]]
    _, chunks = validator.requests(prompts, SamplingParams(temperature=1.0, n=2), "return")
    assert asked == [(0, 0), (1, 0), (2, 0)]
    assert [(chunk.index, chunk.sample, str(chunk.result.error)) for chunk in chunks if chunk.result] == [
        (1, 0, "too long"),
        (1, 1, "too long"),
    ]
    with pytest.raises(ExecutionError, match=r"^prompt 2: too long$"):
        validator.requests(prompts, SHORT, "raise")


def test_what_was_not_raised_on_purpose_is_never_a_prompt_s_result(make: Make) -> None:
    def fits(sequence: Sequence) -> None:
        raise ZeroDivisionError("a bug")

    for errors in ("raise", "return"):
        with pytest.raises(ZeroDivisionError, match=r"^a bug$"):
            make(fits=fits).requests("a", SHORT, errors)


GOOD: list[Any] = ["ab", [1, 2], CHATS]
BAD: list[Any] = ["", [], [VOCAB], None, [1] * LONGEST]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(1, 3)), max_size=6))
def test_every_sample_of_every_prompt_is_a_sequence_or_refused(make: Make, drawn: list[tuple[bool, int, int]]) -> None:
    """In the prompts' order, whatever stands beside what."""
    prompts = [(GOOD if good else BAD)[which % len(GOOD if good else BAD)] for good, which, _ in drawn]
    params = [SamplingParams(temperature=1.0, n=n) for *_, n in drawn]
    sequences, chunks = make().requests(prompts, params, "return")
    want = {
        good: [(i, s) for i, (ok, _, n) in enumerate(drawn) if ok is good for s in range(n)] for good in (True, False)
    }
    assert [(sequence.index, sequence.sample) for sequence in sequences] == want[True]
    assert [(chunk.index, chunk.sample) for chunk in chunks] == want[False]
    bad = [i for i, (good, *_) in enumerate(drawn) if not good]
    if bad:
        assert refused(PromptError, make().requests, prompts, params, "raise").startswith(f"prompt {bad[0] + 1}: ")
    else:
        assert len(make().requests(prompts, params, "raise")[0]) == len(sequences)


def test_several_threads_may_ask_at_once(make: Make) -> None:
    validator, found = make(policy=tuned()), dict[int, list[list[int]]]()
    prompts = [[f"def f{i}_{j}(" for j in range(20)] for i in range(4)]

    def ask(which: int) -> None:
        found[which] = [sequence.tokens for sequence in validator.requests(prompts[which], SHORT, "raise")[0]]

    threads = [threading.Thread(target=ask, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which, texts in enumerate(prompts):
        assert found[which] == [validator.samples(text, SHORT)[0].tokens for text in texts]


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_what_cannot_run_is_raised_or_returned(hash_engine: Any, call: str) -> None:
    engine = hash_engine()
    prompts = ["ab", "", "cd", [99], None, "a" * 192]
    with pytest.raises(PromptError, match="prompt 2: the prompt is empty"):
        list(getattr(engine, call)(prompts, SHORT))
    assert engine.stats.rounds == 0
    out = list(getattr(engine, call)(prompts, SHORT, errors="return"))
    if call == "stream":
        out = [r for _, r in sorted((c.index, c.result) for c in out if c.result)]
    assert [r.finish_reason for r in out] == ["length", "error", "length", "error", "error", "error"]
    assert out[0].token_ids == expected(hash_engine, "ab", SHORT)
    assert {type(result.error) for result in out if result.finish_reason == "error"} == {PromptError}
    for errors in ("ignore", "", None, True):
        with pytest.raises(OptionError, match="errors must be"):
            getattr(engine, call)(prompts, SHORT, errors=errors)
    for params in ({"n": 1}, [{}], [None], [], [SHORT, SHORT], 5, "auto"):
        with pytest.raises(OptionError, match="parameters"):
            getattr(engine, call)("ab", params, errors="return")
        with pytest.raises(OptionError, match="parameters"):
            engine.submit("ab", params)


def test_samples_are_those_of_their_seeds(hash_engine: Any) -> None:
    engine = hash_engine(batch_size=2)
    first = 2**64 - 2
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=first, n=4)
    results = engine.generate(["ab", "cd"], params)
    seeds = [(first + i) % 2**64 for i in range(4)]
    assert [r.metrics.seed for r in results] == seeds * 2
    alone = [
        expected(hash_engine, prompt, SamplingParams(max_new_tokens=12, temperature=1.0, seed=each))
        for prompt in ("ab", "cd")
        for each in seeds
    ]
    assert [r.token_ids for r in results] == alone
    streamed = {(c.index, c.sample): c.result.token_ids for c in engine.stream(["ab", "cd"], params) if c.result}
    assert [streamed[i, j] for i in range(2) for j in range(4)] == alone
    fresh = engine.generate("ab", SamplingParams(max_new_tokens=12, temperature=1.0, n=3))
    assert [r.metrics.seed - fresh[0].metrics.seed for r in fresh] == [0, 1, 2]
    with pytest.raises(OptionError, match="one sample"):
        engine.submit("ab", params)


def test_a_shorter_length_than_the_bundles_is_what_a_model_takes(make: Make) -> None:
    validator = make(max_model_len=20)
    assert (validator.max_model_len, make().max_model_len) == (20, LONGEST)
    told = refused(PromptError, validator.samples, [5] * 20, SHORT)
    assert told.startswith("the prompt has 20 tokens, this model takes 20 with at least one of output")
    assert "tokens" in refused(PromptError, validator.encode, "word " * 4000)
    assert [validator.samples([5] * length, SHORT)[0].limit for length in (1, 14, 19)] == [7, 20, 20]


def test_a_structured_output_becomes_a_constraint_once(make: Make) -> None:
    """Of all its samples, and of the next request too; a least length holds beside it."""
    validator = make()
    asked = SamplingParams(max_new_tokens=6, n=2, structured_outputs={"regex": "a+"}, min_tokens=2)
    first, second = validator.samples("x", asked)
    assert first.params.structured_outputs is None
    assert first.params.constraint is second.params.constraint
    assert first.sampler.matcher is not second.sampler.matcher
    held = validator.constraint(StructuredOutputs(regex="b+"))
    assert (
        validator.samples("x", replace(asked, structured_outputs={"regex": "b+"}, min_tokens=0))[0].params.constraint
        is held
    )
    validator.grammars.close()


def test_structured_outputs_that_cannot_be(make: Make, manifest_of: Callable[..., Manifest]) -> None:
    asked = SamplingParams(structured_outputs={"regex": "a("})
    validator = make()
    assert "unclosed group" in refused(OptionError, validator.samples, "x", asked)
    after = SamplingParams(structured_outputs={"regex": "a", "after": "</think>"})
    assert "no token of this model" in refused(OptionError, validator.samples, "x", after)
    validator.grammars.close()
    endless = make(manifest=manifest_of(target={"vocab_size": VOCAB}, eos_token_ids=[]))
    assert "would never end" in refused(OptionError, endless.samples, "x", after)


@pytest.mark.parametrize("policy", [False, True])
def test_auto_is_the_widest_tree_and_has_to_fit(make: Make, manifest_of: Callable[..., Manifest], policy: bool) -> None:
    wide = manifest_of(target={"vocab_size": VOCAB}, default_tree="best:16")
    validator = make(policy=tuned("best:16")) if policy else make(manifest=wide)
    assert "tree 'best:16' drafts 16 nodes" in refused(OptionError, validator.samples, "a", SHORT)
    for asked in ("off", "chain:7", "topk:7,1"):
        (own,) = validator.samples("a", SamplingParams(speculation=asked))
        assert (str(own.tree or "off"), own.shape, own.policy) == (asked, own.tree, None)
        assert own.metrics.speculation == asked


def test_a_policy_s_sessions_are_those_that_requests_name(make: Make) -> None:
    validator = make(policy=tuned())

    def policies(**params: Any) -> list[Any]:
        return [sequence.policy for sequence in validator.samples("a", SamplingParams(temperature=0.7, **params))]

    first, second, third = policies(n=3)
    assert (first.temperature, len({id(first), id(second), id(third)})) == (0.7, 3)
    assert first.session is not policies()[0].session
    assert first.session.shared is policies()[0].session.shared, "what is seen in one is known to the others"
    (own,), (same,), (other,) = (policies(session=name) for name in ("x", "x", "y"))
    assert own.session is same.session is not other.session
