"""Options: everything wrong with them is one line before anything is loaded, which names the option or its value."""

from pathlib import Path

import pytest
from data_files import table

from specbuild.runtime.errors import OptionError, shown
from specbuild.serve.canary.assignment import CanaryOptions
from specbuild.serve.cost.options import CostOptions
from specbuild.serve.options import ServeOptions
from specbuild.serve.output_parsers.reading import Reading
from specbuild.serve.ray import options as ray_options
from specbuild.serve.ray.options import RayOptions

BASE = {
    CanaryOptions: {"candidate": "speculation=auto"},
    CostOptions: {"ledger": Path("l.jsonl")},
}
FILES = ("ssl_certfile", "shadow_dir", "text_sample")
KINDS = {each.__name__: each for each in (ServeOptions, *BASE, RayOptions, Reading)}
WRONG = [(kind, name, value) for kind, fields in table("wrong_options.json").items() for name, value in fields.items()]
WRONG.append(("CostOptions", "owner", [["a=" + "b" * 257], [f"a{n}=b" for n in range(1000)]]))


@pytest.mark.parametrize(("kind", "name", "values"), WRONG)
def test_what_is_refused(kind, name, values):
    for value in values:
        given = tuple(value) if isinstance(value, list) else Path(value) if name in FILES else value
        with pytest.raises(OptionError) as refused:
            KINDS[kind](**BASE.get(KINDS[kind], {}) | {name: given})
        line = str(refused.value)
        plain = line.lower().replace("-", "_").replace(" ", "_")
        texts = given if isinstance(given, tuple) else (given,)
        assert name.rstrip("s") in plain or any(shown(each) in line or str(each) in line for each in texts), line
        assert "\n" not in line


@pytest.mark.parametrize("given", [{"ledger_rotate": "day"}, {"owner": ("a=b",)}])
def test_a_ledgers_options_need_one(given):
    with pytest.raises(OptionError, match="--ledger"):
        CostOptions(**given)


def test_a_price_a_size_and_labels():
    found = CostOptions(**BASE[CostOptions], price_per_hour=7.2, ledger_rotate="100MB", owner=("team=a=b", "x=y"))
    assert (found.per_second, found.max_bytes, found.labels) == (0.002, 100_000_000, {"team": "a=b", "x": "y"})
    assert (CostOptions().per_second, CostOptions(**BASE[CostOptions], ledger_rotate="day").max_bytes) == (None, None)


def test_replicas_are_a_number_or_go_by_load():
    fixed = RayOptions(num_replicas=3, num_cpus=2.0).scaling(slots=4)
    assert (fixed["num_replicas"], fixed["max_ongoing_requests"], "autoscaling_config" in fixed) == (3, 8, False)
    assert fixed["ray_actor_options"] == {"num_cpus": 2.0, "num_gpus": 0.0}
    told = RayOptions(autoscale=(0, 5), downscale_delay_s=9.0, max_ongoing_requests=7).scaling(slots=4)
    wanted = {"min_replicas": 0, "max_replicas": 5, "target_ongoing_requests": 4.0, "downscale_delay_s": 9.0}
    assert (told["num_replicas"], told["max_ongoing_requests"], told["autoscaling_config"]) == (None, 7, wanted)


def test_ray_is_to_be_there_and_takes_no_option_of_one_server(monkeypatch):
    monkeypatch.setattr(ray_options, "find_spec", lambda name: name)
    for name, given in (("--text-sample", {"text_sample": Path("file")}), ("--uds", {"uds": Path("s")})):
        with pytest.raises(OptionError, match=name):
            RayOptions().check(ServeOptions(**given))
    monkeypatch.setattr(ray_options.os, "environ", told := {"RAY_USAGE_STATS_ENABLED": "1"})
    RayOptions().prepare(ServeOptions())
    assert (told["RAY_USAGE_STATS_ENABLED"], told["RAY_SERVE_USE_GRPC_BY_DEFAULT"]) == ("1", "1")
    assert int(told["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"]) > 8 << 20
    monkeypatch.setattr(ray_options, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'specbuild-trt\[ray\]'"):
        RayOptions().check(ServeOptions())
