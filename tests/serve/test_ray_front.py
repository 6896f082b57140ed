"""The front over made-up replicas: what it says of prompts, what it passes on, what it does when one is lost."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed")

from asgi import call, part, scope_of
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from route_client import CHATS, COMPLETIONS, MESSAGES, RESPONSES
from serving import CHAT_TEMPLATE, Log

from specbuild.runtime import Bundle
from specbuild.runtime.engine.composition import tokenizer_of
from specbuild.serve.canary.assignment import CanaryOptions
from specbuild.serve.options import ServeOptions
from specbuild.serve.ray import front as ray_front
from specbuild.serve.ray.front import Front
from specbuild.serve.ray.router import Hint

CANARY = CanaryOptions(candidate="speculation=auto")

HEADERS = [(b"content-type", b"text/event-stream"), (b"x-request-id", b"x")]
START = {"type": "http.response.start", "status": 200, "headers": HEADERS}
BODY = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b"data: [DONE]\n\n"}
TEXT = "sort these numbers, and say why " * 6
SAID = [{"role": "user", "content": TEXT}]


class Answers:
    """What `handle.remote` returns: batches of messages, or an exception among them."""

    def __init__(self, script):
        self._script, self.cancelled = script, False

    def cancel(self):
        self.cancelled = True

    async def __aiter__(self):
        for each in self._script:
            if isinstance(each, BaseException):
                raise each
            if each is None:
                await asyncio.sleep(60)
            yield each


class Replicas:
    """A handle: each call has the next script; `asked`: what was."""

    def __init__(self, *scripts):
        self.scripts, self.asked, self.answers = list(scripts), list[Hint](), list[Answers]()

    def options(self, **given):
        assert given == {"method_name": "call", "stream": True}
        return self

    def remote(self, *given, hint):
        self.asked.append(hint)
        self.answers.append(Answers(self.scripts.pop(0) if self.scripts else [[START, END]]))
        return self.answers[-1]

    def broadcast(self, name, scope):
        if not self.scripts:
            raise DeploymentUnavailableError(None)

        def results(timeout_s):
            if self.scripts == [None]:
                raise TimeoutError(timeout_s)
            return self.scripts

        return SimpleNamespace(results=results)


@pytest.fixture(scope="module")
def tokenizer(bundle):
    return tokenizer_of(Bundle.open(bundle), CHAT_TEMPLATE)


@pytest.fixture
def ask(tokenizer):
    """`ask(replicas, path, body, key=, **ServeOptions)`: the front's response; no body: GET."""

    def asked(replicas, path=COMPLETIONS, body=None, key="", **given):
        log = Log()
        front = Front(replicas, {"pycode": tokenizer}, ServeOptions(**given), log)

        async def run():
            transport = httpx.ASGITransport(app=front.app())
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                return await client.request("GET" if body is None else "POST", path, json=body, headers=headers)

        return asyncio.run(run())

    return asked


@pytest.fixture
def told(ask):
    """`told(path, body, …)`: the hint by which the front chooses a replica."""

    def hint(path, body, **more):
        ask(replicas := Replicas(), path, body, **more)
        (found,) = replicas.asked
        return found

    return hint


def test_an_answer_is_passed_on_whole(ask):
    response = ask(Replicas([[START, BODY], [END]]), body={"prompt": "a"})
    assert (response.status_code, response.text) == (200, "data: {}\n\ndata: [DONE]\n\n")
    assert "x-request-id" not in response.headers, "Ray's proxy says it"


