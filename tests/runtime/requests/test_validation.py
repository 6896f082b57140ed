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
from specbuild.runtime.requests.validation import Validator, params_list
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
        ([5, 6, 7], [[5, 6, 7]]),
        ((5, 6, 7), [[5, 6, 7]]),
        (CHATS, ["user:hi;"]),
        (Chat(CHATS), ["user:hi;"]),
        (["a", "b"], ["a", "b"]),
        (("a", "b"), ["a", "b"]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        ([(5,), [6]], [[5], [6]]),
        ([CHATS, Chat(CHATS), "a", [7]], ["user:hi;", "user:hi;", "a", [7]]),
        ([], []),
        ((), []),
    ],
)
def test_one_prompt_is_a_list_of_one(make: Make, chat_tokenizer: Tokenizer, prompts: Any, texts: list[Any]) -> None:
    sequences, refused = make().requests(prompts, SHORT, "raise")
    wanted = [text if isinstance(text, list) else chat_tokenizer.encode(text) for text in texts]
    assert [sequence.tokens for sequence in sequences] == wanted
    assert [sequence.index for sequence in sequences] == list(range(len(texts)))
    assert refused == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty: give at least one token"),
        ([[]], "the prompt is empty: give at least one token"),
        ([[VOCAB]], "the prompt has a token id outside the vocabulary of 4096"),
        ([[5, -1]], "the prompt has a token id outside the vocabulary of 4096"),
        ([[5, 10**30]], "the prompt has a token id outside the vocabulary of 4096"),
        (
            [[5] * 64],
            "the prompt has 64 tokens, this model takes 64 with at least one of output: shorten it, or build",
        ),
        ([[-1] * 65], "the prompt has 65 tokens, this model takes 64"),
        (None, "a prompt is a text, a list of token ids, or a list of messages, not NoneType"),
        (5.0, "a prompt is a text, a list of token ids, or a list of messages, not float"),
        ({"role": "user"}, "a prompt is a text, a list of token ids, or a list of messages, not dict"),
        ([True, False], "a prompt is a text, a list of token ids, or a list of messages, not bool"),
        ([[5, "a"]], "a prompt is a text, a list of token ids (int), or a list of messages, not of int, str"),
        ([[5, True]], "a prompt is a text, a list of token ids (int), or a list of messages, not of bool, int"),
        ([5, {"role": "user"}], "a prompt is a text, a list of token ids (int), or a list of messages, not of dict"),
        (
            [[{"content": "no role"}]],
            "messages must be objects with role, a text such as user or assistant, and content",
        ),
        ("a\ud800b", "the prompt is not valid Unicode: surrogates not allowed at character 1"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_said(make: Make, prompt: Any, message: str) -> None:
    assert refused(PromptError, make().requests, prompt, SHORT, "raise").startswith(f"prompt 1: {message}")


def test_messages_need_a_chat_template(make: Make, tokenizer: Tokenizer) -> None:
    line = refused(PromptError, make(tokenizer=tokenizer).requests, [CHATS], SHORT, "raise")
    assert line == "prompt 1: the prompt has messages, but this model has no chat template: give it as text"


def test_the_longest_prompt_leaves_room_for_one_token(make: Make) -> None:
    (sequence,) = make().samples([5] * (LONGEST - 1), SHORT)
    assert (len(sequence.tokens), sequence.limit) == (LONGEST - 1, LONGEST)


@pytest.mark.parametrize(("length", "new", "limit"), [(1, 1, 2), (10, 6, 16), (60, 4, 64), (60, 5, 64), (1, 10**9, 64)])
def test_a_limit_is_what_was_asked_for_and_what_the_bundle_holds(make: Make, length: int, new: int, limit: int) -> None:
    (sequence,) = make().samples([5] * length, SamplingParams(max_new_tokens=new))
    assert sequence.limit == limit


def test_checking_changes_no_token(make: Make) -> None:
    tokens = [0, VOCAB - 1, 7, 7]
    assert make().check(tokens) is tokens
    assert tokens == [0, VOCAB - 1, 7, 7]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 1}, "parameters must be SamplingParams, one or a list of them, not {'n': 1}"),
        ([{}], "parameters must be SamplingParams, one or a list of them, not [{}]"),
        ([SHORT, None], "parameters must be SamplingParams, one or a list of them, not ["),
        (5, "parameters must be SamplingParams, one or a list of them, not 5"),
        ("auto", "parameters must be SamplingParams, one or a list of them, not 'auto'"),
        ([], "0 sampling parameters for 2 prompts: give one, or one for each"),
        ([SHORT], "1 sampling parameters for 2 prompts: give one, or one for each"),
        ([SHORT] * 3, "3 sampling parameters for 2 prompts: give one, or one for each"),
    ],
)
@pytest.mark.parametrize("errors", ["raise", "return"])
def test_parameters_are_one_or_as_many_as_prompts(make: Make, params: Any, message: str, errors: str) -> None:
    """That concerns no prompt of its own, and is raised in any case."""
    assert refused(OptionError, make().requests, ["a", "b"], params, errors).startswith(message)


