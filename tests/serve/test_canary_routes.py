"""The canary's routes and metrics, over a real engine: both arms give one text, and orders are followed."""

import ended
import pytest
from fastapi.testclient import TestClient

from specbuild.serve.canary.assignment import CanaryOptions
from specbuild.serve.http.app import make_operators_app

SAMPLED = {"prompt": "def main(", "max_tokens": 12, "temperature": 0.8, "seed": 3}


@pytest.fixture
def client(make_client):
    options = CanaryOptions(candidate="speculation=chain:2", baseline="speculation=off", weight=50.0)
    client = make_client(canary=options, api_keys=("k",), admin_key="a", admin_port=0)
    client.service.canary.draws.salt = "salt"
    client.headers["Authorization"] = "Bearer k"
    return client


@pytest.fixture
def operator(client, log):
    """A client of the operators' listener."""
    app = make_operators_app(client.service, log)
    return TestClient(app, headers={"Authorization": "Bearer a"}, raise_server_exceptions=False)


def gauge(client, name, label=""):
    (value,) = [
        each
        for series, each in client.series().items()
        if series.startswith(f"specbuild:canary_{name}{{") and label in series
    ]
    return value


@pytest.mark.slow
def test_both_arms_give_one_text_and_are_counted(client, operator):
    answers = [client.ask(**SAMPLED) for _ in range(8)]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    drafted = sum(answer["metrics"]["speculative_decoding"]["num_spec_steps"] > 0 for answer in answers)
    ended.settle(client.service.canary)
    view, counts = operator.get("/canary").json(), {"baseline": 8 - drafted, "candidate": drafted}
    assert 0 < drafted < 8
    assert (view["requests"], view["verdict"]["kind"]) == (counts, "hold")
    assert (view["evidence"][0]["metric"], view["evidence"][0]["n"]) == ("ttft", [8 - drafted, drafted])
    assert {arm: gauge(client, "requests_total", f'arm="{arm}"') for arm in counts} == counts
    assert gauge(client, "verdict", 'verdict="hold"') == 1
    assert gauge(client, "weight") == 50


def test_orders(client, operator):
    for order, phase, weight in (
        *(("pause", "paused", 50), ("resume", "running", 50), ("promote", "promoted", 100)),
        ("rollback", "rolled back", 0),
    ):
        told = operator.post(f"/canary/{order}").json()
        assert (told["phase"], told["weight"], gauge(client, "weight")) == (phase, weight, weight)
    assert operator.post("/canary/resume").status_code == 400
    assert operator.post("/canary/delete").status_code == 404


def test_a_tenant_and_a_web_page_give_no_orders(client, operator):
    """Those are the operator's, by a key and a listener of their own."""
    assert [client.post("/canary/promote", headers={"Authorization": f"Bearer {key}"}).status_code for key in "ka"] == [
        401,
        404,
    ]
    for key in ("k", ""):
        assert operator.post("/canary/promote", headers={"Authorization": f"Bearer {key}"}).status_code == 401
        assert operator.get("/canary", headers={"Authorization": f"Bearer {key}"}).status_code == 401
    assert operator.get("/canary").json()["phase"] == "running"
    assert {
        operator.get(path, headers={"Authorization": ""}).status_code for path in ("/metrics", "/health", "/load")
    } == {200}
    assert operator.post("/v1/completions", json=SAMPLED).status_code == 404
