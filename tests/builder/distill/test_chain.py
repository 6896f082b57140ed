"""Ordinary and parallel drafts: what they learn from and are judged by is what they do when they draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specbuild.builder.distill.chain import ChainStudent, trim
from specbuild.builder.distill.divergence import DIVERGENCES
from specbuild.builder.distill.make import Plan, frequent
from specbuild.builder.distill.parallel import Layout, ParallelStudent, with_mask
from specbuild.builder.distill.student import Lesson
from specbuild.builder.distill.teacher import Teacher
from specbuild.builder.distill.validate import Exam
from specbuild.builder.frontend import checkpoint as checkpoints

MASK = 97


def lesson_of(tokens: torch.Tensor) -> Lesson:
    return Lesson(tokens, torch.zeros(*tokens.shape, 1, dtype=torch.int64), torch.ones(*tokens.shape, 1))


@pytest.fixture
def parallel(make_model: Callable[..., Any]) -> ParallelStudent:
    net = make_model()
    with_mask(net, MASK)
    with torch.no_grad():
        net.get_input_embeddings().weight[MASK] = torch.randn(32)
    return ParallelStudent(net, None, MASK, 4)


@pytest.fixture
def chain(make_model: Callable[..., Any]) -> ChainStudent:
    tokens = torch.arange(0, 97, 2)
    return ChainStudent(trim(make_model(), tokens), tokens)


@torch.no_grad()
def drafted(student: ChainStudent, text: list[int], depth: int) -> list[int]:
    """Greedy drafting as a runtime does it, one pass over the whole text a token, or one with masks."""
    if isinstance(student, ParallelStudent):
        ids = torch.tensor([[*text, *[MASK] * (depth - 1)]])
        return [int(t) for t in student.tokens[student.net(input_ids=ids).logits[0, len(text) - 1 :].argmax(-1)]]
    found = list[int]()
    for _ in range(depth):
        logits = student.net(input_ids=torch.tensor([[*text, *found]])).logits[0, -1]
        found.append(int(student.tokens[logits.argmax()]))
    return found


@torch.no_grad()
def test_masks_in_training_see_what_masks_in_drafting_see(parallel: ParallelStudent) -> None:
    tokens = torch.randint(97, (2, 10))
    order = torch.randperm(10)
    layout = Layout.of(10, [order[:7].sort().values, order[:5].sort().values, order[:2].sort().values])
    logits = parallel.logits(tokens, layout)
    masks = [(row, int(a), int(d)) for row, (a, d) in enumerate(zip(layout.anchors, layout.depths, strict=True)) if d]
    assert len(masks) >= 8
    for row, anchor, depth in masks:
        ids = torch.cat([tokens[:, : anchor + 1], torch.full((2, depth), MASK)], 1)
        torch.testing.assert_close(logits[:, row], parallel.net(input_ids=ids).logits[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["chain", "parallel"])
@torch.no_grad()
def test_agreement_is_drafting_token_by_token(kind: str, request: pytest.FixtureRequest) -> None:
    student, depth = request.getfixturevalue(kind), 3
    text = [1, 2]
    for turn in range(5):  # partly what it would draft itself, partly not
        text += [*drafted(student, text, 2 + turn % 2), 5 + turn]
    found = student.agreement(lesson_of(torch.tensor([text])), depth)[0]
    assert found.shape == (len(text), depth)
    accepted = found.int().cumprod(1).sum(1).tolist()
    for root in range(len(text)):
        after = text[root + 1 : root + 1 + depth]
        chain = drafted(student, text[: root + 1], depth)[: len(after)]
        same = next((n for n, (a, b) in enumerate(zip(chain, after, strict=True)) if a != b), len(after))
        assert accepted[root] == same, root
    assert {0, 2, 3} <= set(accepted)
    rounds, at = list[int](), 2
    while at + depth < len(text):
        rounds.append(accepted[at] + 1)
        at += rounds[-1]
    exam = Exam([lesson_of(torch.tensor([text]))], 2, np.array([len(text)]))
    assert exam.acceptance_length(student, depth) == sum(rounds) / len(rounds)
    assert Exam(exam.lessons, 2, np.array([4])).acceptance_length(student, depth) == 1.0  # an EOS ends the text there


def test_the_loss_is_the_divergence_of_whole_distributions(make_model: Callable[..., Any]) -> None:
    model = make_model(vocab_size=60)
    student = ChainStudent(make_model(vocab_size=60, num_hidden_layers=1), None)
    tokens = torch.randint(60, (2, 9))
    lesson = Teacher(model)(tokens)
    p, log_q = model(tokens).logits.log_softmax(-1).exp(), student.net(tokens).logits.log_softmax(-1)
    dense = (p * (p.log() - log_q)).sum(-1).mean()
    torch.testing.assert_close(student.loss(lesson, DIVERGENCES["kl"]), dense, atol=1e-5, rtol=1e-5)
    hidden = model(tokens, output_hidden_states=True).hidden_states
    taps = Teacher(model, (0, 1))(tokens).taps
    assert taps is not None
    torch.testing.assert_close(taps, torch.cat([hidden[0], hidden[1]], -1))


def test_a_parallel_loss_is_of_all_depths(parallel: ParallelStudent, make_model: Callable[..., Any]) -> None:
    lesson = Teacher(make_model(num_hidden_layers=1))(torch.randint(97, (2, 12)))
    torch.manual_seed(5)
    found = parallel.loss(lesson, DIVERGENCES["tv"])
    torch.manual_seed(5)
    order = torch.randperm(12)
    layout = Layout.of(12, [order[:8].sort().values, order[:6].sort().values, order[:4].sort().values])
    places = layout.positions
    q = parallel.logits(lesson.tokens, layout).softmax(-1).gather(-1, lesson.ids[:, places])
    torch.testing.assert_close(found, (1 - torch.minimum(q, lesson.probs[:, places]).sum(-1)).mean())


def test_a_trimmed_head_is_whole_on_disk(chain: ChainStudent, tmp_path: Path) -> None:
    chain.save(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.draft_tokens == list(range(0, 97, 2))
    tokens = torch.randint(97, (1, 8))
    logits = again(tokens).logits
    torch.testing.assert_close(logits[..., ::2], chain.net(tokens).logits)
    assert not logits[..., 1::2].any()


def test_a_draft_writes_only_what_its_head_knows(chain: ChainStudent) -> None:
    beginning = torch.randint(97, (3, 4))
    texts = list[torch.Tensor]()
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(chain.write(beginning, 12))
    assert texts[0].shape == (3, 12)
    assert torch.equal(texts[0][:, :4], beginning)
    assert not (texts[0][:, 4:] % 2).any()
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("kind", ["chain", "parallel"])
def test_of_the_targets_shape_it_begins_as_the_target(kind: str, asked: Callable[..., Any], target: Path) -> None:
    found = checkpoints.find(str(target))
    model = checkpoints.load(found, "sdpa")
    counts = np.arange(4096)
    config = asked(kind=kind, layers=3, draft_vocab_size=512)
    student, began = Plan.of(config, found).student(model, counts)
    assert (began["narrowed"], began["random"]) == (0, 0)
    tokens = torch.randint(4096, (2, 12))
    kept = torch.tensor([0, *range(4096 - 511, 4096)])  # the most frequent, and EOS
    torch.testing.assert_close(student.net(tokens).logits, model(tokens).logits[..., kept])
    assert frequent(counts, 3, [7], range(4096)).tolist() == [7, 4094, 4095]
    assert frequent(counts, 3, [7], range(4095)).tolist() == [7, 4093, 4094]


def test_a_smaller_draft_takes_what_fits(asked: Callable[..., Any], target: Path) -> None:
    found = checkpoints.find(str(target))
    model = checkpoints.load(found, "sdpa")
    student, began = Plan.of(asked(layers=2, intermediate_size=16), found).student(model, np.ones(4096, int))
    assert began["narrowed"] == 6
    assert began["random"] == 0
    ours, theirs = student.net.model.layers[1], model.model.layers[2]
    assert torch.equal(ours.self_attn.q_proj.weight, theirs.self_attn.q_proj.weight)
    up, down = theirs.mlp.up_proj.weight, theirs.mlp.down_proj.weight
    kept = (up.norm(dim=1) * down.norm(dim=0)).argsort(descending=True)[:16].sort().values
    assert torch.equal(ours.mlp.down_proj.weight, down[:, kept])
    assert torch.equal(ours.mlp.gate_proj.weight, theirs.mlp.gate_proj.weight[kept])
    student, began = Plan.of(asked(hidden_size=16), found).student(model, np.ones(4096, int))
    assert (began["narrowed"], student.net.config.num_attention_heads) == (2, 2)
    embedding = student.net.get_input_embeddings().weight  # as near to the target's as 16 numbers can be
    theirs = model.get_input_embeddings().weight
    assert torch.allclose((embedding**2).sum(), (torch.linalg.svdvals(theirs)[:16] ** 2).sum(), rtol=1e-4)
