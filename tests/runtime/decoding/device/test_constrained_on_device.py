"""Constrained texts on a device: the kernels choose among legal tokens, and the tokens are plain decoding's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from constraints import OneOf, family
from device_requests import Made, model_alone, prompt_of, request_of, run
from host_device import HostDevice, HostQueue
from small_grammars import END as GRAMMAR_END
from small_grammars import grammar
from tiny_models import CHUNK, VOCAB, executor

from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.decoding.device.loop import DeviceLoop
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.requests.sequence import Sequence

END = VOCAB - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def batch(tree: str, temperature: float = 0.0, count: int = 5) -> list[Sequence]:
    """Constrained and free ones, greedy and sampled."""
    found = []
    for index in range(count):
        constraint = None if index % 3 == 2 else family(index, VOCAB, END, length=9)
        more = {"repetition_penalty": 1.3, "logit_bias": {END: 2.0}} if index == 3 else {}
        cut = {"top_p": 0.9} if temperature and index % 2 else {}
        fields = {"speculation": tree, "temperature": temperature, "seed": index, "max_new_tokens": 18, **more, **cut}
        found.append(request_of(prompt_of(index, 4 + 3 * index), constraint=constraint, **fields))
    return found


def made_loop(host: KernelLibrary, folder: Path, names: tuple[str, ...], ahead: int, batch_size: int = 4) -> Made:
    made = Made(host, folder, batch_size, names, eos=frozenset({END}))
    draft = executor(names[1], made.device, folder, batch_size) if len(names) > 1 else None
    made.loop = DeviceLoop(
        made.target, draft, HostQueue(host, made.device), frozenset({END}), model_alone(), ahead=ahead
    )
    return made


def plain(folder: Path, temperature: float) -> list[list[int]]:
    target = executor("target", HostDevice(), folder, 1)
    done = run(HostLoop(target, None, CHUNK, frozenset({END})), batch("off", temperature))
    for s in done:
        if isinstance(constraint := s.params.constraint, OneOf):
            text = tuple(s.output)
            assert text[:-1] in constraint.texts or any(each[: len(text)] == text for each in constraint.texts)
    return [s.output for s in done]


@pytest.mark.slow(but=("lookup-chain:4-0.0-0",))
@pytest.mark.parametrize("ahead", [0, 32])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", ["chain:4", "topk:2,3", "best:7", "off"])
@pytest.mark.parametrize("names", [("target", "draft"), ("target",)], ids=["draft", "lookup"])
def test_tokens_are_plain_decodings(
    host: KernelLibrary, folder: Path, names: tuple[str, ...], tree: str, temperature: float, ahead: int
) -> None:
    """Four at once; with a draft the host grows the trees of those that are constrained, the device the others'."""
    done = run(made_loop(host, folder, names, ahead).loop, batch(tree, temperature))
    assert [(s.error, s.output) for s in done] == [(None, output) for output in plain(folder, temperature)]
    drafted = [s.metrics.speculative_decoding.num_draft_tokens for s in done]
    assert any(drafted) == (tree != "off")


def test_a_constrained_text_is_drafted_for(host: KernelLibrary, folder: Path) -> None:
    """A perfect draft among few texts: whatever it drafts is legal, and most of it comes true."""
    made = made_loop(host, folder, ("target", "target"), 0, 1)
    constraint = OneOf(tuple(tuple(token % END for token in prompt_of(seed, 16)) for seed in (1, 2)), END)
    fields = {"speculation": "chain:4", "constraint": constraint, "max_new_tokens": 20}
    (done,) = run(made.loop, [request_of(prompt_of(3, 6), **fields)])
    assert tuple(done.output[:-1]) in constraint.texts
    told = done.metrics.speculative_decoding
    assert told.num_accepted_draft_tokens >= 0.9 * told.num_draft_tokens - 4
    assert made.loop.stats.rounds < 9


