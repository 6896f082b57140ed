"""The canary's routes and metrics, over a real engine: both arms give one text, and orders are followed."""

import ended
import pytest
from fastapi.testclient import TestClient

from specbuild.serve.canary.assignment import CanaryOptions
from specbuild.serve.http.app import make_app, make_operators_app

SAMPLED = {"prompt": "def main(", "max_tokens": 12, "temperature": 0.8, "seed": 3}


@pytest.fixture
def client(make_client):
    options = CanaryOptions(candidate="speculation=chain:2", weight=50.0)
    client = make_client(canary=options, api_keys=("k",), admin_key="a", admin_port=0)
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
def test_both_arms_give_one_text_and_are_counted_and_compared(client, operator):
    replies = []
    while 0 in client.service.canary.requests or len(replies) < 8:
        replies.append(client.ask(**SAMPLED))
    assert len({reply["choices"][0]["text"] for reply in replies}) == 1
    drafted = sum(reply["metrics"]["speculative_decoding"]["num_spec_steps"] > 0 for reply in replies)
    ended.settle(client.service.canary)
    ended.settle(client.service.oracle)
    view, counts = operator.get("/canary").json(), {"baseline": len(replies) - drafted, "candidate": drafted}
    assert view["requests"] == counts
    assert view["texts"] == {"equal": drafted, "different": 0}
    assert (view["evidence"][0]["metric"], view["evidence"][0]["n"]) == ("ttft", [*counts.values()])
    assert {arm: gauge(client, "requests_total", f'arm="{arm}"') for arm in counts} == counts
    assert gauge(client, "texts_total", 'outcome="equal"') == drafted
    assert (gauge(client, "harmful"), gauge(client, "weight")) == (0, 50)


def test_orders(client, operator):
    for order, phase, weight in (
        *(("promote", "promoted", 100), ("rollback", "rolled back", 0), ("restart", "running", 50)),
    ):
        view = operator.post(f"/canary/{order}").json()
        assert (view["phase"], view["weight"], gauge(client, "weight")) == (phase, weight, weight)
    assert operator.post("/canary/delete").status_code == 404


def test_a_tenant_and_a_web_page_give_no_orders(client, operator, log):
    """Those are the operator's, by a key and a listener of their own."""
    assert [client.post("/canary/promote", headers={"Authorization": f"Bearer {key}"}).status_code for key in "ka"] == [
        401,
        404,
    ]
    for key in ("k", ""):
        assert operator.post("/canary/promote", headers={"Authorization": f"Bearer {key}"}).status_code == 401
        assert operator.get("/canary", headers={"Authorization": f"Bearer {key}"}).status_code == 401
    assert operator.get("/canary").json()["phase"] == "running"
    replica = TestClient(make_app(client.service, log, operators=True), headers=operator.headers)
    assert replica.get("/canary").json()["phase"] == "running"
    assert {
        operator.get(path, headers={"Authorization": ""}).status_code for path in ("/metrics", "/health", "/load")
    } == {200}
    assert operator.post("/v1/completions", json=SAMPLED).status_code == 404
