"""Graphs in turn with TreeAttention's kernel between them: the whole graph's tokens, in one graph's memory."""

import copy
import functools
import json
import shutil

import numpy as np
import pytest
from device_requests import prompt_of, run
from host_device import HostDevice, HostQueue, QueuedModel
from plugin_executors import requests, spec, torch_model
from small_models import holding, reference
from tiny_models import BUCKETS, CAPACITY, CHUNK

from specbuild.builder.codegen.parts import save_parts
from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.frontend.export import export
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.lower import parts
from specbuild.builder.passes import run_portable
from specbuild.builder.quantize.assignment import assign
from specbuild.builder.quantize.calibrate import calibrate
from specbuild.builder.quantize.linears import Names
from specbuild.builder.quantize.rewrite import Quantize
from specbuild.runtime.backends.executor import StepInput
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.onnx_graph import GraphFile
from specbuild.runtime.backends.onnxruntime_cuda.model import RunContext
from specbuild.runtime.backends.onnxruntime_cuda.parts_file import PARTS
from specbuild.runtime.backends.onnxruntime_cuda.parts_model import Parts, PartsModel
from specbuild.runtime.decoding.device.loop import DeviceLoop
from specbuild.runtime.errors import BundleError

pytestmark = pytest.mark.slow  # both models are exported
PROCESSORS = 20  # so that some steps split their contexts
BOUND = {"rtol": 2e-2, "atol": 2e-2}  # of float16


@functools.cache
def fused(name):
    model = torch_model(name)
    graph = export(model, probe(model.config, CAPACITY), CAPACITY, CAPACITY)
    run_portable(graph)
    return graph


@functools.cache
def lowered(name):
    return parts.lower(fused(name), "fp16", CAPACITY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Both models' parts, as a bundle has them."""
    found = tmp_path_factory.mktemp("parts")
    for name in ("target", "draft"):
        (found / name).mkdir()
        assert save_parts(found, name, lowered(name)) == f"{name}/{PARTS}"
    return found


def changed(folder, change):
    """The target's file of parts, after a change."""
    good = GraphFile.at(folder / "target" / PARTS)
    content = json.loads(good.data)
    change(content)
    return good._replace(data=json.dumps(content).encode())


def made(folder, name, device, batch_size, host):
    """The model's executor, on a stream of its own."""
    stream, file = device.stream(), GraphFile.at(folder / name / PARTS)
    context = RunContext(device, stream, "cpu", batch_size, BUCKETS, CHUNK)
    model = PartsModel(Parts(file, host, PROCESSORS), spec(name), context)
    return StandardExecutor(device, QueuedModel(model, device), stream)


def test_layers_of_one_form_are_one_graph(folder):
    """A weight is stored once, also one that two parts read; no graph has any."""
    target = folder / "target"
    found = json.loads((target / PARTS).read_text())
    assert [each.get("window", each["type"]) for each in found["steps"]] == ["part", 0, "part", 7, "part"]
    size = sum(np.prod(each["shape"]) * np.dtype(each["dtype"]).itemsize for each in found["weights"].values())
    assert size <= (target / "weights.bin").stat().st_size < 1.1 * size
    assert max(path.stat().st_size for path in target.glob("part*.onnx")) < 8192


@pytest.mark.parametrize("rotates", [True, False])
def test_logits_are_the_models(folder, host, rotates, tmp_path):
    """A prompt in pieces, then single tokens, in one of two slots."""
    model, text = copy.deepcopy(torch_model("target")), prompt_of(3, 40)
    if not rotates:
        folder = shutil.copytree(folder, tmp_path / "still")
        file = changed(folder, lambda file: [each.update(cos=None, sin=None) for each in file["steps"][1::2]])
        file.path.write_bytes(file.data)
        model.model.rotary_emb.inv_freq.zero_()
    target, expected = made(folder, "target", HostDevice(), 2, host), reference(model, text)
    for start, end in ((0, CHUNK), (CHUNK, 37), (37, 38), (38, 40)):
        step = StepInput(1, start, start, text[start:end], range(start, end), None, 1)
        (rows,) = target.step([step])
        np.testing.assert_allclose(rows[0], expected[end - 1], **BOUND)
    assert not target.device.array(target.model.tensors.cache)[:, 0].any()


@pytest.mark.parametrize("precision", ["int8", "int8:64,asym", "int4:32,rtn", "int4:128,sym,rtn"])
def test_logits_of_weights_in_blocks_are_those_of_their_numbers(host, precision, tmp_path):
    """Rows beside others have the bits that they have alone."""
    model, text, graph = torch_model("target"), prompt_of(3, 30), fused("target").clone()
    names = Names.of(model)
    schemes = assign(QuantizeOptions(), "target", precision, "onnxruntime-cuda", names)
    found = calibrate(LayeredModel.of(model), schemes, [text])
    Quantize(found, names)(graph)
    (tmp_path / "target").mkdir()
    save_parts(tmp_path, "target", parts.lower(graph, "fp16", CAPACITY))
    with holding(model, found):
        expected = reference(model, text)
    target = made(tmp_path, "target", HostDevice(), 2, host)
    target.step([StepInput(0, 0, 0, text[:24], range(24), None, 1)])
    (rows,) = target.step([StepInput(0, 24, 24, text[24:28], range(24, 28), None, 4)])
    np.testing.assert_allclose(rows, expected[24:28], **BOUND)
    for place, row in enumerate(rows, start=24):
        (alone,) = target.step([StepInput(0, place, place, text[place : place + 1], range(place, place + 1), None, 1)])
        assert np.array_equal(alone[0], row)


@pytest.mark.soak(only=("best:7",))
@pytest.mark.nightly(only=("topk:2,3",))
@pytest.mark.parametrize("tree", ["chain:4", "topk:2,3", "best:7"])
def test_tokens_are_plain_decodings(folder, host, tree):
    """Requests that join and leave, greedy and sampled, whatever is drafted for them."""
    texts = []
    for speculation in ("off", tree):
        device = HostDevice()
        both = [made(folder, name, device, 2, host) for name in ("target", "draft")]
        done = run(DeviceLoop(*both, HostQueue(host, device), frozenset(), False), requests(speculation))
        texts.append([each.output for each in done])
    assert texts[0] == texts[1]
    assert sum(s.metrics.speculative_decoding.num_accepted_draft_tokens for s in done) > 5


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file["steps"][2]["inputs"].append("nobody's"), "reads what is not there"),
        (lambda file: file["values"].popitem(), "reads what is not there"),
        (lambda file: weight(file).update(dtype="complex64"), "a type that no build writes"),
        (lambda file: weight(file).update(offset=1 << 39), "is not within 'weights.bin'"),
        (lambda file: file["steps"].__delitem__(slice(3, None)), "has 1 layers, not 2"),
        (lambda file: file.update(more=1), "malformed"),
        (lambda file: file["steps"][1]["inputs"].update(query="input_ids"), "reads what is not there"),
        (lambda file: file["steps"][3].update(cos="input_ids"), "reads what is not there"),
        (lambda file: output(file).update(dtype="float32"), "computes in float32: TreeAttention has float16 and"),
    ],
)
def test_a_file_that_no_build_wrote(folder, host, spoil, message):
    parts, device = Parts(changed(folder, spoil), host, PROCESSORS), HostDevice()
    with pytest.raises(BundleError, match=message):
        PartsModel(parts, spec("target"), RunContext(device, device.stream(), "cuda", 1, BUCKETS, CHUNK))


def weight(file):
    return next(iter(file["weights"].values()))


def output(file):
    return file["values"][file["steps"][1]["output"]]