def test_only_graphs_of_the_constrained_have_masks(host: KernelLibrary, folder: Path) -> None:
    made = made_loop(host, folder, ("target", "draft"), 0, 1)
    run(made.loop, [request_of(prompt_of(1, 5), speculation="chain:4")])
    slots: Any = made.loop.rounds.slots
    assert not [name for name in slots._optional if "masks" in name]
    run(made.loop, [batch("chain:4")[0]])
    assert [name for name in slots._optional if "masks" in name]
    assert {key[1].masks for key in made.loop.rounds.graphs._made} == {False, True}


def test_where_nothing_is_allowed_the_request_ends_alone(host: KernelLibrary, folder: Path) -> None:
    class Nothing(OneOf):
        def legal(self, text: Any) -> set[int]:
            return set() if len(text) == 3 else super().legal(text)

    made = made_loop(host, folder, ("target", "draft"), 0, 2)
    stuck = request_of(prompt_of(1, 5), speculation="chain:3", constraint=Nothing(((7, 8, 9, 10),), END))
    free = request_of(prompt_of(2, 5), speculation="chain:3")
    run(made.loop, [stuck, free])
    assert "the constraint allows" in str(stuck.error)
    assert stuck.output == [7, 8, 9]
    assert (free.error, free.finish_reason) == (None, "length")


@pytest.mark.parametrize("names", [("target", "draft"), ("target",)], ids=["draft", "lookup"])
def test_a_constraint_that_raises_is_its_request_s_error(
    host: KernelLibrary, folder: Path, names: tuple[str, ...]
) -> None:
    """Where the host grows its tree, and where it says what is legal at the nodes."""

    class Broken(OneOf):
        def legal(self, text: Any) -> set[int]:
            if len(text) >= 3:
                raise ValueError("no such rule")
            return super().legal(text)

    def wanted(tree: str) -> list[Sequence]:
        good = OneOf((tuple(range(11)), (3, 4, 5, 6)), END)
        kinds = Broken(good.texts, END), good, None
        return [request_of(prompt_of(2, 5), speculation=tree, constraint=each, max_new_tokens=9) for each in kinds]

    alone = executor("target", HostDevice(), folder, 1)
    expected = [s.output for s in run(HostLoop(alone, None, CHUNK, frozenset({END})), wanted("off"))]
    broken, good, free = run(made_loop(host, folder, names, 0, 3).loop, wanted("best:7"))
    assert "no such rule" in str(broken.error)
    assert broken.output == expected[1][: len(broken.output)]
    assert [(s.error, s.output) for s in (good, free)] == [(None, expected[1]), (None, expected[2])]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("names", [("target", "draft"), ("target",)], ids=["draft", "lookup"])
def test_what_a_grammar_forces_is_drafted(
    host: KernelLibrary, folder: Path, names: tuple[str, ...], temperature: float
) -> None:
    """Masks reach the kernels as bitmasks a node; tokens are plain decoding's, and long runs take few rounds."""

    def wanted(tree: str) -> list[Sequence]:
        regexes = "(ab|cd)0101,0101,(a|b|c)10101010", "[abcd]{3}(0|1){4}cd"
        fields = {"speculation": tree, "temperature": temperature, "max_new_tokens": 24}
        return [
            request_of(prompt_of(n, 5), seed=n, constraint=grammar(vocab_size=VOCAB, regex=regex), **fields)
            for n, regex in enumerate(regexes)
        ]

    def loop() -> Made:
        made = Made(host, folder, 2, names, eos=frozenset({GRAMMAR_END}))
        draft = executor(names[1], made.device, folder, 2) if len(names) > 1 else None
        made.loop = DeviceLoop(
            made.target, draft, HostQueue(host, made.device), frozenset({GRAMMAR_END}), model_alone()
        )
        return made

    alone = executor("target", HostDevice(), folder, 1)
    expected = run(HostLoop(alone, None, CHUNK, frozenset({GRAMMAR_END})), wanted("off"))
    made = loop()
    found = run(made.loop, wanted("chain:6"))
    assert [(s.error, s.output) for s in found] == [(None, s.output) for s in expected]
    assert [s.finish_reason for s in found] == ["stop", "stop"]
    assert made.loop.stats.rounds < max(len(s.output) for s in found)
