"""The training of EAGLE-3 heads: unrolled as drafting is."""

import pytest
import torch
from small_models import random_model
from transformers import DynamicCache

from specbuild.builder.distill.divergence import DIVERGENCES
from specbuild.builder.distill.eagle import EagleStudent
from specbuild.builder.distill.student import Lesson
from specbuild.builder.frontend.checkpoint import find, load
from specbuild.builder.frontend.eagle3_head import find_head, load_head

VOCAB, DRAFTED, LENGTH, DEPTH = 97, 30, 8, 3


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture
def student(model):
    tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:DRAFTED]
    return EagleStudent.start(model, tokens, depth=DEPTH, intermediate_size=20)


@pytest.fixture
def lesson(model, student):
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True)
    probs, ids = out.logits.softmax(-1).topk(5)
    return Lesson(tokens, ids, probs, torch.cat([out.hidden_states[place] for place in student.taps], -1))


@torch.no_grad()
def drafting(student, lesson, anchor, depth):
    """Each step's logits `[B, draft_vocab]` as a runtime computes them: true rows up to the anchor, then one by one."""
    student.net.set_attn_implementation("sdpa")
    cache, count = DynamicCache(), anchor + 1
    positions = torch.arange(LENGTH).expand(2, -1)
    tokens, hidden = lesson.tokens, student.net.fuse(lesson.taps)[:, :count]
    logits, hidden = student.net(tokens[:, 1 : count + 1], hidden, positions[:, :count], past_key_values=cache)
    steps = [logits[:, -1]]
    for row in range(count, count + depth - 1):
        logits, hidden = student.net(
            tokens[:, row + 1, None], hidden[:, -1:], positions[:, row, None], past_key_values=cache
        )
        steps.append(logits[:, -1])
    return steps


def test_unrolls_as_it_drafts(student, lesson):
    """Agreement and loss of every anchor and step are those of drafting with a cache, row by row."""
    agrees = student.agreement(lesson, DEPTH)
    student.progress(0.5)
    loss = student.loss(lesson, DIVERGENCES["tv"]).detach()
    places = {int(token): place for place, token in enumerate(student.net.tokens)}
    overlap = [[] for _ in range(DEPTH)]
    expected = torch.zeros(2, LENGTH, DEPTH, dtype=torch.bool)
    for anchor in range(LENGTH - 1):
        depth = min(DEPTH, LENGTH - 1 - anchor)
        for step, logits in enumerate(drafting(student, lesson, anchor, depth)):
            seen = anchor + 1 + step  # the last token that this step's prediction knows
            for text, q in enumerate(logits.softmax(-1)):
                drawn = zip(lesson.ids[text, seen].tolist(), lesson.probs[text, seen].tolist(), strict=True)
                overlap[step].append(sum(min(p, float(q[places[i]])) for i, p in drawn if i in places))
                if seen + 1 < LENGTH:
                    chosen = student.net.tokens[q.argmax()]
                    expected[text, anchor + 1, step] = chosen == lesson.tokens[text, seen + 1]
    assert torch.equal(agrees, expected)
    losses = [1 - sum(step) / len(step) for step in overlap]
    low, high = sorted((losses[0], sum(losses) / DEPTH))
    assert low < float(loss) < high, "what comes first weighs more"


def test_learns(student, lesson):
    """All but the target's embedding is trained."""
    optimizer = torch.optim.Adam([w for w in student.net.parameters() if w.requires_grad], lr=0.01)
    losses = []
    for _ in range(10):
        losses.append(student.loss(lesson, DIVERGENCES["kl"]))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    assert {name for name, weight in student.net.named_parameters() if weight.grad is None} == {"embed_tokens.weight"}


def test_starts_from_the_target(model, student):
    """Embedding, head rows, norms and projections are the target's, and two starts of one seed are one."""
    tokens, (first, last) = student.net.tokens, model.model.layers
    assert torch.equal(student.net.lm_head.weight, model.lm_head.weight[tokens])
    assert torch.equal(student.net.embed_tokens.weight, model.get_input_embeddings().weight)
    torch.testing.assert_close(student.net.norm.weight, model.model.norm.weight, atol=1e-5, rtol=0)
    seen = torch.cat((first.self_attn.k_proj.weight, last.self_attn.k_proj.weight), 1)
    assert torch.equal(student.net.midlayer.self_attn.k_proj.weight, seen)
    again, other = (EagleStudent.start(model, tokens.flip(0), depth=1, intermediate_size=20, seed=n) for n in (0, 1))
    states = [each.net.state_dict().values() for each in (student, again)]
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))
    assert not torch.equal(student.net.fc.weight, other.net.fc.weight)


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox"])
def test_starts_from_targets_of_other_families(family):
    """What has another shape or another way is left as it is; Gemma's norms multiply by 1 more than their weight."""
    target = random_model(family, num_hidden_layers=2, head_dim=16)
    student = EagleStudent.start(target, torch.arange(DRAFTED), depth=1)
    assert torch.equal(student.net.lm_head.weight, target.get_output_embeddings().weight[:DRAFTED])
    norm = 1 + target.model.norm.weight if family == "gemma2" else torch.ones(64)
    torch.testing.assert_close(student.net.norm.weight.detach(), norm, atol=1e-5, rtol=0)


def test_saves_what_is_read(make_checkpoint, tmp_path):
    target = find(str(make_checkpoint(tmp_path / "target")))
    model = load(target, "sdpa")
    student = EagleStudent.start(model, torch.arange(100, 150), depth=2)
    student.save(tmp_path)
    found = find_head(str(tmp_path), target)
    assert found.taps == student.taps
    head = load_head(found, model.get_input_embeddings().weight)
    assert all(torch.equal(weight, student.net.state_dict()[name]) for name, weight in head.state_dict().items())
