"""What every loop promises: on the host, on a device round by round, and where rounds follow each other there."""

from dataclasses import replace

import numpy as np
import pytest
from constraints import OneOf, family
from device_requests import Made, Words, again, check_plain, plain, prompt_of, request_of, requests, run
from hash_models import growths
from host_device import HostDevice
from small_grammars import END as GRAMMAR_END
from small_grammars import grammar
from small_models import reference
from tiny_models import CHUNK, TEXT, VOCAB, executor, torch_model

from specbuild.runtime import Limits
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.decoding.loop import DEFAULTS, LoopOptions
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.errors import ExecutionError, OptionError
from specbuild.runtime.requests.metrics import RunStats

BOTH, PERFECT, ALONE, END = ("target", "draft"), ("target", "target"), ("target",), VOCAB - 1
CYCLE = [17, 4, 29, 61, 8, 2, 55, 90, 31]


class OnHost:
    """A loop on the host, over the same models as a device's."""

    def __init__(self, folder, size, names, looks_up, *more):
        self.device = HostDevice()
        self.target, *drafts = [executor(name, self.device, folder, size) for name in names]
        proposer = Proposer(ModelDrafter(drafts[0], 8) if drafts else None, looks_up)
        self.loop = HostLoop(self.target, proposer, CHUNK, *more)


@pytest.fixture(params=["host", "device", "resident"])
def make(request, host, folder):
    """`make(size, names)`: a loop of so many slots over these models, with what it is made of."""

    def made(size=2, names=BOTH, looks_up=False, eos=frozenset(), options=DEFAULTS):
        if request.param == "host":
            return OnHost(folder, size, names, looks_up, eos, options)
        found = Made(host, folder, size, names, looks_up, eos, 32 * (request.param == "resident"), options)
        found.device.ahead = 3
        return found

    return made


def told(sequence):
    return sequence.metrics.speculative_decoding


def sequences(tree, *fields, **shared):
    """A request for each of these, of prompts of different lengths."""
    return [
        request_of(prompt_of(i, 5 + 3 * i), **{"speculation": tree, "seed": i} | shared | own)
        for i, own in enumerate(fields)
    ]


def enter(batch):
    """Each in the slot of its place."""
    for slot, sequence in enumerate(batch):
        sequence.slot = slot
    return batch


@pytest.mark.nightly(but=("host-chain:4", "device-chain:4", "resident-topk:2,3"))
@pytest.mark.slow(but=("host-chain:4", "resident-topk:2,3"))
@pytest.mark.parametrize("tree", ["chain:4", "topk:2,3", "best:7", "off"])
def test_tokens_are_plain_decodings(make, folder, tree):
    """Prompts of many lengths join and leave, with every processor, two without speculation."""
    made = make()
    done = run(made.loop, requests(tree))
    check_plain(folder, done)
    assert {s.finish_reason for s in done} == {"length"}
    assert all(bool(told(s).num_spec_steps) == bool(s.request.tree) for s in done)
    assert (sum(told(s).num_accepted_draft_tokens for s in done) > 10) == (tree != "off")
    stats = made.loop.stats
    assert stats.emitted == sum(len(s.output) for s in done)
    assert (stats.draft > 0) == (tree != "off")
    assert stats.since(stats).emitted == 0
    assert sum(s.metrics.busy_time for s in done) == pytest.approx(stats.total, rel=1e-6)


@pytest.mark.slow
def test_what_is_drafted_and_accepted_is_the_host_s(make, folder):
    """Of every shape; how deep a tree was that grew on a device, nobody tells the host."""
    trees = [{"speculation": tree} for tree in ("chain:3", "topk:2,3", "best:6")]
    more = [{}, {"temperature": 0.7}, {"repetition_penalty": 1.3}]
    mine = run(make(3).loop, sequences("", *[tree | own for tree, own in zip(trees, more, strict=True)]))
    theirs = run(OnHost(folder, 3, BOTH, False, frozenset()).loop, [again(s) for s in mine])
    for one, other in zip(mine, theirs, strict=True):
        assert one.output == other.output
        assert replace(told(one), depth_histogram=[]) == replace(told(other), depth_histogram=[])
        assert told(one).num_accepted_draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("names", [ALONE, BOTH], ids=["alone", "with a draft"])
def test_a_text_that_repeats_itself_is_continued(make, folder, names):
    """The draft model, where there is one, catches up afterwards."""
    biased = {"logit_bias": dict.fromkeys(CYCLE, 30.0), "max_new_tokens": 24}
    prompts = (CYCLE * 3, biased), (prompt_of(5, 9), {"temperature": 0.6}), (CYCLE[2:] + CYCLE, {})
    done = run(
        make(2, names, looks_up=True).loop,
        [request_of(prompt, speculation="best:6", **more) for prompt, more in prompts],
    )
    check_plain(folder, done)
    assert told(done[0]).num_accepted_draft_tokens > 5


