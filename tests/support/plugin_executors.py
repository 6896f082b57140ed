"""Executors of models around TensorRT's plugin, on a device that is this process's memory."""

import functools

from attention_oracle import oracle
from device_requests import prompt_of, request_of
from host_device import HostDevice, HostQueue, QueuedModel
from plugin_model import PluginModel
from tiny_models import BUCKETS, CAPACITY, CHUNK, SIZES, VOCAB

from specbuild.builder.lower import plugin
from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.decoding.device.loop import DeviceLoop

HEAD, BOUND = 64, {"rtol": 1e-4, "atol": 1e-4}
REQUESTS = [
    (3, {}),
    (33, {"temperature": 0.8, "top_p": 0.9}),
    (19, {"temperature": 1.1, "top_k": 12, "repetition_penalty": 1.2}),
    (1, {"repetition_penalty": 1.4, "logit_bias": {3: 1.5}}),
    (12, {"speculation": "off", "temperature": 1.0}),
]


@functools.cache
def torch_model(name):
    """target, or draft: the target with some noise; heads that the kernel has, and a window in one of two layers."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    window = {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]}
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"} | {"hidden_size": 4 * HEAD}
    config = Qwen2Config(**sizes, **window, tie_word_embeddings=True, initializer_range=0.08)
    model = Qwen2ForCausalLM(config).eval()
    if name == "draft":
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.01 * torch.randn_like(weight)
    return model


@functools.cache
def lowered(name, precision, page_rows=0):
    """The graph with the plugin; "fp16, fp8": in float16 over caches in E4M3."""
    from specbuild.builder.frontend.attention_layout import probe
    from specbuild.builder.frontend.export import export
    from specbuild.builder.frontend.layer_by_layer import LayeredModel
    from specbuild.builder.passes import run_portable
    from specbuild.builder.quantize.fp8_caches import calibrate

    model = torch_model(name)
    graph = export(model, probe(model.config, CAPACITY), CAPACITY, CAPACITY)
    run_portable(graph)
    precision, _, fp8 = precision.partition(", ")
    return plugin.lower(
        graph, precision, CAPACITY, calibrate(LayeredModel.of(model), [prompt_of(9, 40)]) if fp8 else None, page_rows
    )


def spec(name):
    return ModelSpec(name, 2, 2, HEAD, VOCAB, CAPACITY, BUCKETS[-1], (0, 7))


def made(name, device, batch_size, precision="fp32", tree_nodes=64, by=oracle, pages=None):
    """The model's executor, on a stream of its own."""
    graph = lowered(name, precision, pages.rows if pages else 0)
    model = PluginModel(graph, spec(name), device, batch_size, BUCKETS, CHUNK, tree_nodes, by, pages)
    return StandardExecutor(device, QueuedModel(model, device), device.stream())


def loop_of(host, batch_size, **more):
    device = HostDevice()
    executors = [made(name, device, batch_size, **more) for name in ("target", "draft")]
    return DeviceLoop(*executors, HostQueue(host, device), frozenset(), False)


def requests(tree):
    return [
        request_of(prompt_of(i, length), **{"speculation": tree, "max_new_tokens": 6 + i, "seed": i} | fields)
        for i, (length, fields) in enumerate(REQUESTS)
    ]