def test_parameters_for_each_prompt() -> None:
    each = [SHORT, SAMPLED]
    assert params_list(None, 2) == [SamplingParams()] * 2
    assert params_list(SHORT, 3) == [SHORT] * 3
    assert params_list(each, 2) == each
    assert params_list(each, 2) is not each
    assert params_list(tuple(each), 2) == each
    assert params_list(None, 0) == params_list([], 0) == []


@pytest.mark.parametrize("errors", ["ignore", "", None, True])
def test_errors_are_raised_or_returned_and_nothing_else(make: Make, errors: Any) -> None:
    line = refused(OptionError, make().requests, [""], SHORT, errors)
    assert line == f'errors must be "raise" or "return", not {errors!r}'


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"speculation": "chain:8"}, "tree 'chain:8' drafts 8 nodes, this bundle verifies at most 7"),
        ({"speculation": "topk:2,4"}, "tree 'topk:2,4' drafts 8 nodes, this bundle verifies at most 7"),
        ({"speculation": "best:63"}, "tree 'best:63' drafts 63 nodes, this bundle verifies at most 7"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias names a token past the vocabulary of 4096"),
        ({"logit_bias": {5: 1.0, 10**9: 1.0}}, "logit_bias names a token past the vocabulary of 4096"),
    ],
)
def test_parameters_that_the_bundle_has_no_room_for_are_a_prompt_s_own_error(
    make: Make, params: dict[str, Any], message: str
) -> None:
    wrong = SamplingParams(**params)
    assert refused(OptionError, make().requests, ["a", "b"], [SHORT, wrong], "raise") == f"prompt 2: {message}"
    assert refused(OptionError, make().samples, "b", wrong) == message
    sequences, (chunk,) = make().requests(["a", "b", "c"], [SHORT, wrong, SHORT], "return")
    assert [sequence.index for sequence in sequences] == [0, 2]
    assert (chunk.index, str(chunk.result.error)) == (1, message)


def test_trees_that_just_fit_are_taken(make: Make) -> None:
    for tree in ("chain:7", "topk:7,1", "best:7"):
        (sequence,) = make().samples("a", SamplingParams(speculation=tree))
        assert (str(sequence.tree), sequence.shape, sequence.metrics.speculation) == (tree, sequence.tree, tree)


def test_a_default_tree_that_does_not_fit_is_said_for_those_who_would_have_it(
    make: Make, manifest_of: Callable[..., Manifest]
) -> None:
    validator = make(manifest=manifest_of(target={"vocab_size": VOCAB}, default_tree="best:16"))
    assert "tree 'best:16' drafts 16 nodes" in refused(OptionError, validator.samples, "a", SHORT)
    assert validator.samples("a", SamplingParams(speculation="off"))[0].tree is None


def test_who_asks_for_no_tree_has_the_default_or_none(make: Make) -> None:
    (auto,), (off,) = (make().samples("a", SamplingParams(speculation=asked)) for asked in ("auto", "off"))
    assert (str(auto.tree), auto.metrics.speculation, auto.policy) == ("best:5", "best:5", None)
    assert (off.tree, off.shape, off.metrics.speculation, off.policy) == (None, None, "off", None)


def tuned(widest: str = "best:6") -> Policy:
    """A policy of some machine."""
    times = {"verify": [[1, 1.0]], "draft": [[1, 0.1]], "plain": 0.1, "round": 0.1, "level": 0.1}
    chances = {"likely": [-1.0, 0.0], "chance": [0.4, 0.9], "step": 0.7, "reach": [0, 0.7], "lookup": [0.0, 0.3]}
    record = {"schema": 2, "machine": {}, "widest": widest, "times": {"1": times}}
    return Policy(TimingTable.of(record | {"chances": {"greedy": chances, "sampled": chances}}, 8), drafts=True)


@pytest.mark.parametrize(
    ("bound", "default", "own"),
    [(0.6, "chain:5", "chain:6"), (math.inf, "chain:5", "chain:6"), (0.5, "best:5", "best:6"), (0, "best:5", "best:6")],
)
def test_auto_grows_chains_where_side_branches_could_not_be_settled(
    make: Make, manifest_of: Callable[..., Manifest], bound: float, default: str, own: str
) -> None:
    """Who asks for a tree has it."""
    manifest = manifest_of(target={"vocab_size": VOCAB})
    for policy, grown in ((None, default), (tuned(), own)):
        validator = make(manifest=manifest, bound=bound, policy=policy)
        (auto,), (asked,) = (validator.samples("a", SamplingParams(speculation=s)) for s in ("auto", "best:3"))
        assert (str(auto.tree), str(asked.tree)) == (grown, "best:3")


