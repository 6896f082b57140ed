"""The check at the end of a build holds a bundle against Hugging Face and itself, and refuses what differs."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from device import gpus

from specbuild.builder.check import bundle_check
from specbuild.builder.check.bundle_check import (
    FP8_CACHE,
    PROMPTS,
    check,
    check_divergence,
    inspected,
    tokenize,
    unrunnable,
)
from specbuild.builder.frontend.checkpoint import find
from specbuild.builder.frontend.vocabulary import reference_logits
from specbuild.runtime import Bundle
from specbuild.runtime.errors import ExecutionError

NEW_TOKENS, MAX_KL = 6, 0.05
GIVEN = [[5, 17, 300], [42]]
ROWS = [np.array([[2.0, 0.0, -1.0], [0.5, 0.5, 0.0]], np.float32), np.array([[0.0, 3.0, 1.0]], np.float32)]


@pytest.fixture(scope="module")
def reference(pair):
    """What Hugging Face's modules compute of texts with the reference target."""
    return partial(reference_logits, find(str(pair / "target")))


@pytest.mark.parametrize(("max_seq_len", "longest", "new"), [(1024, None, 32), (40, 8, 32), (33, 1, 32), (2, 1, 1)])
def test_prompts_are_cut_to_what_a_bundle_holds(pair, max_seq_len, longest, new):
    tokenizer = find(str(pair / "target")).tokenizer
    prompts, count = tokenize(tokenizer, max_seq_len)
    whole = [tokenizer(text)["input_ids"] for text in PROMPTS]
    assert prompts == [ids[:longest] for ids in whole]
    assert count == new
    assert max(map(len, prompts)) + count <= max_seq_len


def test_a_sound_bundle_passes(bundle, reference):
    found = check(bundle, GIVEN, NEW_TOKENS, reference, MAX_KL)
    assert found["bound"] == 1e-4
    assert 0 < found["largest_logit_difference"] < 1e-4
    assert 0 <= found["kl_nats_per_token"] < 1e-6
    assert [case["name"] for case in found["cases"]] == [
        "plain decoding against Hugging Face",
        "greedy: default tree against plain decoding",
        "temperature 1, top-p 0.95: default tree against plain decoding",
    ]
    assert all(case["exact"] and case["prompts"] == 2 for case in found["cases"])
    assert found["cases"][0]["tokens"] == 2 * NEW_TOKENS


def test_a_token_that_differs_is_named(bundle, reference):
    """Another one than Hugging Face chooses, beyond a near tie."""

    def other(texts):
        first, second = reference(texts)
        second[2, 7] = second[2].max() + 1  # after the only token of the prompt and two more
        return [first, second]

    with pytest.raises(
        ExecutionError, match=r"not exact \(plain decoding .*: prompt 2, token 2, \d+ for 7, margin 1\)"
    ):
        check(bundle, GIVEN, NEW_TOKENS, other, MAX_KL)


def test_logits_that_differ_are_refused(bundle, reference):
    """Even where they change no choice."""

    def changed(texts):
        found = list(reference(texts))
        found[1][0, found[1][0].argmin()] -= 0.5
        return found

    with pytest.raises(ExecutionError, match=r"differ from Hugging Face's by up to 0\.5: nothing was written$"):
        check(bundle, GIVEN, NEW_TOKENS, changed, MAX_KL)


@pytest.mark.parametrize(("rounding", "use"), [("fp16", "bf16 or fp32"), (FP8_CACHE, "--kv-cache-dtype auto")])
@pytest.mark.parametrize("factor", [-1, np.nan], ids=["far", "NaN"])
def test_another_model_is_refused_with_what_to_use(rounding, use, factor):
    assert check_divergence(rounding, ROWS, ROWS, 0.0) == 0.0
    words = rf"^{rounding} changes this model too much, by \S+ nats a token: nothing was written, use {use}$"
    with pytest.raises(ExecutionError, match=words):
        check_divergence(rounding, [factor * rows for rows in ROWS], ROWS)


@pytest.mark.skipif(gpus() > 0, reason="needs a machine without a GPU")
def test_what_cannot_be_run_here_says_why(bundle):
    manifest = Bundle.open(bundle).manifest
    assert "there is no NVIDIA driver" in str(unrunnable(manifest))
    assert inspected(bundle, manifest) == {}  # it has no engines, whatever GPUs there are


@pytest.mark.parametrize(("library", "told"), [(None, "no kernels for compute capability 89"), ("lib.so", None)])
def test_a_gpu_that_the_bundle_has_no_kernels_for_runs_no_check(bundle, monkeypatch, library, told):
    """As of `--cuda-arch none`: the build ends without that check, not with an error after minutes."""
    monkeypatch.setattr(bundle_check, "Cuda", lambda: SimpleNamespace(capability="89", close=lambda: None))
    monkeypatch.setattr(bundle_check, "find_library", lambda: library)
    found = unrunnable(Bundle.open(bundle).manifest)
    assert found is None if told is None else told in str(found)
