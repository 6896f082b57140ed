"""Validation makes a sequence of every sample, and says in one line what is wrong with a prompt or its parameters."""

from dataclasses import replace

import pytest
from engine_checks import expected
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_chances import LARGE, record_of

from specbuild.runtime import Chat, SamplingParams
from specbuild.runtime.errors import ExecutionError, OptionError, PromptError
from specbuild.runtime.requests.tokenizer import Tokenizer
from specbuild.runtime.requests.validation import Validator
from specbuild.runtime.sampling.structured import StructuredOutputs
from specbuild.runtime.speculation.controller import Controller
from specbuild.runtime.speculation.cost_model import CostModel
from specbuild.runtime.speculation.timing_table import TimingTable

VOCAB, LONGEST = 4096, 64  # of the tokenizer, and of the bundle
SHORT = SamplingParams(max_new_tokens=6)


@pytest.fixture(scope="session")
def chat_tokenizer(pair, tmp_path_factory):
    """One that knows chats."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}", encoding="utf-8")
    return Tokenizer(pair / "target" / "tokenizer.json", template, {})


@pytest.fixture(scope="session")
def make(manifest_of, chat_tokenizer):
    """`make(**Validator arguments)`: a validator of a bundle of 4096 tokens, texts of 64 and buckets up to 8."""

    def make(**arguments):
        given = {"manifest": manifest_of(target={"vocab_size": VOCAB}), "tokenizer": chat_tokenizer}
        given |= {"fits": lambda sequence: None}
        return Validator(**given | arguments)

    return make


def refused(kind, call, *arguments):
    """The one line with which a call is refused, by an error of exactly this kind."""
    with pytest.raises(kind) as caught:
        call(*arguments)
    assert type(caught.value) is kind
    return str(caught.value)


CHATS = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompts", "texts"),
    [
        ("def f(", ["def f("]),
        ((5, 6, 7), [[5, 6, 7]]),
        (CHATS, ["user:hi;"]),
        ([CHATS, Chat(CHATS), "a", [7], (5,)], ["user:hi;", "user:hi;", "a", [7], [5]]),
        ((), []),
    ],
)
def test_one_prompt_is_a_list_of_one(make, chat_tokenizer, prompts, texts):
    sequences, refused = make().requests(prompts, SHORT, "raise")
    wanted = [(index, chat_tokenizer.encode(text)) for index, text in enumerate(texts)]
    assert [(sequence.request.index, sequence.tokens) for sequence in sequences] == wanted
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
def test_what_is_wrong_with_a_prompt_is_said(make, prompt):
    line = refused(PromptError, make().requests, ["a", prompt], SHORT, "raise")
    assert line.startswith("prompt 2: ")
    assert "prompt" in line.removeprefix("prompt 2: ") or "messages" in line


def test_a_prediction_that_is_no_text_names_its_field(make):
    for prediction in ("word " * 4000, "\ud800"):
        told = refused(OptionError, make().samples, "a", replace(SHORT, prediction=prediction))
        assert told.startswith("prediction ")


def test_messages_need_a_chat_template(make, tokenizer):
    assert "chat template" in refused(PromptError, make(tokenizer=tokenizer).samples, CHATS, SHORT)


@pytest.mark.parametrize(
    ("own", "length", "new", "limit"),
    [(None, 1, 1, 2), (None, 60, 5, 64), (None, 63, 10**9, 64), (20, 1, 6, 7), (20, 19, 6, 20)],
)
def test_a_limit_is_what_was_asked_for_and_what_the_bundle_or_the_model_holds(make, own, length, new, limit):
    validator = make(max_model_len=own)
    most = validator.max_model_len
    assert most == own or LONGEST
    (sequence,) = validator.samples([5] * length, SamplingParams(max_new_tokens=new))
    assert (len(sequence.tokens), sequence.request.max_tokens) == (length, limit)
    told = f"the prompt has {most} tokens, this model takes {most} with at least one of output"
    assert refused(PromptError, validator.samples, [5] * most, SHORT).startswith(told)
    assert "tokens" in refused(PromptError, validator.encode, "word " * 4000)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"speculation": "topk:2,4"}, "tree 'topk:2,4' drafts 8 nodes, this bundle verifies at most 7"),
        ({"prediction": [5, 4096]}, "prediction has a token id outside the vocabulary of 4096"),
        ({"prediction": [5] * 65}, "prediction has 65 tokens, and texts have at most 64: shorten it"),
        ({"logit_bias": {5: 1.0, 10**9: 1.0}}, "logit_bias names a token past the vocabulary of 4096"),
    ],
)
def test_parameters_that_the_bundle_has_no_room_for_are_a_prompt_s_own_error(make, params, message):
    wrong = SamplingParams(**params, temperature=1.0, n=2)
    assert refused(OptionError, make().requests, ["a", "b"], [SHORT, wrong], "raise") == f"prompt 2: {message}"
    _, chunks = make().requests(["a", "b", "c"], [SHORT, wrong, SHORT], "return")
    found = [
        (chunk.index, chunk.sample, str(chunk.result.error), chunk.result.metrics) for chunk in chunks if chunk.result
    ]
    assert found == [(1, 0, message, None), (1, 1, message, None)]


def tuned(widest="best:6"):
    """A controller for some machine."""
    return Controller(CostModel(TimingTable.of(record_of(LARGE) | {"widest": widest}, 8)), has_model=True)


@pytest.mark.parametrize(
    ("trunk", "default", "own"),
    [(True, "chain:5", "chain:6"), (False, "best:5", "best:6")],
)
def test_auto_grows_chains_where_side_branches_are_not_accepted(make, trunk, default, own):
    """Who asks for a tree has it."""
    for controller, grown, name in ((None, default, default), (tuned(), own, "auto")):
        validator = make(trunk=trunk, controller=controller)
        (auto,), (asked,) = (validator.samples("a", SamplingParams(speculation=s)) for s in ("auto", "best:3"))
        assert (str(auto.request.tree), auto.metrics.speculation, str(asked.request.tree)) == (grown, name, "best:3")


def test_whoever_never_gets_a_slot_is_told_once_a_prompt(make):
    """By an error of its own kind; what was not raised on purpose is nobody's result."""
    asked = []

    def fits(sequence):
        asked.append((sequence.request.index, sequence.request.sample))
        if len(sequence.tokens) > 3:
            raise ExecutionError("too long")
        if sequence.tokens == [9]:
            raise ZeroDivisionError("a bug")

    validator, prompts = make(fits=fits), [[1, 2], [1, 2, 3, 4], [5]]
    _, chunks = validator.requests(prompts, SamplingParams(temperature=1.0, n=2), "return")
    assert asked == [(0, 0), (1, 0), (2, 0)]
    told = [(chunk.index, chunk.sample, str(chunk.result.error)) for chunk in chunks if chunk.result]
    assert told == [(1, 0, "too long"), (1, 1, "too long")]
    assert refused(ExecutionError, validator.requests, prompts, SHORT, "raise") == "prompt 2: too long"
    for errors in ("raise", "return"):
        with pytest.raises(ZeroDivisionError, match=r"^a bug$"):
            validator.requests([[9]], SHORT, errors)


