"""A client of a server's routes in this process: replies as JSON, streams as events, both as one kind of choice."""

import json

from fastapi.testclient import TestClient

from specbuild.runtime import AsyncEngine, Bundle
from specbuild.serve.canary.canary import Canary
from specbuild.serve.canary.routes import CanaryMetrics
from specbuild.serve.http.app import make_app
from specbuild.serve.metrics import Metrics
from specbuild.serve.options import ServeOptions
from specbuild.serve.request.admission import Admission
from specbuild.serve.request.models import Models, ServedModel
from specbuild.serve.request.parameters import defaults_of
from specbuild.serve.request.rate_limits import RateLimits
from specbuild.serve.service import Service
from specbuild.serve.shadow.shadow_check import Oracle
from specbuild.serve.text_sample import TextSample

COMPLETIONS, CHATS, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
SAID = [{"role": "user", "content": "a loop"}]
ASKED = {  # a short greedy text of each route
    COMPLETIONS: {"prompt": "def main(", "max_tokens": 12, "temperature": 0},
    CHATS: {"messages": SAID, "max_tokens": 12, "temperature": 0},
    RESPONSES: {"input": "a loop", "max_output_tokens": 12, "temperature": 0},
    MESSAGES: {"messages": SAID, "max_tokens": 12, "temperature": 0},
}
SCHEMA = {  # of a tool's arguments
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}


def service_of(engine, bundle, log, **given):
    """A service over an engine; `given`: of ServeOptions."""
    options = ServeOptions(**given)
    admission = Admission(engine.batch_size, options.max_waiting, options.max_queued_tokens)
    model = ServedModel(("pycode", "alias"), bundle, AsyncEngine(engine), defaults_of(Bundle.open(bundle)), admission)
    models, metrics = Models([model]), Metrics({"pycode": engine}, options.metrics_prefix)
    canary = Canary(models, options.canary, log) if options.canary else None
    oracle = Oracle(models, options, metrics, log, canary) if options.shadow or canary else None
    sample = TextSample(options.text_sample, options.text_sample_share, log) if options.text_sample else None
    if canary:
        metrics.registry.register(CanaryMetrics(canary))
    watchers = [each for each in (oracle, canary, sample) if each]
    rates = RateLimits(options.requests_per_minute, options.tokens_per_minute)
    return Service(models, options, metrics, rates=rates, oracle=oracle, canary=canary, watchers=watchers)


class RouteClient(TestClient):
    """A client; `service` is what it talks to."""

    def __init__(self, service, log):
        super().__init__(make_app(service, log), raise_server_exceptions=False)
        self.service = service

    @property
    def admission(self):
        """That of the only model."""
        return self.service.models.all[0].admission

    def ask(self, path=COMPLETIONS, **fields):
        """A reply's JSON."""
        reply = self.post(path, json=ASKED.get(path, {}) | fields)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def events(self, path=COMPLETIONS, **fields):
        """A stream's events, each as JSON."""
        reply = self.post(path, json=ASKED.get(path, {}) | fields | {"stream": True})
        assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
        lines = [line.removeprefix("data: ") for line in reply.text.split("\n") if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def choices(self, path=COMPLETIONS, **fields):
        """The choices of a text, which are the same whole and streamed."""
        whole, streamed = self.ask(path, **fields)["choices"], self.events(path, **fields)
        parts = [choice for event in streamed for choice in event["choices"]]
        found = [joined([choice]) for choice in whole]
        assert [joined([part for part in parts if part["index"] == each["index"]]) for each in whole] == found
        return found

    def choice(self, path=COMPLETIONS, **fields):
        """The only choice."""
        (choice,) = self.choices(path, **fields)
        return choice

    def refusal(self, path, **fields):
        """The status and error of a request that is refused; JSON of Python's own, which has half characters too."""
        reply = self.post(path, content=json.dumps(fields), headers={"Content-Type": "application/json"})
        return reply.status_code, reply.json()["error"]

    def series(self):
        """What /metrics says, by name and labels."""
        lines = [line.rpartition(" ") for line in self.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}


def joined(parts):
    """A choice put together of its parts: text, reasoning, calls (name and arguments), tokens, and how it ended."""
    found = {"text": "", "reasoning": "", "calls": [], "token_ids": [], "token_sources": []}
    for part in parts:
        said = part.get("message") or part.get("delta") or part
        found["text"] += said.get("text") or said.get("content") or ""
        found["reasoning"] += said.get("reasoning_content") or ""
        for place, call in enumerate(said.get("tool_calls") or ()):
            if call.get("index", place) == len(found["calls"]):
                found["calls"].append({"name": "", "arguments": ""})
            for name, value in call["function"].items():
                found["calls"][-1][name] += value
        for name in ("token_ids", "token_sources"):
            found[name] += part.get(name) or []
        found["finish_reason"] = part["finish_reason"]
    return found
