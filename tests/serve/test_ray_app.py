"""Replicas and the application; a cluster that runs is the soak's alone."""

import asyncio
import json
import signal
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed")

from ray.serve import Application
from serving import Server

from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.errors import BundleError, ExecutionError, OptionError
from specbuild.serve.options import ServeOptions
from specbuild.serve.ray import application as ray_app
from specbuild.serve.ray.application import Replica
from specbuild.serve.ray.front import scope_of
from specbuild.serve.ray.prefixes import chain
from specbuild.serve.ray.router import Hint

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": []}
START = {"type": "http.response.start", "status": 200, "headers": []}
NOTHING = Hint([], 0, 0)


def replica(app, *models):
    return Replica("r1", app, models)


def called(app, body=b""):
    """The batches of messages of a call."""

    async def run():
        return [each async for each in replica(app).call(SCOPE, body, NOTHING)]

    return asyncio.run(run())


def part(body, more=True):
    return {"type": "http.response.body", "body": body, "more_body": more}


def test_messages_come_as_they_are_made_and_the_first_names_the_replica():
    async def app(scope, receive, send):
        assert await receive() == {"type": "http.request", "body": b"asked", "more_body": False}
        await send(START)
        await send(part(b"a"))
        await asyncio.sleep(0.01)
        await send(part(b"b", more=False))

    first, second = called(app, b"asked")
    assert first[0]["headers"] == [(b"x-replica", b"r1")]
    assert [first[1]["body"], second[0]["body"]] == [b"a", b"b"]


def test_leaving_an_answer_cancels_what_makes_it():
    ended = []

    async def app(scope, receive, send):
        await send(START)
        await send(part(b"a"))
        await receive()
        try:
            await receive()  # until the client leaves
        finally:
            ended.append(True)

    async def run():
        answers = replica(app).call(SCOPE, b"", NOTHING)
        await anext(answers)
        await asyncio.sleep(0)
        await answers.aclose()
        await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert ended == [True]


def test_an_answer_that_nobody_fetches_waits_where_it_is_made():
    sent = list[int]()

    async def app(scope, receive, send):
        await send(START)
        for number in range(10_000):
            await send(part(b"a"))
            sent.append(number)

    async def run():
        answers = replica(app).call(SCOPE, b"", NOTHING)
        await anext(answers)
        await asyncio.sleep(0.1)
        await answers.aclose()
        return len(sent)

    assert asyncio.run(run()) < 1000


def test_what_an_application_raises_reaches_the_front():
    async def app(scope, receive, send):
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        called(app)


def test_health_is_the_workers():
    def model(state):
        health = SimpleNamespace(state=state, error=None)
        return SimpleNamespace(name="m", engine=SimpleNamespace(engine=SimpleNamespace(health=lambda: health)))

    replica(None, model("running")).check_health()
    for state in ("failed", "stuck"):
        with pytest.raises(ExecutionError, match=state):
            replica(None, model("idle"), model(state)).check_health()


def test_reports_are_of_what_the_slots_hold(bundle, monkeypatch):
    with Engine.load(bundle, batch_size=2) as engine:
        tokens = engine.encode("def main(argv):\n    return parse_arguments(argv)\n" * 3)
        engine.generate([tokens])
        (held,) = [text for salt, text in engine.cached_texts if text]
        assert held[: len(tokens)] == tokens
        model = SimpleNamespace(name="pycode", engine=SimpleNamespace(engine=engine))
        told = replica(None, model).record_routing_stats()["cached"]
        assert {*chain(tokens, scope_of("pycode", None))} <= {*told}
        assert len(told) == len(held) // 16
        longer = [*held, *held]
        texts = SimpleNamespace(cached_texts=[(None, held)])
        model = SimpleNamespace(name="pycode", engine=SimpleNamespace(engine=texts))
        one, hashed = replica(None, model), list[int]()

        def spy(tokens, scope, known=()):
            hashed.append(len(tokens) // 16 - len(known))
            return chain(tokens, scope, known)

        monkeypatch.setattr(ray_app, "chain", spy)
        for text in (held, held, longer, held):
            texts.cached_texts = [(None, text)]
            assert one.record_routing_stats()["cached"] == sorted({*chain(text, scope_of("pycode", None))})
        blocks = len(held) // 16
        assert hashed == [blocks, 0, len(longer) // 16 - blocks, blocks], "what is known is not hashed again"


@pytest.mark.parametrize(
    ("args", "error", "told"),
    [
        ({"bundles": "/nowhere.bundle"}, BundleError, "nowhere"),
        ({"bundles": "b", "serve": {"ports": 1}}, OptionError, "ports"),
        ({"bundles": "b", "replicas": 2}, OptionError, "replicas"),
        ({"bundles": "b", "ray": {"num_replicas": 0}}, OptionError, "num_replicas"),
        ({}, OptionError, "bundles"),
    ],
)
def test_what_is_wrong_with_arguments_is_said(args, error, told):
    with pytest.raises(error, match=told):
        ray_app.app(args)


def test_an_application_is_made_of_plain_values(bundle):
    asked = {"bundles": [f"m={bundle}"], "serve": {"api_keys": ["k"]}, "ray": {"autoscale": [0, 2]}}
    assert isinstance(ray_app.app(asked), Application)


def test_keys_are_the_environments(bundle, monkeypatch):
    """So that a manifest takes them from a secret."""
    found = list[ServeOptions]()
    monkeypatch.setattr(ray_app, "build", lambda named, options, load, scale: found.append(options))
    monkeypatch.setenv("SPECBUILD_API_KEY", "a, b")
    ray_app.app({"bundles": str(bundle)})
    ray_app.app({"bundles": str(bundle), "serve": {"api_keys": ["c"]}})
    assert [options.api_keys for options in found] == [("a", "b"), ("c",)]


@pytest.mark.soak
def test_two_replicas_answer_with_one_engines_texts_and_drain(bundle, chat_template):
    flags = ["--ray", "--num-replicas", "2", "--port", "0", "--chat-template", chat_template]
    server = Server(str(bundle), *flags)
    try:
        url, body = server.url, {"prompt": "def main(argv):", "max_tokens": 16, "temperature": 0.8}
        with Engine.load(bundle) as engine:
            texts = [
                engine.generate(["def main(argv):"], SamplingParams(16, temperature=0.8, seed=seed))[0].text
                for seed in range(12)
            ]
        replies = [httpx.post(f"{url}/v1/completions", json=body | {"seed": seed}, timeout=60) for seed in range(12)]
        assert [each.json()["choices"][0]["text"] for each in replies] == texts
        assert 'replica="' in httpx.get(f"{url}/metrics", timeout=60).text
        long = b" " * (5 << 20) + json.dumps(body).encode()  # a body may have more than Ray's own 4 MiB
        is_json = {"content-type": "application/json"}
        assert httpx.post(f"{url}/v1/completions", content=long, headers=is_json, timeout=60).status_code == 200
        # The later turns of two chats follow their prompts.
        starts, places = [f"class {name}:\n" + f"    {name} = {name}()\n" * 12 for name in ("Alpha", "Omega")], set()
        for turn in range(4):
            asked = [{"prompt": start * (1 + turn % 2), "max_tokens": 16} for start in starts]
            told = [httpx.post(f"{url}/v1/completions", json=each, timeout=60) for each in asked]
            places.add(tuple(each.headers["x-replica"] for each in told))
        assert len(places) == 1, "the hint does not reach the router"
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0
