"""The front over made-up replicas: what it says of prompts, what it passes on, what it does when one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from serving import CHAT_TEMPLATE, Log

from specbuild.runtime import Bundle
from specbuild.runtime.engine.composition import tokenizer_of
from specbuild.serve import ray_front
from specbuild.serve.options import ServeOptions
from specbuild.serve.prefixes import BLOCK
from specbuild.serve.ray_front import ANY, TRIES, Front
from specbuild.serve.ray_router import Hint

START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream"), (b"x-request-id", b"x")],
}
BODY = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
END = {"type": "http.response.body", "body": b"data: [DONE]\n\n"}


class Answers:
    """What `handle.remote` returns: batches of messages, or an exception among them."""

    def __init__(self, script: list[Any]) -> None:
        self._script, self.cancelled = script, False

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> Any:
        for each in self._script:
            if isinstance(each, BaseException):
                raise each
            if each is None:
                await asyncio.sleep(60)
            yield each


class Replicas:
    """A handle: each call has the next script; `asked`: what was."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts, self.asked, self.answers = list(scripts), list[tuple[Any, ...]](), list[Answers]()

    def options(self, **given: Any) -> Replicas:
        assert given == {"method_name": "call", "stream": True}
        return self

    def remote(self, *given: Any, hint: Hint) -> Answers:
        self.asked.append((*given, hint))
        self.answers.append(Answers(self.scripts.pop(0) if self.scripts else [[START, END]]))
        return self.answers[-1]

    def broadcast(self, name: str, scope: Any) -> Any:
        if not self.scripts:
            raise DeploymentUnavailableError(None)
        return SimpleNamespace(results=lambda: self.scripts)


@pytest.fixture(scope="module")
def tokenizer(bundle: Path) -> Any:
    return tokenizer_of(Bundle.open(bundle), CHAT_TEMPLATE)


@pytest.fixture
def ask(tokenizer: Any) -> Callable[..., httpx.Response]:
    """`ask(replicas, body, path=, headers=, **ServeOptions)`: the front's response; `.log` has its log."""

    def asked(replicas: Replicas, body: Any = None, path: str = "/v1/completions", **given: Any) -> httpx.Response:
        log, headers, judge = Log(), given.pop("headers", {}), given.pop("judge", None)
        front = Front(replicas, {"pycode": tokenizer}, ServeOptions(**given), log, judge)

        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app=front.app())
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                method = "GET" if body is None else "POST"
                return await client.request(method, path, json=body, headers=headers)

        response = asyncio.run(run())
        response.log = log  # type: ignore[attr-defined]
        return response

    return asked


def hint(replicas: Replicas) -> Hint:
    found = replicas.asked[-1][2]
    assert isinstance(found, Hint)
    return found


def test_an_answer_is_passed_on_whole(ask: Callable[..., httpx.Response]) -> None:
    response = ask(Replicas([[START, BODY], [END]]), {"prompt": "a"})
    assert (response.status_code, response.text) == (200, "data: {}\n\ndata: [DONE]\n\n")
    assert "x-request-id" not in response.headers, "Ray's proxy says it"


def test_a_prompt_becomes_blocks_that_its_beginning_shares(ask: Callable[..., httpx.Response], tokenizer: Any) -> None:
    replicas, text = Replicas(), "def main(argv): return parse(argv)\n" * 8
    ask(replicas, {"prompt": text, "max_tokens": 9, "n": 2})
    one = hint(replicas)
    assert (one.tokens, one.output) == (len(tokenizer.encode(text)), 18)
    assert len(one.blocks) == one.tokens // BLOCK
    ask(replicas, {"prompt": tokenizer.encode(text) + [5] * BLOCK})
    assert hint(replicas).blocks[: len(one.blocks)] == one.blocks
    ask(replicas, {"prompt": text, "cache_salt": "other"})
    assert not {*hint(replicas).blocks} & {*one.blocks}


