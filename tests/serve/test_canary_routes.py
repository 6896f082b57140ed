"""The canary's routes and metrics, over a real engine: both arms give one text, and orders are followed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ended
import pytest
import yaml
from route_client import COMPLETIONS, RouteClient
from serving import Server, until

from specbuild.serve.arms import CanaryOptions

Make = Callable[..., RouteClient]
SAMPLED: dict[str, Any] = {"prompt": "def main(", "max_tokens": 12, "temperature": 0.8, "seed": 3}


@pytest.fixture
def client(make_client: Make) -> RouteClient:
    options = CanaryOptions(candidate="speculation=chain:2", baseline="speculation=off", weight=50.0)
    client = make_client(canary=options)
    client.service.canary.draws.salt = "salt"  # type: ignore[union-attr]
    return client


def gauge(client: RouteClient, name: str, label: str = "") -> float:
    (value,) = [
        each
        for series, each in client.series().items()
        if series.startswith(f"specbuild:canary_{name}{{") and label in series
    ]
    return value


@pytest.mark.slow
def test_both_arms_give_one_text_and_are_counted(client: RouteClient) -> None:
    answers = [client.ask(**SAMPLED) for _ in range(8)]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    drafted = sum(answer["metrics"]["speculative_decoding"]["num_spec_steps"] > 0 for answer in answers)
    ended.settle(client.service.canary)
    view, counts = client.get("/canary").json(), {"baseline": 8 - drafted, "candidate": drafted}
    assert 0 < drafted < 8
    assert (view["requests"], view["verdict"]["kind"]) == (counts, "hold")
    assert (view["evidence"][0]["metric"], view["evidence"][0]["n"]) == ("ttft", [8 - drafted, drafted])
    assert {arm: gauge(client, "requests_total", f'arm="{arm}"') for arm in counts} == counts
    assert gauge(client, "verdict", 'verdict="hold"') == 1
    assert gauge(client, "weight") == 50


def test_orders(client: RouteClient) -> None:
    for order, phase, weight in (
        *(("pause", "paused", 50), ("resume", "running", 50), ("promote", "promoted", 100)),
        ("rollback", "rolled back", 0),
    ):
        told = client.ask(f"/canary/{order}")
        assert (told["phase"], told["weight"], gauge(client, "weight")) == (phase, weight, weight)
    assert client.post("/canary/resume").status_code == 400
    assert client.post("/canary/delete").status_code == 404


@pytest.mark.nightly
def test_a_killed_server_goes_on_with_its_canary(bundle: Path, tmp_path: Path) -> None:
    """One that shadows its texts and has an objective, too."""
    config = tmp_path / "serve.yaml"
    flags = {"port": 0, "canary": "speculation=chain:2", "canary-weight": 50, "canary-ignore": ["ttft"], "shadow": 1}
    config.write_text(yaml.safe_dump(flags | {"canary-state": str(tmp_path / "canary.json"), "slo": ["ttft=30"]}))
    with Server(str(bundle), "--config", str(config)) as server, server.client() as client:
        for seed in range(12):
            assert client.post(COMPLETIONS, json=SAMPLED | {"seed": seed}).status_code == 200
        until(lambda: sum(client.get("/canary").json()["evidence"][0]["n"]) == 12)
        until(lambda: 'shadows_total{model_name="pycode",outcome="equal"} 12.0' in client.get("/metrics").text)
        assert 'slo_attainment{model_name="pycode",objective="ttft_p99"} 1.0' in client.get("/metrics").text
        paused = client.post("/canary/pause").json()
        server.process.kill()
    assert paused["evidence"][0]["metric"] == "tpot"
    with Server(str(bundle), "--config", str(config)) as server, server.client() as client:
        assert client.get("/canary").json() == paused
