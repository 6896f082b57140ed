"""What replicas are given, under Ray's names; wrong values and what does not go with Ray are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime.errors import OptionError
from specbuild.serve import ray_options
from specbuild.serve.drift import DriftOptions
from specbuild.serve.limits import BODY_BYTES
from specbuild.serve.options import ServeOptions
from specbuild.serve.ray_options import RayOptions


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_replicas": 0}, "num_replicas"),
        ({"autoscale": (3, 2)}, "autoscale"),
        ({"autoscale": (0, 0)}, "autoscale"),
        ({"autoscale": (-1, 2)}, "autoscale"),
        ({"num_cpus": -1.0}, "num_cpus"),
        ({"num_gpus": float("nan")}, "num_gpus"),
        ({"downscale_delay_s": -1.0}, "downscale_delay_s"),
        ({"max_ongoing_requests": 0}, "max_ongoing_requests"),
        ({"target_ongoing_requests": -2.0}, "target_ongoing_requests"),
        ({"max_queued_requests": -2}, "max_queued_requests"),
        ({"routing": "hash"}, "routing"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        RayOptions(**given)


def test_a_fixed_number_of_replicas() -> None:
    told = RayOptions(num_replicas=3, num_cpus=2.0).scaling(slots=4)
    assert told["num_replicas"] == 3
    assert "autoscaling_config" not in told
    assert told["max_ongoing_requests"] == 8
    assert told["ray_actor_options"] == {"num_cpus": 2.0, "num_gpus": 0.0}


def test_a_number_by_load_aims_at_full_slots() -> None:
    told = RayOptions(autoscale=(0, 5), downscale_delay_s=9.0, max_ongoing_requests=7).scaling(slots=4)
    assert told["autoscaling_config"] == {
        "min_replicas": 0,
        "max_replicas": 5,
        "target_ongoing_requests": 4.0,
        "downscale_delay_s": 9.0,
    }
    assert (told["num_replicas"], told["max_ongoing_requests"]) == (None, 7)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_options, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'specbuild-trt\[ray\]'"):
        RayOptions().check(ServeOptions())


def test_a_cluster_that_is_started_here_streams_by_grpc_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_options, "find_spec", lambda name: name)
    monkeypatch.setattr(ray_options.os, "environ", told := {"RAY_USAGE_STATS_ENABLED": "1"})
    RayOptions().prepare(ServeOptions())
    assert (told["RAY_USAGE_STATS_ENABLED"], told["RAY_SERVE_USE_GRPC_BY_DEFAULT"]) == ("1", "1")
    assert int(told["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"]) > BODY_BYTES
    with pytest.raises(OptionError, match="--uds"):
        RayOptions().prepare(ServeOptions(uds=Path("socket")))


def test_what_is_of_one_server_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray_options, "find_spec", lambda name: name)
    RayOptions().check(ServeOptions())
    with pytest.raises(OptionError, match="--drift"):
        RayOptions().check(ServeOptions(drift=DriftOptions(reference=tmp_path / "reference.json")))
    with pytest.raises(OptionError, match="--uds"):
        RayOptions().check(ServeOptions(uds=tmp_path / "socket"))