GOOD = ["ab", [1, 2], CHATS]
BAD = ["", [], [VOCAB], None, [1] * LONGEST]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from([*GOOD, *BAD]), st.integers(1, 3)), max_size=6))
def test_every_sample_of_every_prompt_is_a_sequence_or_refused(make, drawn):
    """In the prompts' order, whatever stands beside what."""
    prompts, params = [each for each, _ in drawn], [SamplingParams(temperature=1.0, n=n) for _, n in drawn]
    sequences, chunks = make().requests(prompts, params, "return")
    good, bad = (
        [(i, s) for i, (each, n) in enumerate(drawn) if each in some for s in range(n)] for some in (GOOD, BAD)
    )
    assert [(sequence.request.index, sequence.request.sample) for sequence in sequences] == good
    assert [(chunk.index, chunk.sample) for chunk in chunks] == bad
    if bad:
        line = refused(PromptError, make().requests, prompts, params, "raise")
        assert line.startswith(f"prompt {bad[0][0] + 1}: ")


def test_what_cannot_run_is_raised_or_returned(hash_engine):
    engine, prompts = hash_engine(), ["ab", "", "cd", [99], None, "a" * 192]
    for call in (engine.generate, engine.stream):
        with pytest.raises(PromptError, match="prompt 2: the prompt is empty"):
            list(call(prompts, SHORT))
        with pytest.raises(OptionError, match="errors must be"):
            call(prompts, SHORT, errors="ignore")
    assert engine.stats.rounds == 0
    out = engine.generate(prompts, SHORT, errors="return")
    assert [r.finish_reason for r in out] == ["length", "error", "length", "error", "error", "error"]
    assert out[0].token_ids == expected(hash_engine, "ab", SHORT)
    assert {type(result.error) for result in out} == {PromptError, type(None)}
    streamed = {chunk.index: chunk.result for chunk in engine.stream(prompts, SHORT, errors="return") if chunk.result}
    assert [streamed[index].finish_reason for index in range(6)] == [r.finish_reason for r in out]
    for params in ({"n": 1}, [None], [], [SHORT, SHORT], "auto"):
        for call in (engine.generate, engine.submit):
            with pytest.raises(OptionError, match="parameters"):
                call("ab", params)