def test_a_prompt_becomes_blocks_that_its_beginning_shares(told, tokenizer):
    one, ids = told(COMPLETIONS, {"prompt": TEXT, "max_tokens": 9, "n": 2}), tokenizer.encode(TEXT)
    assert (one.tokens, one.output, len(one.blocks)) == (len(ids), 18, len(ids) // 16)
    assert told(COMPLETIONS, {"prompt": ids + [5] * 16}).blocks[: len(one.blocks)] == one.blocks
    assert not {*told(COMPLETIONS, {"prompt": TEXT, "cache_salt": "other"}).blocks} & {*one.blocks}
    chat = told(CHATS, {"messages": SAID, "max_completion_tokens": 5})
    more = told(CHATS, {"messages": [*SAID, {"role": "assistant", "content": "x"}, *SAID]})
    assert len({*more.blocks} & {*chat.blocks}) >= len(chat.blocks) - 1
    assert chat.output == 5


def test_keys_keep_blocks_apart_unless_shared(ask, told):
    for share in (False, True):
        options = {"api_keys": ("a", "b"), "share_prefix_cache": share}
        one, other = (told(COMPLETIONS, {"prompt": TEXT}, key=key, **options) for key in "ab")
        assert (one == other) is share
    refused = ask(replicas := Replicas(), body={"prompt": TEXT}, api_keys=("a",))
    assert (refused.status_code, replicas.asked) == (401, []), "no replica is woken for it"


def test_the_same_prompt_is_the_same_by_every_route(told):
    chat, text = {"messages": SAID, "max_tokens": 7}, {"prompt": TEXT, "max_tokens": 7}
    own = {"inputs": TEXT, "parameters": {"max_new_tokens": 7}}
    one, other = told(CHATS, chat), told(COMPLETIONS, text)
    assert told(MESSAGES, chat) == one
    assert {told(path, own).blocks[0] for path in ("/generate", "/generate_stream", "/")} == {other.blocks[0]}
    for path in ("/invocations", "/predict"):
        found = [told(path, body) for body in (chat, text, own, {"instances": []})]
        assert found == [one, other, other, Hint([], 0, 0)]
    asked = {"input": TEXT, "instructions": "be brief", "max_output_tokens": 7}
    brief = told(CHATS, chat | {"messages": [{"role": "system", "content": "be brief"}, *SAID]})
    assert told(RESPONSES, asked) == brief
    assert told(RESPONSES, asked | {"previous_response_id": "resp_1"}) == Hint([], 0, 0), "a replica has its beginning"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((COMPLETIONS, {}), (COMPLETIONS, {"prompt": 5}), (COMPLETIONS, {"prompt": "a", "model": "other"})),
        *((COMPLETIONS, {"prompt": "a", "suffix": "b"}), (COMPLETIONS, [1])),
        ("/generate", {"inputs": TEXT, "parameters": {"colour": 1, "grammar": {}}}),
    ],
)
def test_what_is_wrong_is_left_to_a_replica(told, path, body):
    assert told(path, body) == Hint([], 0, 0)


@pytest.mark.parametrize(
    ("scripts", "status", "said", "tries"),
    [
        ([[RayActorError()], [[START, END]]], 200, "data: [DONE]", 2),
        ([[[START, BODY], RayActorError()]], 200, "replica_lost", 1),  # nothing is said twice
        ([[RayActorError()]] * 3, 503, "replica_lost", 3),
        ([[BackPressureError(1, 1)]], 429, "queue_full", 1),
    ],
)
def test_a_replica_that_is_lost_or_full(ask, scripts, status, said, tries):
    response = ask(replicas := Replicas(*scripts), body={"prompt": "a"})
    assert (response.status_code, said in response.text, len(replicas.asked)) == (status, True, tries)
    assert ("[DONE]" in response.text) == (said == "data: [DONE]")
    assert ("retry-after" in response.headers) == (status > 200)


def test_a_client_that_leaves_has_its_request_cancelled(tokenizer):
    replicas = Replicas([[START, BODY], None])
    app = Front(replicas, {"pycode": tokenizer}, ServeOptions(), Log()).app()
    call(app, scope_of("POST", COMPLETIONS), [part(b'{"prompt": "a"}')], leaves=True)
    assert replicas.answers[0].cancelled


def test_a_client_that_takes_nothing_has_its_request_cancelled(tokenizer):
    replicas = Replicas([[START, BODY], None])
    app = Front(replicas, {"pycode": tokenizer}, ServeOptions(), Log()).app()

    async def stuck(message):
        raise TimeoutError

    with pytest.raises(TimeoutError):
        call(app, scope_of("POST", COMPLETIONS), [part(b'{"prompt": "a"}')], send=stuck)
    assert replicas.answers[0].cancelled


