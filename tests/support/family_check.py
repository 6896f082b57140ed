"""Holds a family's tiny model, as a CPU runs it, against transformers: prompts in parts, a tree, a commit, and bits."""

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
from small_models import branching, randomize, reference
from tiny_families import tiny

from specbuild.builder.check.step_times import PLAIN, save_plain
from specbuild.builder.frontend.attention_layout import check_decoder, probe
from specbuild.builder.frontend.export import export
from specbuild.builder.passes import run_portable
from specbuild.runtime.backends.cpu.executor import OrtExecutor
from specbuild.runtime.backends.executor import ModelSpec, StepInput

VOCAB, CAPACITY, NODES = 97, 64, 7
PARTS = (0, 9, 10, 21)  # where the parts of the prompt begin and end


def check_family(model_type):
    """Export and run a family's tiny model; raises CheckpointError if it is refused, AssertionError if it is wrong."""
    from transformers import AutoModelForCausalLM

    config = tiny(model_type, vocab_size=VOCAB)
    check_decoder(model_type, config)
    layout = probe(config, CAPACITY)
    model = randomize(AutoModelForCausalLM.from_config(config).eval())
    graph = export(model, layout, CAPACITY, CAPACITY)
    run_portable(graph)
    with tempfile.TemporaryDirectory() as folder:
        save_plain(graph, CAPACITY, Path(folder))
        spec = ModelSpec(model_type, **layout.spec, vocab_size=VOCAB, capacity=CAPACITY, max_nodes=32)
        executor = OrtExecutor(Path(folder) / PLAIN, spec, batch_size=2, threads=1)
        try:
            _check(executor, model)
        finally:
            executor.close()


def _check(executor, model):
    text = np.random.default_rng(0).integers(1, VOCAB, PARTS[-1]).tolist()
    alone, slot = 0, 1
    for start, stop in pairwise(PARTS):
        positions = range(start, stop)
        (logits,) = executor.step([StepInput(slot, start, start, text[start:stop], positions, None, stop - start)])
        same(logits, reference(model, text[:stop])[start:])
    tree, length = branching(1, NODES), len(text)
    positions = [length + depth for depth in tree.depths]
    visible = tree.ancestors()
    (logits,) = executor.step([StepInput(slot, length, length, tree.tokens, positions, visible, NODES)])
    logits, paths = logits.copy(), [[*text, tree.tokens[0], *tree.path(node)] for node in range(NODES)]
    for node, path in enumerate(paths):
        same(logits[node], reference(model, path)[-1])
    deepest = int(np.argmax(tree.depths))
    accepted = paths[deepest]
    executor.commit(slot, [length + int(node) for node in np.flatnonzero(visible[deepest])], length)
    after = [5, 6]
    positions = range(len(accepted), len(accepted) + 2)
    (logits,) = executor.step([StepInput(slot, len(accepted), len(accepted), after, positions, None, 2)])
    logits = logits.copy()
    for place, token in enumerate(accepted + after):
        (plain,) = executor.step([StepInput(alone, place, place, [token], [place], None, 1)])
    same(plain[0], reference(model, accepted + after)[-1])
    assert np.array_equal(plain[0], logits[1]), "bits differ from those of plain decoding"


def same(found, expected):
    """Hold logits against transformers', relative to the largest."""
    np.testing.assert_allclose(found, expected, atol=1e-3 * max(1.0, float(np.abs(expected).max())), rtol=0)