def test_samples_are_those_of_their_seeds(hash_engine):
    engine = hash_engine(batch_size=2)
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=2**64 - 2, n=4)
    results = engine.generate(["ab", "cd"], params)
    seeds = [2**64 - 2, 2**64 - 1, 0, 1]
    assert [r.metrics.seed for r in results] == seeds * 2
    alone = [
        expected(hash_engine, prompt, replace(params, seed=seed, n=1)) for prompt in ("ab", "cd") for seed in seeds
    ]
    assert [r.token_ids for r in results] == alone
    streamed = {(c.index, c.sample): c.result.token_ids for c in engine.stream(["ab", "cd"], params) if c.result}
    assert [streamed[i, j] for i in range(2) for j in range(4)] == alone
    first, *others = (engine.generate("ab", replace(params, seed=None, n=2)) for _ in range(9))
    assert first[1].metrics.seed == first[0].metrics.seed + 1 < 2**53, "which JSON keeps in every language"
    assert first[0].metrics.seed not in {other[0].metrics.seed for other in others}
    with pytest.raises(OptionError, match="one sample"):
        engine.submit("ab", params)


def test_a_structured_output_becomes_a_constraint_once(make):
    """Of all its samples, and of the next request too; a least length holds beside it."""
    validator = make()
    asked = SamplingParams(max_new_tokens=6, n=2, structured_outputs={"regex": "a+"})
    (first, second), (again, _) = (validator.samples("x", asked) for _ in range(2))
    assert first.params.structured_outputs is None
    assert first.params.constraint is second.params.constraint is again.params.constraint
    assert first.params.constraint is validator.constraint(StructuredOutputs(regex="a+"))
    assert first.sampler.matcher is not second.sampler.matcher
    late, _ = validator.samples("x", replace(asked, min_tokens=2))
    assert late.params.constraint not in (None, first.params.constraint)
    validator.grammars.close()


def test_structured_outputs_that_cannot_be(make, manifest_of):
    asked = SamplingParams(structured_outputs={"regex": "a("})
    validator = make()
    assert "unclosed group" in refused(OptionError, validator.samples, "x", asked)
    after = SamplingParams(structured_outputs={"regex": "a", "after": "</think>"})
    assert "no token of this model" in refused(OptionError, validator.samples, "x", after)
    validator.grammars.close()
    endless = make(manifest=manifest_of(target={"vocab_size": VOCAB}, eos_token_ids=[]))
    assert "would never end" in refused(OptionError, endless.samples, "x", after)


@pytest.mark.parametrize("auto", [False, True])
def test_auto_is_the_widest_tree_and_has_to_fit(make, manifest_of, auto):
    wide = manifest_of(target={"vocab_size": VOCAB}, default_tree="best:16")
    validator = make(controller=tuned("best:16")) if auto else make(manifest=wide)
    assert "tree 'best:16' drafts 16 nodes" in refused(OptionError, validator.samples, "a", SHORT)
    for asked in ("off", "chain:7", "topk:7,1"):
        (own,) = validator.samples("a", SamplingParams(speculation=asked))
        assert (str(own.request.tree or "off"), own.shape, own.controller) == (asked, own.request.tree, None)
        assert own.metrics.speculation == asked


def test_a_controller_s_sessions_are_those_that_requests_name(make):
    """What is seen in one is known to the others."""
    validator = make(controller=tuned())

    def sessions(**params):
        return [each.controller.session for each in validator.samples("a", SamplingParams(temperature=0.7, **params))]

    first, second, third = sessions(n=3)
    assert first is not sessions()[0]
    assert first.prior is second.prior is third.prior is sessions()[0].prior
    (own,), (same,), (other,) = (sessions(session=name) for name in ("x", "x", "y"))
    assert own is same is not other