def test_a_policy_chooses_for_those_who_leave_it_to_the_bundle(make: Make) -> None:
    validator = make(policy=tuned())
    (first,), (second,) = (validator.samples("a", SHORT) for _ in range(2))
    assert (str(first.tree), first.metrics.speculation) == ("best:6", "auto")
    assert first.policy
    assert second.policy
    assert first.policy is not second.policy
    assert first.policy.session is not second.policy.session
    assert first.policy.session.shared is second.policy.session.shared, "what is seen in one is known to the others"
    (own, same), (other,) = (
        [validator.samples("a", SamplingParams(session=name))[0] for name in names] for names in (("x", "x"), ("y",))
    )
    assert own.policy
    assert own.policy.session is same.policy.session is not other.policy.session  # type: ignore[union-attr]
    for asked in ("off", "chain:3"):
        (own,) = validator.samples("a", SamplingParams(speculation=asked))
        assert (own.policy, own.metrics.speculation) == (None, asked)


def test_each_sample_has_a_policy_of_its_own(make: Make) -> None:
    sequences = make(policy=tuned()).samples("a", SamplingParams(n=3, temperature=0.7))
    assert all(sequence.policy and sequence.policy.temperature == 0.7 for sequence in sequences)
    assert len({id(sequence.policy) for sequence in sequences}) == 3


def test_a_policy_s_widest_tree_has_to_fit_too(make: Make) -> None:
    assert "drafts 16 nodes" in refused(OptionError, make(policy=tuned("best:16")).samples, "a", SHORT)


@pytest.mark.parametrize("seed", [0, 7, 2**53, 2**64 - 2])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_samples_have_seeds_one_after_another(make: Make, seed: int, n: int) -> None:
    params = SamplingParams(temperature=1.0, seed=seed, n=n)
    sequences = make().samples("ab", params, index=3)
    assert [sequence.metrics.seed for sequence in sequences] == [(seed + i) % 2**64 for i in range(n)]
    assert [sequence.sampler.seed for sequence in sequences] == [sequence.metrics.seed for sequence in sequences]
    assert [sequence.sample for sequence in sequences] == list(range(n))
    assert {sequence.index for sequence in sequences} == {3}
    assert {sequence.metrics.num_prompt_tokens for sequence in sequences} == {len(sequences[0].tokens)}


def test_samples_share_nothing_that_grows(make: Make) -> None:
    one, other = make().samples([5, 6], SamplingParams(temperature=1.0, n=2))
    one.emit(7, frozenset())
    assert (one.tokens, other.tokens) == ([5, 6, 7], [5, 6])
    assert (one.output, other.output) == ([7], [])
    assert one.history.tolist() == [5, 6, 7]
    assert other.history.tolist() == [5, 6]
    assert one.sampler is not other.sampler
    assert one.detokenizer is not other.detokenizer
    assert one.metrics is not other.metrics


def test_a_sequence_does_not_share_the_caller_s_list(make: Make) -> None:
    prompt = [5, 6]
    (sequence,) = make().samples(prompt, SHORT)
    sequence.emit(7, frozenset())
    assert prompt == [5, 6]


def test_who_gives_no_seed_gets_another_one_each_time(make: Make) -> None:
    validator = make()
    seeds = [validator.samples("a", SHORT)[0].metrics.seed for _ in range(20)]
    assert len(set(seeds)) == 20
    assert all(0 <= seed < 2**53 for seed in seeds), "that JSON keeps in every language"
    three = validator.samples("a", SamplingParams(temperature=1.0, n=3))
    assert [sequence.metrics.seed - three[0].metrics.seed for sequence in three] == [0, 1, 2]


def test_a_deadline_is_nobody_s_before_the_request_is_submitted(make: Make) -> None:
    sequences = make().samples("a", SamplingParams(temperature=1.0, n=2, deadline=5))
    assert [sequence.deadline for sequence in sequences] == [math.inf] * 2
    assert [sequence.metrics.submitted for sequence in sequences] == [None] * 2


def test_whoever_never_gets_a_slot_is_told_once_a_prompt(make: Make) -> None:
    asked: list[tuple[int, int]] = []

    def fits(sequence: Sequence) -> None:
        asked.append((sequence.index, sequence.sample))
        if len(sequence.tokens) > 3:
            raise OptionError("too long")

    validator, prompts = make(fits=fits), [[1, 2], [1, 2, 3, 4], [5]]
    sequences, chunks = validator.requests(prompts, SamplingParams(temperature=1.0, n=2), "return")
    assert asked == [(0, 0), (1, 0), (2, 0)]
    assert [(sequence.index, sequence.sample) for sequence in sequences] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert [(chunk.index, chunk.sample, str(chunk.result.error)) for chunk in chunks] == [
        (1, 0, "too long"),
        (1, 1, "too long"),
    ]
    assert refused(OptionError, validator.requests, prompts, SHORT, "raise") == "prompt 2: too long"