@pytest.mark.parametrize("edit", ["none", "some", "all"])
def test_predictions_change_no_text(make, folder, edit):
    """Right, with every seventh token wrong, or wrong altogether; of as many kinds of requests as fit."""
    asked = sequences("chain:4", {}, {"temperature": 0.8}, {"repetition_penalty": 1.2}, max_new_tokens=24)
    outputs = [each.output for each in plain(folder, asked)]
    wrong = {"none": 25, "some": 7, "all": 1}[edit]
    predictions = [
        [token if at % wrong else (token + 1) % VOCAB for at, token in enumerate(output, 1)] for output in outputs
    ]
    done = run(
        make(2, ALONE, looks_up=True).loop,
        [again(each, prediction=tokens) for each, tokens in zip(asked, predictions, strict=True)],
    )
    assert [each.output for each in done] == outputs
    for each in done:
        rounds = len(each.output) - told(each).num_accepted_draft_tokens
        assert rounds <= {"none": 7, "some": 14, "all": 24}[edit]
        assert told(each).num_accepted_prediction_tokens >= {"none": 24, "some": 18, "all": 0}[edit]


@pytest.mark.slow
def test_trees_end_where_the_cache_does(make, folder):
    """A draft whose levels have no more room is not asked, and no kernel finds a fault."""
    wanted = [
        request_of(prompt_of(i, TEXT - 22), speculation=tree, max_new_tokens=22)
        for i, tree in enumerate(("best:7", "topk:5,3"))
    ]
    check_plain(folder, run(make(2, PERFECT).loop, wanted))


def test_ends_inside_an_accepted_path(make, folder):
    """An end-of-sequence token, a stop string or a length; the slot's next request finds nothing of it."""
    prompt, at = prompt_of(3, 6), 5
    (full,) = plain(folder, [request_of(prompt, speculation="off")])
    made = make(1, PERFECT, eos=frozenset({full.output[at]}))
    stop = Words().decode(full.output[at - 1 : at + 1])
    asked = {"speculation": "chain:4", "ignore_eos": True}
    (one,) = run(made.loop, [request_of(prompt, stop=stop, **asked)])
    (stopped,) = plain(folder, [one])
    assert (one.output, one.finish_reason) == (stopped.output, "stop")
    (other,) = run(made.loop, [request_of(prompt, speculation="topk:2,3")])
    ended = full.output[: full.output.index(full.output[at]) + 1]
    assert (other.output, other.finish_reason) == (ended, "stop")
    (third,) = run(made.loop, [request_of(prompt, max_new_tokens=at + 2, **asked)])
    assert (third.output, third.finish_reason) == (full.output[: at + 2], "length")


def test_logprobs_are_plain_decodings(make, folder):
    done = run(make().loop, sequences("topk:2,3", {"logprobs": 3, "temperature": 0.8}, {}, {"logprobs": 0}))
    for one, other in zip(done, plain(folder, done), strict=True):
        assert one.output == other.output
        assert len(one.logprobs) == (0 if one.params.logprobs is None else len(one.output))
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


@pytest.mark.slow(but=("host-alone-4", "resident-with a draft-4"))
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("names", [ALONE, BOTH], ids=["alone", "with a draft"])
def test_what_is_no_logit_ends_its_sequence_alone(make, folder, names, at):
    """And nothing of it is left in the caches for the slot's next sequence."""
    made, steps = make(2, names), [0]
    model = made.target.model

    def spoil(nodes):
        steps[0] += 1
        if steps[0] == at:
            made.device.array(model.tensors.logits).ravel()[nodes * VOCAB : 2 * nodes * VOCAB] = np.nan
            made.device.array(model.tensors.cache)[:, 1] = np.nan

    model.spoil = spoil
    first, second, third = run(made.loop, sequences("chain:3", {}, {"temperature": 1}, {}))
    assert (second.finish_reason, type(second.error)) == ("error", ExecutionError)
    assert second.output == plain(folder, [second])[0].output[: len(second.output)]
    check_plain(folder, [first, third])


@pytest.mark.slow(but=("resident",))
def test_a_step_that_fails_leaves_the_loop_usable(make, folder):
    made, batch = make(), enter(sequences("topk:2,3", {}, {}, max_new_tokens=40))
    for _ in range(4):
        made.loop.round(batch)

    def fail(nodes):
        raise ExecutionError("out of luck")

    made.target.model.spoil = fail
    with pytest.raises(ExecutionError):
        made.loop.round(batch)
    made.target.model.spoil = None
    for sequence in batch:
        sequence.fail(ExecutionError("out of luck"))
        made.loop.release(sequence.slot)
    check_plain(folder, run(made.loop, sequences("topk:2,3", {}, {"temperature": 0.8}, {})))


