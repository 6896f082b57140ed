"""Attacks on the server: methods and targets of any kind, and bodies with one wrong field, whose name is told."""

import json

from asgi import call, part, scope_of
from data_files import table
from route_client import service_of
from serving import CHAT_TEMPLATE, Log

from specbuild.runtime import Engine
from specbuild.serve.http.app import make_app

from .attack import Attack
from .mutations import HOSTILE, to_bytes
from .outcome import Fault

BODIES, FIELDS, OTHERS, ODD_PATHS, METHODS, BEFORE = table("http_parts.json").values()  # bodies: quickly answered
PATHS = (*BODIES, *OTHERS)
VALUES = [value for value in HOSTILE if value != "@twice"]  # which is a field more
UNREAD = ("the body", "There was an error parsing the body")  # what is said of a body that is not JSON
ELSEWHERE = {"model": (404,), "deadline": (408,)}  # statuses that a wrong value of these fields may have besides 400


class HttpAttack(Attack):
    """Calls an application in this process, over an engine that lives as long as the worker."""

    def __init__(self, bench):
        super().__init__(bench)
        self.engine, log = Engine.load(bench.bundle, batch_size=2, chat_template=CHAT_TEMPLATE), Log()
        self.app = make_app(service_of(self.engine, bench.bundle, log), log)

    def attempt(self, rng, place):
        if rng.random() < 0.3:
            self._target(rng, place)
        else:
            self._field(rng, place)

    def close(self):
        self.engine.close()

    def _target(self, rng, place):
        """Every answer is the server's own, HEAD's without a body, and a 405 says what is allowed."""
        path, before, method = (
            rng.choice((*PATHS, *PATHS, *ODD_PATHS)),
            rng.choice(BEFORE),
            rng.choice(METHODS),
        )
        (place / "request.txt").write_text(f"{method} {before}{path}", encoding="utf-8")
        status, headers, body = self._ask(method, before + path, b"")
        allowed = headers.get("allow", "").split(", ")
        if status >= 500:
            raise Fault("wrong", f"status {status}: {body[:300]!r}")
        if (status in (204, 405)) != ("allow" in headers) or (status == 405 and method in allowed):
            raise Fault("wrong", f"status {status} allows {allowed}")
        if method == "HEAD" and body:
            raise Fault("wrong", f"HEAD has a body: {body[:100]!r}")
        if path in PATHS and before in ("http://host", "HTTP://host:80", "https://[::1]:8") and status == 404:
            raise Fault("wrong", "a target with a host is not found")

    def _field(self, rng, place):
        """A body with one changed field is answered, or refused in that field's name; null is as good as no field."""
        path, name = rng.choice(sorted(BODIES)), rng.choice(FIELDS)
        if path == "/invocations" and name == "inputs":  # which makes another body of it, whose other fields are wrong
            return
        value = None if rng.random() < 0.2 else rng.choice(VALUES)
        body = BODIES[path] | {name: value}
        (place / "request.json").write_bytes(to_bytes({"path": path, "field": name}) + b"\n" + to_bytes(body)[:100_000])
        status, _, told = self._ask("POST", path, to_bytes(body))
        if value is None:
            without = {field: each for field, each in body.items() if field != name}
            if status != self._ask("POST", path, to_bytes(without))[0]:
                raise Fault("wrong", f"{name}: null is not as good as no field: {told[:300]!r}")
        if value is None or status == 200:
            return
        if status not in (400, *ELSEWHERE.get(name, ())):
            raise Fault("wrong", f"{name}: status {status}: {told[:300]!r}")
        error = json.loads(told)["error"]
        message = error if isinstance(error, str) else error["message"]
        if "\n" in message or not message:
            raise Fault("wrong", f"{name}: an error that is no line: {message[:300]!r}")
        if isinstance(error, dict) and "param" in error and not message.startswith(UNREAD):
            param = (error["param"] or "").partition(".")[0]
            if param != name[:256]:
                raise Fault("wrong", f"{name} is wrong, {param!r} is blamed: {message[:300]}")

    def _ask(self, method, target, body):
        """An application's status, headers and body for a request, as an HTTP server would pass it on."""
        scope = scope_of(method, target, host="x", content_type="application/json", content_length=str(len(body)))
        first, *rest = call(self.app, scope, [part(body)])
        told = {name.decode().lower(): value.decode() for name, value in first["headers"]}
        return first["status"], told, b"".join(each.get("body", b"") for each in rest)