def test_keys_keep_blocks_apart_unless_shared(ask: Callable[..., httpx.Response]) -> None:
    replicas, body = Replicas(), {"prompt": "def main(argv): return parse(argv)\n" * 4}
    for share in (False, True):
        seen = []
        for key in ("a", "b"):
            headers = {"Authorization": f"Bearer {key}"}
            ask(replicas, body, headers=headers, api_keys=("a", "b"), share_prefix_cache=share)
            seen.append(hint(replicas).blocks)
        assert (seen[0] == seen[1]) is share
    refused = ask(replicas, body, api_keys=("a",))
    assert refused.status_code == 401
    assert len(replicas.asked) == 4, "no replica is woken for it"


def test_chats_are_told_by_their_template(ask: Callable[..., httpx.Response]) -> None:
    replicas, message = Replicas(), {"role": "user", "content": "sort these numbers, and say why " * 6}
    ask(replicas, {"messages": [message], "max_completion_tokens": 5}, "/v1/chat/completions")
    one = hint(replicas)
    answer = {"role": "assistant", "content": "x"}
    ask(replicas, {"messages": [message, answer, message]}, "/v1/chat/completions")
    assert len({*hint(replicas).blocks} & {*one.blocks}) >= len(one.blocks) - 1
    assert one.output == 5


def test_anthropic_s_and_text_generation_inference_s_prompts_are_those_of_chats_and_completions(
    ask: Callable[..., httpx.Response],
) -> None:
    replicas, text = Replicas(), "sort these numbers, and say why " * 6
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 7}
    ask(replicas, chat, "/v1/chat/completions")
    one = hint(replicas)
    ask(replicas, chat, "/v1/messages")
    assert hint(replicas) == one
    ask(replicas, {"prompt": text, "max_tokens": 7}, "/v1/completions")
    other = hint(replicas)
    for path in ("/generate", "/generate_stream", "/"):
        ask(replicas, {"inputs": text, "parameters": {"max_new_tokens": 7}}, path)
        assert hint(replicas) == other
    ask(replicas, {"inputs": text, "parameters": {"colour": 1, "grammar": {}}}, "/generate")
    assert hint(replicas) == ANY
    for path in ("/invocations", "/predict"):
        for body, expected in ((chat, one), ({"prompt": text, "max_tokens": 7}, other), ({"instances": []}, ANY)):
            ask(replicas, body, path)
            assert hint(replicas) == expected
        ask(replicas, {"inputs": text, "parameters": {"max_new_tokens": 7}}, path)
        assert hint(replicas) == other


def test_a_response_s_prompt_is_its_chat_s_unless_a_replica_has_its_beginning(
    ask: Callable[..., httpx.Response],
) -> None:
    replicas, text = Replicas(), "sort these numbers, and say why " * 6
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]
    ask(replicas, {"messages": said, "max_tokens": 7}, "/v1/chat/completions")
    one = hint(replicas)
    asked = {"input": text, "instructions": "be brief", "max_output_tokens": 7}
    ask(replicas, asked, "/v1/responses")
    assert hint(replicas) == one
    ask(replicas, asked | {"previous_response_id": "resp_1"}, "/v1/responses")
    assert hint(replicas) == ANY


@pytest.mark.parametrize(
    "body", [{}, {"prompt": 5}, {"prompt": "a", "model": "other"}, {"prompt": "a", "suffix": "b"}, [1]]
)
def test_what_is_wrong_is_left_to_a_replica(ask: Callable[..., httpx.Response], body: Any) -> None:
    replicas = Replicas()
    ask(replicas, body)
    assert hint(replicas) == ANY


def test_a_replica_that_dies_before_it_said_anything_is_replaced(ask: Callable[..., httpx.Response]) -> None:
    replicas = Replicas([RayActorError()], [[START, END]])
    response = ask(replicas, {"prompt": "a"})
    assert response.text == "data: [DONE]\n\n"
    assert len(replicas.asked) == 2


def test_one_that_dies_amid_a_stream_ends_it_with_an_error(ask: Callable[..., httpx.Response]) -> None:
    replicas = Replicas([[START, BODY], RayActorError()])
    response = ask(replicas, {"prompt": "a"})
    assert "replica_lost" in response.text
    assert "[DONE]" not in response.text
    assert len(replicas.asked) == 1, "nothing is said twice"


