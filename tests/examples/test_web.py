"""The web application: texts as they are decoded, errors before a response begins, a slot that is free again."""

import json

import pytest
from asgi import call, part, scope_of
from serving import until
from starlette.testclient import TestClient

from specbuild.runtime import AsyncEngine, Engine, SamplingParams


@pytest.fixture
def app(example, bundle, monkeypatch):
    monkeypatch.setenv("BUNDLE", str(bundle))
    return example("web").app


def test_a_text_is_that_of_the_engine(app, bundle):
    with Engine.load(bundle) as engine:
        (want,) = engine.generate("def main(", SamplingParams(max_new_tokens=20))
    with (
        TestClient(app) as client,
        client.stream("POST", "/generate", json={"prompt": "def main(", "max_new_tokens": 20}) as response,
    ):
        assert response.read().decode() == want.text


def test_what_cannot_run_is_refused_in_one_line(app):
    with TestClient(app) as client:
        response = client.post("/generate", json={"prompt": ""})
        assert response.status_code == 400
        assert "empty" in response.json()["error"]
        assert client.post("/generate", json={}).status_code == 422


def test_a_client_that_leaves_ends_its_text(app, bundle):
    body = json.dumps({"prompt": "def main(", "max_new_tokens": 900}).encode()
    results = []
    with Engine.load(bundle, on_finish=results.append) as engine:
        scope = scope_of("POST", "/generate", content_type="application/json") | {
            "state": {"engine": AsyncEngine(engine)}
        }
        call(app, scope, [part(body)], leaves=True)
        until(lambda: results)
    assert [result.finish_reason for result in results] == ["cancelled"]
