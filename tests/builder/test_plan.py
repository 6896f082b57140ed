"""The plan of a build: what each precision takes, why, what is missing here, and what would fit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.engine_options import EngineOptions
from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.plan import Plan, Room, check_room
from specbuild.builder.units import in_bytes
from specbuild.runtime.errors import ExecutionError, OptionError, OutputError

MUCH = 1 << 50


@pytest.fixture(scope="module")
def target(make_checkpoint, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("planned") / "target", hidden_size=64, intermediate_size=128)


@pytest.fixture(scope="module")
def plan(target):
    return Plan.of(BuildConfig(str(target), Path("nowhere/b")))


def test_a_dry_run_says_what_would_be_made(pair, tmp_path):
    config = BuildConfig(
        str(pair / "target"),
        tmp_path / "b",
        draft=str(pair / "draft"),
        backend="tensorrt-rtx",
        precision="bf16",
        buckets=(1, 2, 8),
        tree="chain:3",
        engine=EngineOptions(arch=("89",)),
    )
    plan = Plan.of(config)
    found = plan.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["models"]["draft"]["source"] == str(pair / "draft")
    assert (found["models"]["draft"]["precision"], found["models"]["draft"]["layers"]) == ("bf16", 2)
    assert list(found["profiles"]) == ["nodes1", "nodes2", "nodes8", "prompt"]
    assert (found["engine_architectures"], found["buckets"]) == (["89"], [1, 2, 8])
    assert list(tmp_path.iterdir()) == []
    plan.check()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "letter.txt").touch()
    for force in (False, True):  # what is no bundle is not replaced, which is said behind the plan
        refused = replace(plan, config=replace(config, force=force))
        with pytest.raises(OutputError) as caught:
            refused.check()
        assert refused.to_dict()["refusal"] == str(caught.value)


def test_every_precision_has_its_cost(plan):
    """The one that was asked for comes first; `keep` is for a GGUF file."""
    costs = plan.costs()["target"]
    assert list(costs) == ["fp32", "int8", "int4"]
    assert costs["fp32"].bundle > 2 * costs["int8"].bundle > 2 * costs["int4"].bundle
    for cost in costs.values():
        assert cost.run_memory > cost.bundle
        assert cost.build_memory == sum(cost.build_memory_by_use.values())


def test_time_grows_with_the_model_and_with_what_is_calibrated(plan, pair):
    costs = plan.costs()["target"]
    seconds = [costs[precision].build_seconds or 0 for precision in ("fp32", "int8", "int4")]
    assert 0 < seconds[0] < seconds[1] < seconds[2]
    times = [plan.to_dict()["build_seconds"]]
    for precision in ("int8", "auto"):
        times.append(Plan.of(replace(plan.config, precision=precision)).to_dict()["build_seconds"])
    assert times == sorted(set(times))
    alone = BuildConfig(str(pair / "target"), Path("nowhere/b"))
    both = replace(alone, draft=str(pair / "draft"))
    assert Plan.of(both).to_dict()["build_seconds"] > Plan.of(alone).to_dict()["build_seconds"]


def test_more_and_longer_texts_take_more_memory_to_run(plan):
    more = Plan.of(replace(plan.config, max_batch_size=2 * plan.config.max_batch_size))
    shorter = Plan.of(replace(plan.config, max_seq_len=plan.sources.max_seq_len // 2))
    sizes = [each.costs()["target"]["fp32"].run_memory for each in (shorter, plan, more)]
    assert sizes == sorted(set(sizes))


def test_a_pairs_check_has_both_models(pair):
    alone = BuildConfig(str(pair / "target"), Path("nowhere/b"))
    both = Plan.of(replace(alone, draft=str(pair / "draft")))
    more = both.sources.memory_bytes - Plan.of(alone).sources.memory_bytes
    assert more >= both.costs()["draft"]["fp32"].bundle


@pytest.mark.nightly
def test_a_bundles_weights_take_what_the_plan_says(pair, build_shared, tmp_path):
    """Within a tenth, but for tables of positions, which all precisions have alike."""
    planned, written = dict[str, int](), dict[str, int]()
    for precision in ("fp32", "int8", "int4"):
        output = tmp_path / precision
        build_shared(target=str(pair / "target"), output=output, precision=precision)
        written[precision] = sum(path.stat().st_size for path in (output / "target").glob("*.bin"))
        config = BuildConfig(str(pair / "target"), tmp_path / "b", precision=precision)
        planned[precision] = Plan.of(config).costs()["target"][precision].bundle
    for narrow in ("int8", "int4"):
        saved = planned["fp32"] - planned[narrow]
        assert saved == pytest.approx(written["fp32"] - written[narrow], rel=0.1)


def test_what_a_name_is_given_counts(plan):
    mixed = replace(plan.config, quantize=QuantizeOptions(output_tensor_type="int8"))
    sizes = [Plan.of(config).costs()["target"]["fp32"].bundle for config in (plan.config, mixed)]
    assert sizes[1] < sizes[0]


def test_a_bundle_for_gpus_is_in_16_bits_and_says_what_lacks(target, plan, monkeypatch):
    def refuse():
        raise ExecutionError("there is no driver")

    monkeypatch.setattr("specbuild.builder.machine.check_driver", refuse)
    native = EngineOptions(attention="native")
    asked = {"backend": "onnxruntime-cuda", "engine": native, "cuda_arch": ("none",)}
    gpu = Plan.of(BuildConfig(str(target), Path("nowhere/b"), **asked))
    costs = gpu.costs()["target"]
    assert list(costs) == ["fp16", "bf16", "fp32"]
    assert costs["fp16"].bundle == pytest.approx(plan.costs()["target"]["fp32"].bundle / 2, rel=0.01)
    found = gpu.to_dict()
    assert found["lacks_to_build"] == []
    assert "there is no driver" in found["lacks_to_run"]
    assert found["refusal"] is None


def test_a_refusal_names_what_would_fit(plan):
    """The widest precision that does; where none does, the rest of the advice stands."""
    config, sources = plan.config, plan.sources
    assert check_room(config, sources, Room(MUCH, MUCH, MUCH)).memory == plan.costs()["target"]["fp32"].build_memory
    with pytest.raises(
        OutputError, match=r"^there are 0 bytes free for nowhere/b, which may take \d+ MB: free some, or give"
    ):
        check_room(config, sources, Room(MUCH, MUCH, 0))
    with pytest.raises(OutputError, match=r": --precision int8 takes .* of disk, or free some, or give another --out"):
        check_room(config, sources, Room(MUCH, MUCH, sources.bundle_bytes - 1))
    with pytest.raises(
        OptionError, match=r"^the build takes about \d+ MB of memory, this machine has 1.0 MB: build on"
    ):
        check_room(config, sources, Room(1_000_000, MUCH, MUCH))


def test_what_needs_room_in_tmpdir_is_answered_with_what_needs_none(plan):
    best = Plan.of(replace(plan.config, precision="best:size"))
    room = Room(MUCH, best.sources.scratch_bytes - 1, MUCH)
    with pytest.raises(OptionError, match=r"free: --precision fp32 takes .* of disk, or set TMPDIR to another disk$"):
        check_room(best.config, best.sources, room)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (9_960_000, "10 MB"), (1_900_000_000, "1.9 GB")],
)
def test_bytes_in_words(count, words):
    assert in_bytes(count) == words


@given(st.integers(0, 10**16))
def test_bytes_in_words_are_near_the_number(count):
    number, unit = in_bytes(count).split()
    scale = 1000 ** ("bytes", "kB", "MB", "GB", "TB", "PB").index(unit)
    assert abs(float(number) * scale - count) <= 0.06 * count
    assert len(number) <= 4 or unit == "PB"