def test_pages_may_call_the_front_as_they_may_a_server(tokenizer, ask):
    options = ServeOptions(api_keys=("k",), allowed_origins=("https://here",), ui=True)
    app = Front(Replicas(), {"pycode": tokenizer}, options, Log()).app()
    asked = scope_of("OPTIONS", COMPLETIONS, origin="https://here", access_control_request_method="POST")
    (start, *_) = call(app, asked, [part(b"")])
    assert (start["status"], dict(start["headers"])[b"access-control-allow-origin"]) == (200, b"https://here")
    assert ask(Replicas(), "/", api_keys=("k",), ui=True).status_code == 200
    assert ask(Replicas(), "/", api_keys=("k",)).status_code == 401


def test_a_replica_that_does_not_answer_holds_no_scrape(ask):
    for path in ("/metrics", "/load"):
        response = ask(Replicas(None), path)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "replica_slow")


def test_the_path_of_the_root_is_no_canary(tokenizer):
    app = Front(Replicas(), {"pycode": tokenizer}, ServeOptions(canary=CANARY), Log()).app()
    (start, *_) = call(app, scope_of("GET", "/llm") | {"root_path": "/llm"}, [part(b"")])
    assert start["status"] == 200


def test_metrics_and_loads_carry_the_replica(ask):
    text = b'# HELP a_total A.\n# TYPE a_total counter\na_total{m="x"} 1.0\n# HELP b B.\n# TYPE b gauge\nb 2.0\n'
    response = ask(Replicas(("r2", (200, "text/plain", text)), ("r1", (200, "text/plain", text))), "/metrics")
    families = [line for line in response.text.splitlines() if not line.startswith("#")]
    assert families == [
        *('a_total{replica="r1",m="x"} 1.0', 'a_total{replica="r2",m="x"} 1.0'),
        *('b{replica="r1"} 2.0', 'b{replica="r2"} 2.0'),
    ]
    assert response.text.count("# HELP") == response.text.count("# TYPE") == 2
    assert ask(Replicas(), "/metrics").text == ""
    assert ask(Replicas(), "/load").json() == {"replicas": {}}
    loads = ask(Replicas(("r1", (200, "application/json", b'{"server_load": 2}'))), "/load")
    assert loads.json() == {"replicas": {"r1": {"server_load": 2}}}


@pytest.mark.parametrize(("state", "status"), [("RUNNING", 200), ("DEPLOYING", 503)])
def test_health(ask, monkeypatch, state, status):
    healthy = SimpleNamespace(status=SimpleNamespace(value="HEALTHY"))
    app = SimpleNamespace(status=SimpleNamespace(value=state), deployments={"Replica": healthy})
    found = SimpleNamespace(
        status=lambda: SimpleNamespace(applications={"app": app}),
        get_replica_context=lambda: SimpleNamespace(app_name="app"),
    )
    monkeypatch.setattr(ray_front, "serve", found)
    for path in ("/health/ready", "/ping", "/up"):
        response = ask(Replicas(), path, api_keys=("k",), health_route="/up")
        assert response.status_code == status
    assert response.json()["deployments"] == {"Replica": "HEALTHY"}
    assert ask(Replicas(), "/health/live").status_code == 200


def test_a_canary_is_every_replica_s(ask):
    """An order goes to all of them, by the operator's key."""
    view = (200, "application/json", b'{"phase": "running"}')
    given = {"canary": CANARY, "admin_key": "a", "api_keys": ("k",)}
    for path, body in (("/canary", None), ("/canary/rollback", {})):
        response = ask(Replicas(("r1", view), ("r2", view)), path, body, key="a", **given)
        assert response.json() == {"replicas": {"r1": {"phase": "running"}, "r2": {"phase": "running"}}}
        assert ask(Replicas(("r1", view)), path, body, key="k", **given).status_code == 401
        assert ask(Replicas(("r1", view)), path, body, canary=CANARY).status_code == 401, "without a key: no orders"
    missing = (404, "application/json", b"{}")
    assert ask(Replicas(("r1", view), ("r2", missing)), "/canary/dance", {}, key="a", **given).status_code == 404
    assert ask(Replicas(), "/canary", key="a", **given).json() == {"replicas": {}}


def test_the_front_starts_and_ends():
    front = Front(Replicas(), {}, ServeOptions(), Log())
    events, said = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]), list[str]()

    async def receive():
        return next(events)

    async def send(message):
        said.append(message["type"])

    asyncio.run(front.app()({"type": "lifespan"}, receive, send))
    assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
