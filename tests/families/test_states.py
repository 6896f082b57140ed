"""Models whose layers keep a state: every tree is exact, prefixes are reused, and what was rejected leaves nothing."""

from dataclasses import replace

import numpy as np
import pytest
from small_models import branching, randomize
from tiny_families import tiny

from specbuild.builder.check.step_times import PLAIN, save_plain
from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.frontend import checkpoint
from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.frontend.export import export
from specbuild.builder.frontend.reference import greedy as hugging_face
from specbuild.builder.passes import run_portable
from specbuild.builder.pipeline import build
from specbuild.measure.exactness import compare, plain
from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.backends.cpu.executor import OrtExecutor
from specbuild.runtime.backends.executor import ModelSpec, StepInput

NEW_TOKENS, TREES = 20, ("chain:4", "best:12", "auto")
VOCAB, CAPACITY, SLOTS, ROUNDS = 97, 64, 3, 1000
LAYER_TYPES = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
HEADS = {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
MIXERS = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRIDS = {
    "qwen3_5_text": LAYER_TYPES | HEADS,
    "qwen3_next": LAYER_TYPES | HEADS | EXPERTS | {"shared_expert_intermediate_size": 32},
    "bamba": MIXERS | {"attn_layer_indices": [1], "num_hidden_layers": 2},
}


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", HYBRIDS)
def test_tokens(make_family, tmp_path, prompts, model_type):
    """A random pair's tokens are transformers' and plain decoding's, alone and four at a time, cold and warm."""
    target = make_family(tmp_path / "target", model_type, **HYBRIDS[model_type])
    draft = make_family(tmp_path / "draft", model_type, noise=0.05, **HYBRIDS[model_type])
    build(BuildConfig(str(target), tmp_path / "bundle", draft=str(draft), max_batch_size=4, tune=False))
    greedy = SamplingParams(max_new_tokens=NEW_TOKENS, seed=0)
    model = checkpoint.load(checkpoint.find(str(target)), "eager")
    for batch_size in (1, 4):
        with Engine.load(tmp_path / "bundle", batch_size=batch_size, drafter="model") as engine:
            tokens = [engine.tokenizer.encode(prompt)[:60] for prompt in prompts[:4]]
            references = [each.tokens for each in hugging_face(model, tokens, NEW_TOKENS, [0])]
            off = [replace(greedy, speculation="off")] * len(tokens)
            assert compare(engine, f"{model_type} against transformers", tokens, off, references).exact
            for params in (greedy, replace(greedy, temperature=1.0, top_p=0.9)):
                expected = plain(engine, tokens, [params] * len(tokens))
                longer = [[*prompt, *text] for prompt, text in zip(tokens, expected, strict=True)]
                further = plain(engine, longer, [params] * len(tokens))  # of prefixes that are cached
                for tree in TREES:
                    each = [replace(params, speculation=tree)] * len(tokens)
                    assert compare(engine, tree, tokens, each, expected).exact
                    assert compare(engine, tree, longer, each, further).exact
    with Engine.load(tmp_path / "bundle", batch_size=1, drafter="model", prefix_caching=False) as engine:
        assert plain(engine, longer, [params] * len(tokens)) == further


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """An executor of a tiny Qwen3-Next."""
    from transformers import AutoModelForCausalLM

    folder, config = tmp_path_factory.mktemp("hybrid"), tiny("qwen3_next", vocab_size=VOCAB)
    layout, model = probe(config, CAPACITY), randomize(AutoModelForCausalLM.from_config(config).eval())
    graph = export(model, layout, CAPACITY, CAPACITY)
    run_portable(graph)
    save_plain(graph, CAPACITY, folder)
    spec = ModelSpec("hybrid", **layout.spec, vocab_size=VOCAB, capacity=CAPACITY, max_nodes=32)
    executor = OrtExecutor(folder / PLAIN, spec, batch_size=SLOTS, threads=1)
    yield executor
    executor.close()


@pytest.mark.slow
def test_rejected_drafts_leave_nothing(hybrid):
    """Trees of which a random path is accepted, texts that go back and prefixes that move, against single steps."""
    rng = np.random.default_rng(0)
    slot, text, logits = 0, [1], {}
    for _ in range(ROUNDS):
        tree = branching(int(rng.integers(1 << 30)), int(rng.integers(1, 9)))
        tree.tokens[0] = text[-1]
        start = len(text) - 1
        positions = [start + depth for depth in tree.depths]
        step = StepInput(slot, start, start, tree.tokens, positions, tree.ancestors(), len(tree))
        (found,) = hybrid.step([step])
        last = int(rng.integers(len(tree)))
        path = [int(node) for node in np.flatnonzero(tree.ancestors()[last])]
        hybrid.commit(slot, [start + node for node in path], start)
        for node in path:
            text = text if not node else [*text, tree.tokens[node]]
            logits[len(text)] = found[node].copy()
        text.append(int(rng.integers(VOCAB)))
        if len(text) > CAPACITY - 10 or rng.integers(20) == 0:
            check(hybrid, text[:-1], logits)
            rows, source = int(rng.integers(1, len(text))), slot
            slot = int(rng.integers(2))
            if slot != source:
                hybrid.copy(slot, source, rows)
            hybrid.commit(slot, (), rows)
            text = text[: rows + 1]


def check(executor, text, logits):
    """Hold the logits after each token of a text against those of plain decoding, bit for bit."""
    alone = SLOTS - 1
    executor.commit(alone, (), 0)
    for place, token in enumerate(text):
        (plain_logits,) = executor.step([StepInput(alone, place, place, [token], [place], None, 1)])
        assert np.array_equal(plain_logits[0], logits[place + 1])
