"""`specbuild tune` where models are on a device: its table decides what the device's rounds draft."""

import json
import shutil
from dataclasses import replace

import onnx_ir as ir
import pytest
import tiny_models
from host_device import HostDevice, HostQueue, QueuedModel

from specbuild.builder.frontend import checkpoint
from specbuild.measure.tuning import measure as measuring
from specbuild.measure.tuning.measure import Tuning
from specbuild.measure.tuning.tune import tune
from specbuild.runtime import Bundle, Engine, LoadOptions, SamplingParams
from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.onnxruntime_cuda.model import OrtModel, RunContext
from specbuild.runtime.bundle.manifest import MANIFEST
from specbuild.runtime.decoding.device.loop import DeviceLoop
from specbuild.runtime.decoding.loop import LoopOptions
from specbuild.runtime.requests.prompt_file import Request
from specbuild.runtime.requests.tokenizer import Tokenizer
from specbuild.runtime.speculation.controller import Controller
from specbuild.runtime.speculation.cost_model import CostModel
from specbuild.runtime.speculation.timing_table import FILE, TimingTable

BUCKETS, LENGTH, ROWS = [1, 2, 4, 8, 16], 160, 200
PROMPTS = [Request(text, SamplingParams()) for text in ("def main(argv):\n", "import os\nimport sys\n\n", "class A:")]
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def folder(bundle, tmp_path_factory):
    """The reference pair's bundle, as if it were for a GPU."""
    folder = tmp_path_factory.mktemp("tuned") / "b"
    shutil.copytree(bundle, folder)
    found = Bundle.open(folder).manifest
    changed = replace(found, backend="onnxruntime-cuda", buckets=BUCKETS, max_seq_len=LENGTH, max_batch_size=2)
    graphs = {
        name: replace(record, graphs={"2": record.graphs["1"]}, capacity=ROWS) for name, record in found.models.items()
    }
    (folder / MANIFEST).write_text(replace(changed, models=graphs).to_json(), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def load(host, pair, folder, tmp_path_factory):
    """`load(folder, options, controller=…)`: an engine whose models are on a host in a device's place."""
    graphs, manifest = tmp_path_factory.mktemp("graphs"), Bundle.open(folder).manifest
    for name in manifest.models:
        trained = checkpoint.load(checkpoint.find(str(pair / name)), "eager")
        ir.save(tiny_models.lower_model(trained, ROWS), graphs / name)

    def make(_, asked, controller=None, ahead=0, **given):
        batch_size = asked.batch_size
        device, executors = HostDevice(), []
        for name, record in manifest.models.items():
            shape = record.layers, record.kv_heads, record.head_dim, record.vocab_size
            spec, stream = ModelSpec(name, *shape, ROWS, BUCKETS[-1]), device.stream()
            model = OrtModel(graphs / name, spec, RunContext(device, stream, "cpu", batch_size, BUCKETS, 64))
            executors.append(StandardExecutor(device, QueuedModel(model, device), stream))
        eos, options = frozenset(manifest.eos_token_ids), LoopOptions(prefix_caching=False)
        loop = DeviceLoop(*executors, HostQueue(host, device), eos, options=options, ahead=ahead)
        tokenizer = Tokenizer(folder / manifest.tokenizer, None, manifest.special_tokens)
        return Engine(manifest, tokenizer, loop, batch_size, controller=controller)

    return make


@pytest.fixture(scope="module")
def tuned(folder, load):
    """What tuning it found; the table is in the bundle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring.Engine, "load", load)
        return tune(folder, Tuning(PROMPTS, 16, [1, 2]))


def test_the_table_has_steps_as_the_device_has_them(folder, tuned):
    record = json.loads((folder / FILE).read_text())
    Bundle.open(folder).verify()
    assert list(record["times"]) == ["1", "2"]
    assert [nodes for nodes, _ in record["times"]["1"]["verify"]] == [1, 2, 3, 4, 5, 8, 9, 16]
    assert record["machine"] == tuned["machine"] == HostDevice().identity
    assert tuned["auto"] > 0
    assert [tree["tree"] for tree in tuned["trees"]] == ["best:1", "best:2", "best:4", "best:8", "best:15"]
    accepted = [tree["accepted"] for tree in tuned["trees"]]
    assert accepted == sorted(accepted)
    assert 0.3 < accepted[0] < 1 < accepted[-1]


@pytest.mark.parametrize("ahead", [0, 32])
def test_auto_goes_by_it(folder, load, tuned, ahead):
    """The tokens are plain decoding's, and every round is decided by the table."""
    table = TimingTable.of(json.loads((folder / FILE).read_text()), BUCKETS[-1])
    controller = Controller(CostModel(table, 2, padded=True), has_model=True)
    params = [SamplingParams(40, temperature=each, seed=3, ignore_eos=True) for each in (0.0, 0.8)]
    with load(folder, LoadOptions(batch_size=2), controller=controller, ahead=ahead) as engine:
        plain, auto = (
            engine.generate(
                ["class Reader:\n", "for i in "], [replace(each, speculation=speculation) for each in params]
            )
            for speculation in ("off", "auto")
        )
    assert [each.token_ids for each in auto] == [each.token_ids for each in plain]
    for stats in (each.metrics.speculative_decoding for each in auto):
        assert sum(stats.decisions.values()) >= stats.num_spec_steps
        assert stats.decisions.keys() <= {"model", "lookup", "plain"} or "probe" in stats.decisions
