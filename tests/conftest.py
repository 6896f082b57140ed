"""Fixtures: the reference pair's bundle, built once a session, and tiny checkpoints made on the spot."""

import hashlib
import json
import os
import re
import shutil
import signal
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from made_once import made_once

import specbuild  # noqa: F401 - before ONNX Runtime, whose telemetry it turns off

# Beside others of its kind a process keeps to one core: pools of threads that wait by spinning would fight over all.
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

# A shell's job in the background ignores these, and so would the commands that tests end by them.
for ignored in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored is signal.SIGINT else signal.SIG_DFL)

TIERS = ("fast", "slow", "nightly", "soak")
SKIPS = (  # what CI's machine lacks
    "NVIDIA GPU",
    "TensorRT's headers",
    "CUDA's header",
    "tensorrt_lean",
    "(Ray|LangChain|LiteLLM) is not installed",
    "no compiler and emulator for aarch64",
)
LONG = (  # begun first and in this order, to end together
    *("test_one_text.py", "test_families.py", "test_readme.py", "test_mtp_drafts.py", "test_exactness.py"),
    *("test_recorded_requests.py", "test_contract.py", "test_card.py", "test_card_bundles.py", "test_proof.py"),
    *("test_states.py", "test_make_weights.py", "test_standard.py", "test_own_blocks.py"),
)

pytest_plugins = ["command_line", "hash_models", "host_kernels", "fake_card"]  # of tests/support

ROOT = Path(__file__).resolve().parent.parent
PAIR = ROOT / "engines" / "pycode"
PROMPTS = ROOT / "tests" / "data" / "prompts.jsonl"


def pytest_addoption(parser):
    """`--tier`: which tests run, see CONTRIBUTING.md; `--made`: what `make test-all` takes from `make test`."""
    parser.addoption("--tier", choices=TIERS, action="append", help="may be repeated (default: all but the soak)")
    parser.addoption("--strict-skips", action="store_true", help="fail if a test is skipped for a reason not in SKIPS")
    parser.addoption("--made", type=Path, help="where shared files are kept for another run of the same sources")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """No case of a property test is timed; in a soak those draw many more that do not say how many."""
    from hypothesis import settings

    settings.register_profile("usual", deadline=None)
    settings.register_profile("soak", max_examples=2000, deadline=None)
    settings.load_profile("soak" if soaks(config) else "usual")
    if soaks(config):
        config.option.timeout = 0  # of pytest-timeout


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """With `--strict-skips`, what is skipped because of a capability that a machine should have fails the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not session.config.getoption("--strict-skips") or reporter is None:
        return
    reasons = {str(report.longrepr[2]) for report in reporter.stats.get("skipped", ())}
    if unknown := sorted(reason for reason in reasons if not re.search("|".join(SKIPS), reason)):
        reporter.write_line(f"skipped, but tests/conftest.py does not list why: {'; '.join(unknown)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(config, items):
    """Keep a tier's tests, the long files first: processes that have one at a time end at about the same time then."""
    wanted = config.getoption("--tier") or TIERS[:-1]
    kept = [item for item in items if tier_of(item) in wanted]
    if soaks(config):
        drawn = {item for item in items if getattr(getattr(item, "obj", None), "is_hypothesis_test", False)}
        kept = [item for item in items if tier_of(item) == "soak" or item in drawn]
    staying = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in staying])
    items[:] = sorted(kept, key=lambda item: (*LONG, item.path.name).index(item.path.name))


def soaks(config):
    """Whether the soak tests run."""
    return "soak" in (config.getoption("--tier") or ())


def tier_of(item):
    """The longest of TIERS that a mark names: it may be for some parameters only, or for all `but` some."""
    name = item.name.partition("[")[2].removesuffix("]")
    for tier in reversed(TIERS):
        for mark in item.iter_markers(tier):  # of the function, and of its parameters
            only, but = mark.kwargs.get("only", (name,)), mark.kwargs.get("but", ())
            if name in only and name not in but:
                return tier
    return "fast"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where temporary folders are made, empty."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


