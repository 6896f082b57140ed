"""The canary's routes and metrics, over a real engine: both arms give one text, and orders are followed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ended
import pytest
import yaml
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from serving import Server

from specbuild.serve.arms import CanaryOptions
from specbuild.serve.canary_routes import PREFIX

ASKED: dict[str, Any] = {"prompt": "def main(", "max_tokens": 12, "temperature": 0.8, "seed": 3}


@pytest.fixture
def client(make_client: Callable[..., TestClient]) -> TestClient:
    given = {"candidate": "speculation=chain:2", "baseline": "speculation=off", "weight": 50.0}
    client = make_client(canary=CanaryOptions(**given))  # type: ignore[arg-type]
    client.service.canary.draws.salt = "salt"  # type: ignore[attr-defined]
    return client


def gauges(client: TestClient) -> dict[str, float]:
    """By name and the labels beside the model's."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    found = [sample for family in families for sample in family.samples if sample.name.startswith(PREFIX)]
    assert {sample.labels["model_name"] for sample in found} == {"pycode"}
    return {
        " ".join(
            [each.name.removeprefix(PREFIX), *(v for name, v in each.labels.items() if name != "model_name")]
        ): each.value
        for each in found
    }


def test_both_arms_give_one_text_and_are_counted(client: TestClient) -> None:
    answers = [client.post("/v1/completions", json=ASKED | {"stream": False}).json() for _ in range(8)]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    speculated = [answer["metrics"]["speculative_decoding"]["num_spec_steps"] > 0 for answer in answers]
    ended.settle(client.service.canary)  # type: ignore[attr-defined]
    view = client.get("/canary").json()
    assert view["requests"] == {"baseline": 8 - sum(speculated), "candidate": sum(speculated)}
    assert 0 < sum(speculated) < 8
    ttft = view["evidence"][0]
    assert (ttft["metric"], ttft["n"]) == ("ttft", [8 - sum(speculated), sum(speculated)])
    assert view["verdict"]["kind"] == "hold"
    found = gauges(client)
    assert found["weight"] == 50
    assert found["requests_total candidate"] == sum(speculated)
    assert found["verdict hold"] == 1
    assert found["evidence tokens"] > 0


def test_a_request_that_fails_is_told_with_its_status(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    canary, statuses = client.service.canary, list[int]()  # type: ignore[attr-defined]
    ended = type(canary).ended
    monkeypatch.setattr(type(canary), "ended", lambda self, it: (statuses.append(it.status), ended(self, it)))
    assert client.post("/v1/completions", json=ASKED | {"max_tokens": 99999}).status_code == 400
    assert client.post("/v1/completions", json=ASKED | {"stream": True}).status_code == 200
    assert statuses == [400, 200]


def test_orders(client: TestClient) -> None:
    for order, phase, weight in (
        ("pause", "paused", 50),
        ("resume", "running", 50),
        ("promote", "promoted", 100),
        ("rollback", "rolled back", 0),
    ):
        answer = client.post(f"/canary/{order}")
        assert (answer.status_code, answer.json()["phase"], answer.json()["weight"]) == (200, phase, weight)
        assert gauges(client)["weight"] == weight
    assert client.post("/canary/resume").status_code == 400
    assert client.post("/canary/delete").status_code == 404
    assert client.get("/canary/promote").status_code == 405


def test_a_server_without_one_has_none_and_keys_are_asked_for(make_client: Callable[..., TestClient]) -> None:
    assert make_client().get("/canary").status_code == 404
    keyed = make_client(canary=CanaryOptions(candidate="speculation=off"), api_keys=("k",))
    assert keyed.get("/canary").status_code == keyed.post("/canary/promote").status_code == 401
    assert keyed.get("/canary", headers={"Authorization": "Bearer k"}).status_code == 200


@pytest.mark.slow
def test_a_killed_server_goes_on_with_its_canary(bundle: Path, tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    flags = {"port": 0, "canary": "speculation=chain:2", "canary-weight": 50, "canary-ignore": ["ttft"]}
    config.write_text(yaml.safe_dump(flags | {"canary-state": str(tmp_path / "canary.json")}))
    with Server(str(bundle), "--config", str(config)) as server, server.client() as client:
        for seed in range(12):
            assert client.post("/v1/completions", json=ASKED | {"seed": seed}).status_code == 200
        for _ in range(100):
            view = client.get("/canary").json()
            if sum(view["evidence"][0]["n"]) == 12:
                break
            time.sleep(0.05)
        paused = client.post("/canary/pause").json()
        server.process.kill()
    assert [each["metric"] for each in paused["evidence"]][:2] == ["tpot", "e2el"]
    assert sum(paused["requests"].values()) == sum(paused["evidence"][0]["n"]) == 12
    with Server(str(bundle), "--config", str(config)) as server, server.client() as client:
        assert client.get("/canary").json() == paused
