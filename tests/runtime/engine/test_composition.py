"""A bundle becomes a loop of the right graphs, drafter and limits, and a controller where it was tuned."""

import json
import logging
from contextlib import closing, nullcontext
from dataclasses import replace

import pytest
from device_requests import check_plain, prompt_of, request_of, run
from host_device import HostDevice, HostQueue
from made_up_chances import LARGE, record_of
from tiny_models import BUCKETS, VOCAB, executor

from specbuild.runtime import Bundle, Engine, Limits, SamplingParams
from specbuild.runtime.backends import placement
from specbuild.runtime.backends.cpu.machine import machine
from specbuild.runtime.bundle.bundle import file_record
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.engine.composition import cpu_loop, gpu_loop
from specbuild.runtime.engine.load_options import LoadOptions
from specbuild.runtime.errors import BundleError, OptionError
from specbuild.runtime.speculation.timing_table import FILE


@pytest.fixture(scope="module")
def opened(bundle):
    return Bundle.open(bundle)


@pytest.fixture
def load_with(opened):
    """`load_with(bundle, **load options)`: a loop that is closed when the test has ended."""
    loops = list[HostLoop]()

    def load(bundle=opened, **options):
        loop, controller = cpu_loop(bundle, LoadOptions(**{"threads": 1} | options))
        loops.append(loop)
        return loop, controller

    yield load
    for loop in loops:
        loop.close()


def model_of(loop):
    """The drafter that has a model, if any has."""
    assert loop.proposer
    return loop.proposer.model


def repeating(request_of):
    """A text that goes on as it did before, whose last token is the root."""
    sequence = request_of([5, 6, 7, 8] * 6, SamplingParams(max_new_tokens=99, speculation="chain:4"), vocab_size=4096)
    sequence.cached = len(sequence.tokens) - 1
    return sequence


@pytest.mark.slow
def test_lookup_alone_loads_no_draft(opened, load_with, request_of, tmp_path):
    """Nor one that is not there, nor one that the bundle was built without."""
    (tmp_path / "target").symlink_to(opened.folder / "target")
    alone = replace(opened.manifest, models={"target": opened.manifest.models["target"]})
    for manifest, drafter in ((opened.manifest, "ngram"), (alone, None)):
        loop, _ = load_with(Bundle(tmp_path, manifest), drafter=drafter)
        assert (model_of(loop), loop.draft_executor) == (None, None)
        assert loop.proposer
        assert loop.proposer.propose([repeating(request_of)])[0].tree.tokens == [8, 5, 6, 7, 8]


def table(**fields):
    """A timing table of this machine."""
    return record_of(LARGE) | {"machine": machine(1), "widest": "best:6"} | fields


@pytest.fixture
def tuned(opened, tmp_path):
    """`tuned(content, name)`: the bundle with a timing table."""

    def make(content):
        for model in ("target", "draft"):
            (tmp_path / model).symlink_to(opened.folder / model)
        (tmp_path / FILE).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return Bundle(
            tmp_path, replace(opened.manifest, files=opened.manifest.files | {FILE: file_record(tmp_path / FILE)})
        )

    return make


@pytest.mark.slow
def test_a_tuned_bundle_has_a_controller(opened, load_with, tuned, caplog, logged):
    """Which knows whether anything but the text drafts."""
    limits, bundle = Limits(min_expected_speedup=1.5), tuned(table())
    without = Bundle(bundle.folder, replace(bundle.manifest, models={"target": opened.manifest.models["target"]}))
    with caplog.at_level(logging.WARNING, "specbuild"):
        for given, drafter, drafts in ((bundle, None, True), (bundle, "ngram", False), (without, None, False)):
            _, controller = load_with(given, limits=limits, drafter=drafter)
            assert controller
            assert (controller.cost.table.widest, controller.has_model) == ("best:6", drafts)
    assert logged() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("threads", "change", "where"),
    [
        (2, {}, "with another thread count"),
        (1, {"machine": {"processor": "Z80", "threads": 1, "onnxruntime": "0.1"}}, "on another machine"),
    ],
)
def test_a_table_of_another_machine_is_used_with_a_warning(load_with, tuned, logged, threads, change, where):
    bundle = tuned(table(**change))
    _, controller = load_with(bundle, threads=threads)
    assert controller
    (message,) = [text for each in logged() if "was tuned" in (text := each.getMessage())]
    assert message.startswith(f"{bundle.folder} was tuned {where} (")
    assert message.endswith("): run specbuild tune")
    assert all(str(each) in message for each in (*controller.cost.table.machine.values(), *machine(threads).values()))


@pytest.mark.slow(but=("{",))
@pytest.mark.parametrize("content", [None, "{", table(schema=3), table(widest="best:99")])
def test_a_table_that_is_none_is_refused(load_with, tuned, content):
    bundle = tuned(content)
    if content is None:
        bundle.path(FILE).unlink()
    with pytest.raises(BundleError, match=r"timings\.json|timing table|tune again"):
        load_with(bundle)


def test_an_expectation_needs_a_timing_table(bundle):
    with pytest.raises(OptionError, match="min_expected_speedup needs a tuned bundle: run specbuild tune"):
        Engine.load(bundle, limits=Limits(min_expected_speedup=1.2))


@pytest.mark.slow
def test_the_text_is_asked_first_and_the_model_else_unless_told(load_with, request_of):
    for drafter, used in ((None, False), ("model", True)):
        loop, controller = load_with(drafter=drafter)
        assert controller is None
        assert loop.proposer
        (proposal,) = loop.proposer.propose([repeating(request_of)])
        assert used or proposal.tree.tokens == [8, 5, 6, 7, 8]
        assert loop.draft_executor
        assert (loop.draft_executor.seconds > 0) == used


@pytest.mark.slow
@pytest.mark.parametrize("draft", [{}, {"kind": "parallel", "mask_token": VOCAB - 1}], ids=["model", "parallel"])
def test_a_bundle_on_a_gpu_decodes_as_plainly(draft, host, manifest_of, write_bundle, tmp_path, monkeypatch):
    """Rounds follow each other on the device, unless the draft is of a kind whose trees the host grows."""
    device = HostDevice()
    models = [executor(name, device, tmp_path, 2) for name in ("target", "draft")]
    loaded = placement.Loaded(*models, HostQueue(host, device))
    monkeypatch.setattr(placement, "loaded", lambda *_: nullcontext(loaded))
    manifest = manifest_of({}, draft, backend="onnxruntime-cuda", buckets=list(BUCKETS), max_seq_len=48)
    loop, controller = gpu_loop(write_bundle(tmp_path / "bundle", manifest), LoadOptions(batch_size=2))
    with closing(loop):
        done = run(loop, [request_of(prompt_of(seed, 9), speculation="chain:3") for seed in range(3)])
        check_plain(tmp_path, done, eos=frozenset(manifest.eos_token_ids))
    assert controller is None
    assert all(each.metrics.speculative_decoding.num_draft_tokens for each in done)
    assert (loop.exactness is not None, device.turns > 0) == (True, not draft)
