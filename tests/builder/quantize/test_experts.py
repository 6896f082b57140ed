"""A mixture's experts in INT8 and INT4: the logits are transformers' with the numbers that the codes stand for."""

import copy

import numpy as np
import pytest
import torch
from small_models import fused, random_model, reference

from specbuild.builder.check.step_times import PLAIN, save_plain
from specbuild.builder.config.scheme import parse
from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.quantize.experts import QuantizeExperts
from specbuild.builder.quantize.numbers import quantize
from specbuild.runtime.backends.cpu.executor import OrtExecutor
from specbuild.runtime.backends.executor import ModelSpec, StepInput

CAPACITY, TEXT = 40, [5, 17, 3, 88, 42, 9, 9, 61]
SIZES = {"num_hidden_layers": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "precision"), [("qwen3_moe", "int8:32"), ("gpt_oss", "int4:32"), ("gpt_oss", "int4:32,asym")]
)
def test_logits_are_those_of_the_same_numbers(tmp_path, model_type, precision):
    model = random_model(model_type, num_experts=4, num_local_experts=4, head_dim=16, **SIZES)
    scheme = QuantizeExperts(parse(f"{precision},weight-only", "onnxruntime"))
    graph = fused(model, CAPACITY).clone()
    scheme(graph)
    save_plain(graph, CAPACITY, tmp_path)
    spec = ModelSpec("t", **probe(model.config, CAPACITY).spec, vocab_size=97, capacity=CAPACITY, max_nodes=16)
    executor = OrtExecutor(tmp_path / PLAIN, spec, 1, threads=1)
    (logits,) = executor.step([StepInput(0, 0, 0, TEXT, range(len(TEXT)), None, len(TEXT))])
    rounded = copy.deepcopy(model)
    turned = model_type == "gpt_oss"
    with torch.no_grad():
        for name, weight in rounded.named_parameters():
            if weight.ndim == 3 and name.endswith("_proj"):
                for expert in weight:
                    rows = expert.T if turned else expert
                    restored = quantize({"": rows.contiguous()}, scheme.scheme)[""].restored()
                    expert.copy_(restored.T if turned else restored)
    assert not np.allclose(logits, reference(model, TEXT), atol=1e-4)
    np.testing.assert_allclose(logits, reference(rounded, TEXT), atol=1e-3)
    executor.close()