@pytest.mark.slow(but=("resident",))
def test_who_leaves_gets_no_token_any_more(make, folder):
    """One is cancelled, and another takes its slot."""
    made, (leaver, stayer, joiner) = make(), sequences("topk:2,3", {}, {}, {}, max_new_tokens=20)
    enter([leaver, stayer])
    for _ in range(5):
        made.loop.round([leaver, stayer])
    tokens = list(leaver.output)
    made.loop.release(0)
    joiner.slot = 0
    while active := [s for s in (stayer, joiner) if not s.finish_reason]:
        made.loop.round(active)
    assert leaver.output == tokens == plain(folder, [leaver])[0].output[: len(tokens)]
    check_plain(folder, [stayer, joiner])
    made.loop.close()


def conversations(**fields):
    """Texts that go on, or begin like another, some at a time; a long one is left alone for a while."""
    system, long = prompt_of(3, 30), prompt_of(4, TEXT - 16)
    turns = [[system, prompt_of(5, 3), long], [[*system, 5], [*system[:20], 6]], [[*system, 5, 7]], [long, system[:2]]]
    return [
        [request_of(prompt, max_new_tokens=12, **fields, seed=at, temperature=at % 2) for at, prompt in enumerate(turn)]
        for turn in turns
    ]


@pytest.mark.nightly(but=("host-target-chain:4", "resident-target-chain:4"))
@pytest.mark.slow(but=("host-target-chain:4",))
@pytest.mark.parametrize("tree", ["chain:4", "best:7", "off"])
@pytest.mark.parametrize("name", ["target", "windowed"])
def test_prompts_are_read_from_where_a_cache_has_them(make, folder, tree, name):
    """Nothing that other slots' steps write meanwhile is in the rows, of either model; and none under another salt."""
    made = make(3, (name, name))
    done = [s for turn in conversations(speculation=tree) for s in run(made.loop, turn)]
    cached = [s.metrics.num_cached_tokens for s in done]
    assert all(some >= wanted for some, wanted in zip(cached[3:], [30, 20, 31, TEXT - 17, 1], strict=True)), cached
    check_plain(folder, done, name)
    if tree == "chain:4":  # a perfect draft, that has the rows it needs
        assert all(told(s).mean_acceptance_length > 3.5 for s in done if not s.params.temperature)
    assert sum(made.loop.admission.cached_tokens()) > 100
    (other,) = run(made.loop, [request_of(prompt_of(3, 30), speculation=tree, cache_salt="another")])
    assert other.metrics.num_cached_tokens == 0


def test_no_prefix_is_kept_where_none_is_wanted(make):
    loop = make(1, ALONE, options=LoopOptions(prefix_caching=False)).loop
    done = [run(loop, [request_of(prompt_of(3, 9), speculation="off")])[0] for _ in range(2)]
    assert [s.metrics.num_cached_tokens for s in done] == [0, 0]
    assert loop.admission.cached_tokens() == (0,)


@pytest.mark.nightly(only=("host-1.0-alone", "device-0.0-alone", "resident-1.0-alone", "resident-0.0-draft"))
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("names", [BOTH, ALONE], ids=["draft", "alone"])
def test_constrained_texts_are_plain_decodings(make, folder, names, temperature):
    """Beside a free one, which is the third."""
    eos, cut = frozenset({END}), {"top_p": 0.9} if temperature else {}
    fields = [{}, cut, {}, {"repetition_penalty": 1.3, "logit_bias": {END: 2.0}} | cut, {}]
    for index, own in enumerate(fields):
        own["constraint"] = None if index == 2 else family(index, VOCAB, END, length=9)
    wanted = sequences("topk:2,3", *fields, temperature=temperature, max_new_tokens=18)
    done = run(make(4, names, eos=eos, looks_up=names == ALONE).loop, wanted)
    check_plain(folder, done, eos=eos)
    assert any(told(s).num_draft_tokens for s in done)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_grammar_forces_is_drafted(make, folder, temperature):
    """Tokens are plain decoding's, and long runs take few rounds."""
    made, eos = make(eos=frozenset({GRAMMAR_END})), frozenset({GRAMMAR_END})
    regexes = "(ab|cd)0101,0101,(a|b|c)10101010", "[abcd]{3}(0|1){4}cd"
    constraints = [{"constraint": grammar(vocab_size=VOCAB, regex=regex)} for regex in regexes]
    done = run(made.loop, sequences("chain:6", *constraints, temperature=temperature, max_new_tokens=24))
    check_plain(folder, done, eos=eos)
    assert [s.finish_reason for s in done] == ["stop", "stop"]
    assert made.loop.stats.rounds < max(len(s.output) for s in done)


