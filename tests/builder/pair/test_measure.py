"""A bundle whose draft has a tokenizer of its own: it decodes exactly, and its drafts come true."""

import argparse
import collections
import logging
import tarfile
from dataclasses import replace

import pytest
from other_tokenizers import byte_level, with_tokenizer

from specbuild.runtime import Engine, SamplingParams

SOURCES = argparse, collections, logging, tarfile
PROMPTS = ["def main(argv):\n    parser = argparse.ArgumentParser()\n", "import os\nimport sys\n\n\nclass Reader:\n"]


@pytest.fixture(scope="module")
def draft(pair, tmp_path_factory):
    return with_tokenizer(pair / "draft", tmp_path_factory.mktemp("drafts") / "other", byte_level(2000, *SOURCES))


@pytest.fixture(scope="module")
def other_bundle(pair, draft, tmp_path_factory, build_shared):
    path = tmp_path_factory.mktemp("bundles") / "other.bundle"
    config = {"target": str(pair / "target"), "draft": str(draft), "max_seq_len": 256, "max_batch_size": 1}
    build_shared(output=path, tune=False, **config)
    return path


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", ["chain:4", "best:8"])
def test_it_decodes_exactly_and_is_accepted(other_bundle, tree, temperature):
    alone = SamplingParams(48, temperature=temperature, seed=3, ignore_eos=True, speculation="off")
    params = alone, replace(alone, speculation=tree)
    with Engine.load(other_bundle, drafter="model") as engine:
        plain, drafted = (list(engine.generate(PROMPTS, [each] * 2)) for each in params)
        for one, other in zip(plain, drafted, strict=True):
            assert one.token_ids == other.token_ids
        accepted = [each.metrics.speculative_decoding.mean_acceptance_length for each in drafted]
    assert sum(accepted) / 2 > 1.4  # of 4096 tokens one is guessed in 4096 rounds
