"""A bundle's draft gets the drafter of its kind, with its tokens, or one line on why those are none."""

import json

import numpy as np
import pytest
from hash_models import HashExecutor, HashModel, growths, sequence_of
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from specbuild.runtime import SamplingParams
from specbuild.runtime.drafting.eagle3 import EagleDrafter
from specbuild.runtime.drafting.factory import drafter_of
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.drafting.pard import PardDrafter
from specbuild.runtime.errors import BundleError

VOCAB, FILE = 12, "draft_tokens.json"
KINDS = {
    "model": (ModelDrafter, {}),
    "parallel": (PardDrafter, {"mask_token": 11}),
    "eagle3": (EagleDrafter, {"hidden": 8}),
}


@pytest.fixture
def make(manifest_of, write_bundle, tmp_path):
    """`make(kind, tokens, columns)`: a bundle of 12 tokens; `tokens`: what its draft's file says, JSON or bytes."""

    def make(kind, tokens=None, columns=None):
        draft = {"kind": kind, "vocab_size": columns or VOCAB} | KINDS[kind][1]
        draft |= {} if tokens is None else {"tokens": FILE}
        content = tokens if isinstance(tokens, bytes) else json.dumps(tokens).encode()
        manifest = manifest_of(target={"vocab_size": VOCAB}, draft=draft)
        return write_bundle(tmp_path, manifest, {FILE: content} if tokens is not None else {})

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_drafter(make, kind):
    draft, target = (HashExecutor(HashModel(seed)) for seed in (1, 2))
    drafter = drafter_of(make(kind), draft, target, 8)
    assert (type(drafter), drafter.executor) == (KINDS[kind][0], draft)


def test_a_mask_is_the_record_s(make):
    model = HashModel(1)
    drafter = drafter_of(make("parallel"), HashExecutor(model), HashExecutor(model), 8)
    (growth,) = growths(drafter, sequence_of([1, 2], SamplingParams(speculation="chain:3")))
    assert growth.tree().tokens[1:] == [int(model([1, 2, *[11] * masks]).argmax()) for masks in range(3)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["model", "parallel"])
def test_columns_are_the_tokens_that_the_file_names(make, kind, temperature):
    names, model = [3, 7, 1, 0, 2, 4, 6, 5, 11, 10, 9, 8], HashModel(1)
    drafter = drafter_of(make(kind, names), HashExecutor(model), HashExecutor(model), 8)
    sequence = sequence_of([1, 2], SamplingParams(speculation="chain:1", temperature=temperature, seed=2))
    (growth,) = growths(drafter, sequence)
    assert growth.tree().tokens[1] == sequence.sampler.choose(model([1, 2])[np.argsort(names)], 1, ())


NO_TOKENS = st.one_of(
    st.lists(st.one_of(st.integers(), st.floats(), st.text(max_size=2), st.none(), st.booleans()), max_size=5),
    st.sampled_from([[[7, 3, 1]], {"0": 7}, 7, None, [7, 3, 3], [7, 3, 12], [7, 3, 2**70]]),
    st.binary(max_size=9),
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([*KINDS]), NO_TOKENS)
def test_tokens_that_are_none_are_refused_in_one_line(make, kind, tokens):
    named = isinstance(tokens, list) and all(type(token) is int and 0 <= token < VOCAB for token in tokens)
    assume(not (named and len({*tokens}) == len(tokens) == 3))
    bundle, executor = make(kind, b"null" if tokens is None else tokens, columns=3), HashExecutor(HashModel(1))
    with pytest.raises(BundleError, match=FILE):
        drafter_of(bundle, executor, executor, 8)


def test_tokens_that_are_gone_are_refused(make):
    bundle, executor = make("model", [7, 3, 1], columns=3), HashExecutor(HashModel(1))
    bundle.path(FILE).unlink()
    with pytest.raises(BundleError, match=r"draft_tokens\.json cannot be read"):
        drafter_of(bundle, executor, executor, 8)