def test_where_all_die_it_says_so(ask: Callable[..., httpx.Response]) -> None:
    replicas = Replicas(*[[RayActorError()]] * TRIES)
    response = ask(replicas, {"prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "replica_lost")
    assert response.headers["retry-after"]


def test_a_full_queue_is_429(ask: Callable[..., httpx.Response]) -> None:
    response = ask(Replicas([BackPressureError(1, 1)]), {"prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")


def test_a_client_that_leaves_has_its_request_cancelled(tokenizer: Any) -> None:
    replicas = Replicas([[START, BODY], None])
    app = Front(replicas, {"pycode": tokenizer}, ServeOptions(), Log()).app()
    messages = [{"type": "http.request", "body": b'{"prompt": "a"}'}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        while not sent:
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 30))
    assert replicas.answers[0].cancelled


def test_metrics_carry_the_replica_family_by_family(ask: Callable[..., httpx.Response]) -> None:
    text = b'# HELP a_total A.\n# TYPE a_total counter\na_total{m="x"} 1.0\n# HELP b B.\n# TYPE b gauge\nb 2.0\n'
    response = ask(Replicas(("r2", (200, "text/plain", text)), ("r1", (200, "text/plain", text))), path="/metrics")
    assert response.text.splitlines() == [
        "# HELP a_total A.",
        "# TYPE a_total counter",
        'a_total{replica="r1",m="x"} 1.0',
        'a_total{replica="r2",m="x"} 1.0',
        "# HELP b B.",
        "# TYPE b gauge",
        'b{replica="r1"} 2.0',
        'b{replica="r2"} 2.0',
    ]


def test_no_replicas_are_no_metrics_and_no_load(ask: Callable[..., httpx.Response]) -> None:
    assert ask(Replicas(), path="/metrics").text == ""
    assert ask(Replicas(), path="/load").json() == {"replicas": {}}
    loads = ask(Replicas(("r1", (200, "application/json", b'{"server_load": 2}'))), path="/load")
    assert loads.json() == {"replicas": {"r1": {"server_load": 2}}}


@pytest.mark.parametrize(("state", "status"), [("RUNNING", 200), ("DEPLOYING", 503)])
def test_health(ask: Callable[..., httpx.Response], monkeypatch: pytest.MonkeyPatch, state: str, status: int) -> None:
    told = SimpleNamespace(
        status=SimpleNamespace(value=state),
        deployments={"Replica": SimpleNamespace(status=SimpleNamespace(value="HEALTHY"))},
    )
    found = SimpleNamespace(
        status=lambda: SimpleNamespace(applications={"app": told}),
        get_replica_context=lambda: SimpleNamespace(app_name="app"),
    )
    monkeypatch.setattr(ray_front, "serve", found)
    response = ask(Replicas(), path="/health/ready", api_keys=("k",))
    assert (response.status_code, response.json()["deployments"]) == (status, {"Replica": "HEALTHY"})
    assert ask(Replicas(), path="/ping", api_keys=("k",)).status_code == status
    assert ask(Replicas(), path="/up", api_keys=("k",), health_route="/up").status_code == status
    assert ask(Replicas(), path="/health/live").status_code == 200


def test_the_canary_of_all_replicas_is_the_judge_s(ask: Callable[..., httpx.Response]) -> None:
    class Judge:
        """A handle of one."""

        def __init__(self) -> None:
            async def told(order: str | None) -> Any:
                return (404, {"error": {"message": "no such order"}}) if order == "dance" else (200, {"order": order})

            async def metrics() -> str:
                return "specbuild:canary_weight 10.0\n"

            self.ask, self.metrics = SimpleNamespace(remote=told), SimpleNamespace(remote=metrics)

    replicas = Replicas()
    assert ask(replicas, path="/canary", judge=Judge()).json() == {"order": None}
    assert ask(replicas, {}, path="/canary/pause", judge=Judge()).json() == {"order": "pause"}
    assert ask(replicas, {}, path="/canary/dance", judge=Judge()).status_code == 404
    assert "specbuild:canary_weight 10.0" in ask(replicas, path="/metrics", judge=Judge()).text
    assert not replicas.asked
    front = Front(replicas, {}, ServeOptions(), Log(), Judge())  # type: ignore[arg-type]
    events = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    told = list[str]()

    async def receive() -> Any:
        return next(events)

    async def send(message: Any) -> None:
        told.append(message["type"])

    asyncio.run(front.app()({"type": "lifespan"}, receive, send))
    assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