def test_what_was_not_raised_on_purpose_is_never_a_prompt_s_result(make: Make) -> None:
    def fits(sequence: Sequence) -> None:
        raise ZeroDivisionError("a bug")

    for errors in ("raise", "return"):
        with pytest.raises(ZeroDivisionError, match=r"^a bug$"):
            make(fits=fits).requests("a", SHORT, errors)


def test_an_error_keeps_its_kind_and_says_which_prompt(make: Make) -> None:
    def fits(sequence: Sequence) -> None:
        raise ExecutionError("the GPU is gone")

    with pytest.raises(ExecutionError, match=r"^prompt 1: the GPU is gone$") as caught:
        make(fits=fits).requests("a", SHORT, "raise")
    assert caught.value.__suppress_context__


def test_the_first_fault_is_the_one_that_is_said(make: Make) -> None:
    """Of several prompts, and of one: what it is, its length, its tokens, its tree, its bias, its room."""
    faults: dict[str, tuple[Any, dict[str, Any]]] = {
        "a prompt is a text": (None, {"speculation": "chain:9"}),
        "the prompt is empty": ([], {"speculation": "chain:9"}),
        "65 tokens": ([VOCAB] * 65, {"speculation": "chain:9"}),
        "outside the vocabulary": ([VOCAB], {"speculation": "chain:9"}),
        "drafts 9 nodes": ([5], {"speculation": "chain:9", "logit_bias": {VOCAB: 1.0}}),
        "logit_bias names": ([5], {"logit_bias": {VOCAB: 1.0}}),
        "no room": ([5], {}),
    }

    def fits(sequence: Sequence) -> None:
        raise OptionError("no room")

    validator = make(fits=fits)
    prompts, params = zip(*faults.values(), strict=True)
    _, chunks = validator.requests(prompts, [SamplingParams(**each) for each in params], "return")
    for chunk, words in zip(chunks, faults, strict=True):
        assert words in str(chunk.result.error)
    line = refused(PromptError, validator.requests, prompts, SHORT, "raise")
    assert line.startswith("prompt 1: a prompt is a text")


def test_what_cannot_run_ends_with_an_empty_result_for_each_sample(make: Make) -> None:
    params = SamplingParams(temperature=1.0, n=3, seed=9, speculation="chain:3")
    sequences, chunks = make().requests(["", "ab"], params, "return")
    assert [sequence.index for sequence in sequences] == [1, 1, 1]
    assert [(chunk.index, chunk.sample) for chunk in chunks] == [(0, 0), (0, 1), (0, 2)]
    for chunk in chunks:
        assert (chunk.text, chunk.token_ids, chunk.logprobs) == ("", [], None)
        assert chunk.result
        assert isinstance(chunk.result.error, PromptError)
        assert str(chunk.result.error) == "the prompt is empty: give at least one token", "the index says which prompt"
        assert (chunk.result.text, chunk.result.token_ids, chunk.result.finish_reason) == ("", [], "error")
        assert chunk.result.metrics is None, "nothing ran, so nothing was measured"
        assert chunk.result.to_dict()["metrics"] is None
    assert len({id(chunk.result) for chunk in chunks}) == 3, "each sample has a result of its own"


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
    for result, word in zip((out[1], *out[3:]), ("empty", "vocabulary", "no prompt", "192 tokens"), strict=True):
        assert isinstance(result.error, PromptError)
        assert word in str(result.error)
    with pytest.raises(OptionError, match="errors must be"):
        getattr(engine, call)(prompts, SHORT, errors="ignore")
    for params in ({"n": 1}, [{}], [SHORT, SHORT], 5):
        with pytest.raises(OptionError, match="parameters"):
            getattr(engine, call)("ab", params, errors="return")
        with pytest.raises(OptionError, match="parameters"):
            engine.submit("ab", params)


@pytest.mark.parametrize("seed", [7, 2**64 - 2])
def test_samples_are_those_of_their_seeds(hash_engine: Any, seed: int) -> None:
    engine = hash_engine(batch_size=2)
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=seed, n=4)
    results = engine.generate(["ab", "cd"], params)
    seeds = [(seed + i) % 2**64 for i in range(4)]
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
    refused = engine.generate(["", "ab"], params, errors="return")
    assert [r.finish_reason for r in refused] == ["error"] * 4 + ["length"] * 4
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