@pytest.fixture
def logged(caplog):
    """What specbuild has logged: asyncio logs too, whenever another test's loop is collected."""
    return lambda: [record for record in caplog.records if record.name.partition(".")[0] == "specbuild"]


@pytest.fixture(scope="session")
def pair():
    """The folder of the reference pair, with `target` and `draft`."""
    return PAIR


@pytest.fixture(scope="session")
def once(tmp_path_factory, request):
    """`once(name, make)`: what `make(path)` writes, made by the first of a run's processes that asks for it."""
    root = tmp_path_factory.getbasetemp()
    kept = request.config.option.made or (root.parent if worker else root)
    return partial(made_once, kept.absolute())


@pytest.fixture(scope="session")
def bundle(once, build_shared):
    """The reference pair as a bundle; read it, do not change it."""
    pair = {"target": str(PAIR / "target"), "draft": str(PAIR / "draft")}
    return once("pycode.bundle", lambda path: build_shared(**pair, output=path))


@pytest.fixture(scope="module")
def four(bundle):
    """An engine of the reference pair for four sequences."""
    from specbuild.runtime import Engine

    with Engine.load(bundle, batch_size=4) as engine:
        yield engine


@pytest.fixture
def bundle_copy(bundle, tmp_path):
    """A bundle to damage."""
    return Path(shutil.copytree(bundle, tmp_path / "copy.bundle"))


@pytest.fixture(scope="session")
def prompts():
    """Real prompts the reference pair was not trained on, and awkward ones: Unicode, one token, a lone newline."""
    return [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="session")
def make_checkpoint():
    """`make_checkpoint(folder, **LlamaConfig fields)`: a random Llama of the reference pair's vocabulary."""

    def make(folder, **fields):
        import torch
        from tiny_models import SIZES
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        defaults = SIZES | {"vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 0}
        save = {"max_shard_size": fields.pop("max_shard_size")} if "max_shard_size" in fields else {}
        LlamaForCausalLM(LlamaConfig(**defaults | fields)).save_pretrained(folder, **save)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(PAIR / "target" / name, folder / name)
        return folder

    return make


@pytest.fixture(scope="session")
def shared_exports(once):
    """`with shared_exports():` builds take the portable graph of a model that any of a run's processes has exported."""

    @contextmanager
    def share():
        import onnx_ir as ir
        import torch

        from specbuild.builder import compiled_model
        from specbuild.builder.frontend.lazy_weights import of_model

        real = compiled_model.export

        def save(folder, graph):
            folder.mkdir()
            ir.save(graph, folder / "model.onnx", external_data="weights.bin")

        def export(model, layout, positions, capacity, taps=None, weights=None):
            sizes = positions, capacity, taps and taps.places
            what = type(model).__name__, model.config.to_json_string(), layout, sizes
            key = hashlib.sha256(repr(what).encode())
            tensors = {name: weight.read() for name, weight in (weights or of_model(model)).items()}
            tensors |= dict(model.named_buffers()) | (dict(taps.fuse.named_parameters()) if taps else {})
            for name, weight in tensors.items():
                key.update(name.encode() + weight.detach().contiguous().view(torch.uint8).numpy().tobytes())
            name = f"graph-{key.hexdigest()[:24]}"
            made = once(name, lambda folder: save(folder, real(model, layout, positions, capacity, taps, weights)))
            return ir.external_data.load_to_model(ir.load(made / "model.onnx"))  # it names no file but the bundle's

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled_model, "export", export)
            yield

    return share


@pytest.fixture
def quick_export(shared_exports):
    """Builds of a test share their exports with the run's others."""
    with shared_exports():
        yield


@pytest.fixture(scope="session")
def build_shared(shared_exports):
    """`build_shared(**BuildConfig fields)`: a build that shares its exports."""

    def make(**fields):
        from specbuild.builder.config.build_config import BuildConfig
        from specbuild.builder.pipeline import build

        with shared_exports():
            return build(BuildConfig(**fields))

    return make
