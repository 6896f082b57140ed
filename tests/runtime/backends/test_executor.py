"""The executor's seam: what a bundle's models are to an executor, and how one slot begins as another did."""

import pytest

from specbuild.runtime.backends.executor import ModelSpec, StepInput, share_rows, spec_of


@pytest.mark.parametrize(
    ("draft", "reads", "hidden"),
    [({}, False, 0), ({"kind": "parallel", "mask_token": 3}, False, 0), ({"kind": "eagle3", "hidden": 24}, True, 24)],
)
def test_a_spec_says_what_the_manifest_does(manifest_of, draft, reads, hidden):
    """A head alone reads hidden states."""
    sizes = {"layers": 3, "kv_heads": 2, "head_dim": 16, "vocab_size": 77, "capacity": 80, "max_positions": 99}
    manifest = manifest_of(target={**sizes, "windows": [0, 16], "hidden": 32}, draft=draft, buckets=[1, 2, 16])
    expected = ModelSpec(name="target", **sizes, max_nodes=16, windows=(0, 16), hidden=32, reads_hidden=False)
    assert spec_of(manifest, "target") == expected
    spec = spec_of(manifest, "draft")
    assert (spec.name, spec.reads_hidden, spec.hidden, spec.max_nodes) == ("draft", reads, hidden, 16)


def read(executor, slot, tokens):
    executor.step([StepInput(slot, 0, 0, tokens, range(len(tokens)), None, 1)])
    executor.commit(slot, (), len(tokens))


def tokens_of(executor, slot):
    return [token for position, token in executor.rows[slot] if position >= 0]


@pytest.mark.parametrize(("source", "rows"), [(1, 0), (1, 2), (1, 4), (0, 0), (0, 2), (0, 3)])
def test_a_slot_gets_the_first_rows_of_a_slot_and_no_more(hash_executor, hash_model, source, rows):
    """Of another's or of its own."""
    executor = hash_executor(hash_model(1), 2)
    texts = [[1, 2, 3], [4, 5, 6, 7]]
    for slot, text in enumerate(texts):
        read(executor, slot, text)
    share_rows(executor, 0, source, rows)
    assert tokens_of(executor, 0) == texts[source][:rows]
    assert tokens_of(executor, 1) == texts[1], "the other keeps its own"