class Broken(OneOf):
    """Raises from the third token on."""

    def legal(self, text):
        if len(text) >= 3:
            raise ValueError("no such rule")
        return super().legal(text)


class Nothing(OneOf):
    """Allows nothing after three tokens."""

    def legal(self, text):
        return set() if len(text) == 3 else super().legal(text)


@pytest.mark.parametrize(
    ("kind", "message", "names"), [(Broken, "no such rule", BOTH), (Nothing, "the constraint allows", ALONE)]
)
def test_a_constraint_that_fails_is_its_request_s_error(make, folder, kind, message, names):
    """Wherever it does, in the draft as well; the others' texts are what they are without it."""
    texts, eos = (tuple(range(11)), (3, 4, 5, 6)), frozenset({END})
    fields = [{"constraint": each} for each in (kind(texts, END), OneOf(texts, END), None)]
    broken, *others = run(make(3, names, eos=eos).loop, sequences("best:7", *fields, max_new_tokens=9))
    assert message in str(broken.error)
    (sound,) = plain(folder, [again(broken, constraint=OneOf(texts, END))], eos=eos)
    assert broken.output == sound.output[: len(broken.output)]
    check_plain(folder, others, eos=eos)


def test_limits_hold_and_may_change_between_rounds(make, folder):
    made = make(1, PERFECT, options=LoopOptions(Limits(max_draft_tokens=4)))
    with pytest.raises(OptionError, match="max_draft_tokens allows 4"):
        made.loop.check(request_of(prompt_of(1, 4), speculation="chain:5"))
    (one,) = enter([request_of(prompt_of(1, 4), speculation="chain:4", max_new_tokens=90)])
    for most in (2, 0, 4):
        made.loop.planner.limit(Limits(max_draft_tokens=most))
        for _ in range(2):  # what was begun before ends
            made.loop.round([one])
        nodes, steps = told(one).num_draft_tokens, told(one).num_spec_steps
        for _ in range(2):
            made.loop.round([one])
        assert told(one).num_draft_tokens - nodes == most * (told(one).num_spec_steps - steps)
        assert (told(one).num_spec_steps > steps) is (most > 0) or one.finish_reason
    while not one.finish_reason:
        made.loop.round([one])
    check_plain(folder, [one])


@pytest.mark.slow(but=("host",))
def test_a_sibling_takes_turns_with_its_loop(make, folder):
    """The same models, and statistics of its own; what one has written the other never takes for a prefix."""
    made = make()
    loops = [made.loop, made.loop.sibling(looks_up=True)]
    assert (loops[1].target, loops[1].draft_executor) == (loops[0].target, loops[0].draft_executor)
    assert loops[1].stats == RunStats()
    emitted = [0, 0]
    for turn in (0, 1, 0):
        done = run(loops[turn], sequences("chain:3", {}, {}))
        check_plain(folder, done)
        emitted[turn] += sum(len(s.output) for s in done)
        assert [loop.stats.emitted for loop in loops] == emitted
    assert made.loop.cache_bytes == made.target.cache_bytes + made.loop.draft_executor.cache_bytes
    assert made.loop.admission.page_tokens is None


def test_a_fresh_drafter_knows_of_no_text(make):
    made = make(1)
    run(made.loop, [request_of(prompt_of(0, 6), speculation="chain:3")])
    trees = []
    for _ in range(2):
        fresh = made.loop.proposer.model.again()
        assert (fresh.executor, fresh.cached) == (made.loop.draft_executor, [0])
        (sequence,) = enter([request_of(prompt_of(0, 6), speculation="chain:3")])
        sequence.cached = 5
        trees += [growth.tree() for growth in growths(fresh, sequence)]
    assert trees[0] == trees[1]
    assert len(trees[0]) == 4
    assert make(1, ALONE).loop.proposer.model is None


def test_logits_for_measuring(make):
    """They are the model's, and no part of the rounds."""
    made, text = make(), prompt_of(1, 60)
    wanted = reference(torch_model("target"), text)
    for count, nodes in ((1, None), (30, 16), (30, 4)):
        np.testing.assert_allclose(made.loop.logits(text, count, nodes), wanted[-count:], rtol=1e-4, atol=1e-4)
    assert made.loop.stats.rounds == 0
    (after,) = run(made.loop, [request_of(text[:30], speculation="off")])
    assert after.metrics.num_cached_tokens == 0, "nor a prefix"
    made.loop.close()
