"""Random models of 97 tokens in the standard lowering, exported once a session, over a `HostDevice`."""

import functools
import logging

import onnx_ir as ir
from host_device import QueuedModel

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.onnxruntime_cuda.model import OrtModel, RunContext

VOCAB, TEXT, BUCKETS, CHUNK = 97, 96, (1, 2, 4, 8, 16), 24
CAPACITY, WINDOW = TEXT + BUCKETS[-1], 7
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


@functools.cache
def torch_model(name):
    """target, draft (the target with some noise), or windowed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    if name == "windowed":
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW, initializer_range=0.2)).eval()
    model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.2, attn_implementation="sdpa")).eval()
    if name == "draft":
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.02 * torch.randn_like(weight)
    return model


@functools.cache
def lowered(name):
    """The model's graph."""
    return lower_model(torch_model(name), CAPACITY)


def lower_model(model, capacity):
    """Any model's graph, in float32."""
    from specbuild.builder.frontend.attention_layout import probe
    from specbuild.builder.frontend.export import export
    from specbuild.builder.lower.standard import lower
    from specbuild.builder.passes import run_portable

    logging.getLogger("torch.__trace").propagate = False  # an export is thousands of records, and pytest keeps them
    graph = export(model, probe(model.config, capacity), capacity, capacity)
    run_portable(graph)
    return lower(graph, "fp32", capacity)


def executor(name, device, folder, batch_size):
    """The model by ONNX Runtime on a stream of its own."""
    path = folder / f"{name}.onnx"
    if not path.exists():
        ir.save(lowered(name), path)
    windows = (WINDOW,) if name == "windowed" else (0,)
    spec = ModelSpec(name, 2, 2, 16, VOCAB, CAPACITY, BUCKETS[-1], windows)
    stream = device.stream()
    model = OrtModel(path, spec, RunContext(device, stream, "cpu", batch_size, BUCKETS, CHUNK))
    return StandardExecutor(device, QueuedModel(model, device), stream)
