"""An engine over a loop on a host in a device's place: the reference pair's texts are the CPU's."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import tiny_models
from host_device import HostDevice, HostQueue, QueuedModel

from specbuild.builder.frontend import checkpoint
from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.gpu.onnxruntime_cuda import OrtModel
from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.decoding.device.loop import DeviceLoop


@pytest.mark.nightly
def test_an_engine_of_the_reference_pair(
    host: KernelLibrary, bundle: Path, pair: Path, prompts: list[str], tmp_path: Path
) -> None:
    """Texts of a real pair, through the scheduler, are those of the CPU's engine."""
    params = [
        SamplingParams(max_new_tokens=16, speculation="best:8"),
        SamplingParams(max_new_tokens=16, temperature=0.8, top_p=0.95, seed=1, speculation="topk:2,3"),
        SamplingParams(max_new_tokens=16, temperature=1.0, repetition_penalty=1.1, seed=2, speculation="chain:4"),
    ]
    asked = [prompts[index] for index in (21, 24, 26)]  # some 100 tokens each
    device, buckets = HostDevice(), (1, 2, 4, 8, 16)
    with Engine.load(bundle, batch_size=2) as engine:
        results = engine.generate(asked, params)
        manifest, tokenizer = engine.manifest, engine.tokenizer
    executors = []
    for name, record in manifest.models.items():
        trained = checkpoint.load(checkpoint.find(str(pair / name)), "eager")
        ir.save(tiny_models.lower_model(trained, 200), tmp_path / name)
        shape = record.layers, record.kv_heads, record.head_dim, record.vocab_size
        spec = ModelSpec(name, *shape, 200, buckets[-1])
        stream = device.stream()
        model = OrtModel(tmp_path / name, spec, device, 2, buckets, 64, "cpu", stream)
        executors.append(StandardExecutor(device, QueuedModel(model, device), stream))
    loop = DeviceLoop(*executors, HostQueue(host, device), frozenset(manifest.eos_token_ids))
    with Engine(manifest, tokenizer, loop, 2) as engine:
        mine = engine.generate(asked, params)
    assert [result.token_ids for result in mine] == [result.token_ids for result in results]
    assert all(r.metrics.speculative_decoding.num_accepted_draft_tokens for r in mine)
