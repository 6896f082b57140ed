"""Options: everything wrong with them is one line before anything is loaded, which names the option or its value."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime.errors import OptionError, shown
from specbuild.serve import ray_options
from specbuild.serve.arms import CanaryOptions
from specbuild.serve.cost_options import MAX_OWNER, CostOptions
from specbuild.serve.drift import DriftOptions
from specbuild.serve.limits import BODY_BYTES
from specbuild.serve.options import ServeOptions
from specbuild.serve.ray_options import RayOptions
from specbuild.serve.turns.reading import Reading

BASE: dict[Any, dict[str, Any]] = {
    CanaryOptions: {"candidate": "speculation=auto"},
    CostOptions: {"ledger": Path("l.jsonl")},
    DriftOptions: {"reference": Path("file")},
}
NONE, NO_NUMBER = Path("no/such/file"), (-1.0, math.nan, math.inf)
WRONG: dict[Any, dict[str, tuple[Any, ...]]] = {
    ServeOptions: {
        **{"port": (-1, 70000), "ssl_certfile": (NONE,), "api_keys": (("",), ("a\nb",), ("ä",)), "root_path": ("llm",)},
        **{"shutdown_timeout": NO_NUMBER, "request_timeout": (0, *NO_NUMBER), "max_waiting": (0,), "shadow": NO_NUMBER},
        **{
            "max_queued_tokens": (0,),
            "metrics_prefix": ("ours:",),
            "spec_metrics": ("all",),
            "extra_fields": ("keep",),
        },
        **{"reasoning_end": ("",), "shadow_dir": (NONE, Path()), "shadow_action": ("off",), "health_route": ("up",)},
        "shadow_keep_prompts": (True,),
    },
    CanaryOptions: {
        **{"candidate": ("chain:4", "model=", "asked"), "baseline": ("off", "speculation=auto"), "interval": (0,)},
        **{"weight": (0, 60, math.nan), "max_weight": (5, 100), "step_weight": (-1, 101), "alpha": (0, 1)},
        **{"margin": (0, 11), "action": ("undo",), "ignore": (("colour",),), "sticky": ("user",), "state": (NONE,)},
        "objective": (
            *(
                ("errors=0",),
                ("cut=1",),
                ("errors=nan",),
                ("invalid=few",),
                ("errors=0.1,errors=0.2",),
                ("colour=1",),
                ("",),
            ),
        ),
    },
    CostOptions: {
        **{"price_per_hour": NO_NUMBER, "currency": ("usd", "EURO"), "ledger_rotate": ("weekly", "0MB")},
        "owner": (
            *(("team",), ("=b",), ("a=",), ("a=b", "a=c"), ("a=" + "b" * 257,)),
            tuple(f"a{n}=b" for n in range(MAX_OWNER + 1)),
        ),
    },
    DriftOptions: {
        "size": (10,),
        "score": NO_NUMBER,
        "sample_share": NO_NUMBER,
        "reference": (NONE,),
        "sample": (NONE,),
    },
    RayOptions: {
        **{"num_replicas": (0,), "autoscale": ((3, 2), (0, 0), (-1, 2)), "num_cpus": (-1.0,), "num_gpus": (math.nan,)},
        **{"downscale_delay_s": (-1.0,), "max_ongoing_requests": (0,), "target_ongoing_requests": (-2.0,)},
        **{"max_queued_requests": (-2,), "routing": ("hash",)},
    },
    Reading: {"tool_call_parser": ("x",), "reasoning_parser": ("x",)},
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, fields in WRONG.items() for name in fields])
def test_what_is_refused(kind: Any, name: str) -> None:
    for value in WRONG[kind][name]:
        with pytest.raises(OptionError) as refused:
            kind(**BASE.get(kind, {}) | {name: value})
        line = str(refused.value)
        plain = line.lower().replace("-", "_").replace(" ", "_")
        texts = value if isinstance(value, tuple) else (value,)
        assert name.rstrip("s") in plain or any(shown(each) in line or str(each) in line for each in texts), line
        assert "\n" not in line


@pytest.mark.parametrize("given", [{"ledger_rotate": "day"}, {"owner": ("a=b",)}])
def test_a_ledgers_options_need_one(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="--ledger"):
        CostOptions(**given)


def test_a_price_a_size_and_labels() -> None:
    found = CostOptions(**BASE[CostOptions], price_per_hour=7.2, ledger_rotate="100MB", owner=("team=a=b", "x=y"))
    assert (found.per_second, found.max_bytes, found.labels) == (0.002, 100_000_000, {"team": "a=b", "x": "y"})
    assert (CostOptions().per_second, CostOptions(**BASE[CostOptions], ledger_rotate="day").max_bytes) == (None, None)


def test_replicas_are_a_number_or_go_by_load() -> None:
    fixed = RayOptions(num_replicas=3, num_cpus=2.0).scaling(slots=4)
    assert (fixed["num_replicas"], fixed["max_ongoing_requests"], "autoscaling_config" in fixed) == (3, 8, False)
    assert fixed["ray_actor_options"] == {"num_cpus": 2.0, "num_gpus": 0.0}
    told = RayOptions(autoscale=(0, 5), downscale_delay_s=9.0, max_ongoing_requests=7).scaling(slots=4)
    wanted = {"min_replicas": 0, "max_replicas": 5, "target_ongoing_requests": 4.0, "downscale_delay_s": 9.0}
    assert (told["num_replicas"], told["max_ongoing_requests"], told["autoscaling_config"]) == (None, 7, wanted)


def test_ray_is_to_be_there_and_takes_no_option_of_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_options, "find_spec", lambda name: name)
    for name, given in (("--drift", {"drift": DriftOptions(reference=Path("file"))}), ("--uds", {"uds": Path("s")})):
        with pytest.raises(OptionError, match=name):
            RayOptions().check(ServeOptions(**given))  # type: ignore[arg-type]
    monkeypatch.setattr(ray_options.os, "environ", told := {"RAY_USAGE_STATS_ENABLED": "1"})
    RayOptions().prepare(ServeOptions())
    assert (told["RAY_USAGE_STATS_ENABLED"], told["RAY_SERVE_USE_GRPC_BY_DEFAULT"]) == ("1", "1")
    assert int(told["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"]) > BODY_BYTES
    monkeypatch.setattr(ray_options, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'specbuild-trt\[ray\]'"):
        RayOptions().check(ServeOptions())
