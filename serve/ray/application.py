"""`specbuild serve --ray`: engines as replicas of a Ray Serve deployment, behind a front that routes by prefix.

`app` builds it from plain values, for `serve run specbuild.serve.ray.application:app bundles=…` and for manifests of
RayService. This module is imported only if Ray is asked for.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import anyio
import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from starlette.types import ASGIApp, Message, Scope

from specbuild.runtime import Bundle, LoadOptions
from specbuild.runtime.engine.composition import tokenizer_of
from specbuild.runtime.errors import ExecutionError, OptionError, message_of
from specbuild.serve import limits
from specbuild.serve.http import listener
from specbuild.serve.http.app import make_app
from specbuild.serve.http.server import Named, make_service
from specbuild.serve.options import ADMIN_KEY, ServeOptions, environment_keys
from specbuild.serve.request.models import ServedModel, names_of
from specbuild.serve.telemetry.logs import RequestLog

from . import remote_bundle
from .front import Front, scope_of
from .options import RayOptions
from .prefixes import chain
from .router import CACHED, Hint, PrefixRouter

NAME = "specbuild"  # name of the application
Given = tuple[list[tuple[tuple[str, ...], remote_bundle.Source]], ServeOptions, LoadOptions]
_QUEUED = 64  # messages of an answer that wait for the front
_REPORT, _HEALTH = 1.0, 2.0  # seconds between reports of what a cache holds, and between health checks


class Replica:
    """Models with an application of their own, which the front calls."""

    def __init__(self, name: str, app: ASGIApp, models: Sequence[ServedModel]) -> None:
        self._name, self._app, self._models = name, app, models
        self._hashed = dict[tuple[str, int], tuple[str, list[int], list[int]]]()  # by slot: scope, tokens, hashes

    async def call(self, scope: Scope, body: bytes, hint: Hint) -> AsyncGenerator[list[Message], None]:
        """Yield ASGI messages that answer a request, as many at once as there are. Closing it cancels the work.

        `hint` is for the router only.
        """
        sending, receiving = anyio.create_memory_object_stream[Message](_QUEUED)
        left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return left.pop() if left else await asyncio.Future()  # cancelled when the client leaves

        async def run() -> None:
            with sending:
                await self._app(scope, receive, sending.send)

        running = asyncio.ensure_future(run())
        try:
            with receiving:
                async for message in receiving:
                    found = [self._signed(message)]
                    with suppress(anyio.EndOfStream, anyio.WouldBlock):
                        if message["type"] == "http.response.start":
                            found.append(await receiving.receive())
                        while len(found) < _QUEUED:
                            found.append(receiving.receive_nowait())
                    yield found
            await running
        finally:
            running.cancel()

    def _signed(self, message: Message) -> Message:
        """Add this replica's name to the headers of the first message."""
        if message["type"] != "http.response.start":
            return message
        return {**message, "headers": [*message["headers"], (b"x-replica", self._name.encode())]}

    async def whole(self, scope: Scope) -> tuple[str, tuple[int, str, bytes]]:
        """Return this replica's name, and its own answer to a request: status, content type and body."""
        messages = [each async for found in self.call(scope, b"", Hint([], 0, 0)) for each in found]
        kind = dict(messages[0]["headers"]).get(b"content-type", b"").decode()
        return self._name, (messages[0]["status"], kind, b"".join(each.get("body", b"") for each in messages[1:]))

    def check_health(self) -> None:
        """Raise ExecutionError if a worker has died or is stuck, so that Ray replaces the replica."""
        for model in self._models:
            health = model.engine.engine.health()
            if health.state in ("failed", "stuck"):
                raise ExecutionError(f"the worker of {model.name} is {health.state}: {health.error}")

    def record_routing_stats(self) -> dict[str, list[int]]:
        """Return the hashes of the cached texts' blocks, for the router."""
        blocks = set[int]()
        for model in self._models:
            for slot, (salt, tokens) in enumerate(model.engine.engine.cached_texts):
                blocks.update(self._hashes((model.name, slot), scope_of(model.name, salt), tokens))
        return {CACHED: sorted(blocks)}

    def _hashes(self, place: tuple[str, int], scope: str, tokens: list[int]) -> list[int]:
        """Return the hashes of a slot's text; what the slot held at the last report is not hashed again."""
        before, known, hashes = self._hashed.get(place, ("", [], []))
        goes_on = before == scope and tokens[: len(known)] == known
        found = chain(tokens, scope, hashes if goes_on else ())
        self._hashed[place] = scope, tokens, found
        return found


class LoadedReplica(Replica):
    """One server's engines with its whole application."""

    async def __init__(self, given: Given) -> None:  # type: ignore[misc]
        """Load the bundles."""
        sources, options, load = given
        self._closing, name = ExitStack(), serve.get_replica_context().replica_id.unique_id
        log = RequestLog(sys.stderr, options.log_requests)
        if ledger := options.cost.ledger:  # each replica has a ledger of its own; `specbuild cost` adds them up
            ledger = ledger.with_name(f"{ledger.stem}.{name}{ledger.suffix}")
            options = replace(options, cost=replace(options.cost, ledger=ledger))

        def loaded() -> Any:
            named = [(names, remote_bundle.local(source)) for names, source in sources]
            return make_service(named, options, load, log, self._closing)

        service = await asyncio.to_thread(loaded)
        super().__init__(name, make_app(service, log, operators=True), service.models.all)
        self._watching = [asyncio.ensure_future(each.run()) for each in (service.supervisor,) if each]

    async def __del__(self) -> None:
        """Stop the watchers and close the engines, after Ray has drained the replica."""
        for task in getattr(self, "_watching", ()):
            task.cancel()
        await asyncio.to_thread(self._closing.close)


@serve.ingress()
class Entrance:
    """The application's ingress: `Front` with an ASGI application of its own."""

    def __init__(self, replicas: Any, given: Given) -> None:
        sources, options, load = given
        tokenizers = {
            name: tokenizer_of(Bundle.open(remote_bundle.local(source)), load.chat_template)
            for names, source in sources
            for name in names
        }
        self._front = Front(replicas, tokenizers, options, RequestLog(sys.stderr, options.log_requests))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """See `serve.ingress`."""
        return self._front.app()


def build(named: Named, options: ServeOptions, load: LoadOptions, scale: RayOptions) -> Application:
    """Build the Ray Serve application.

    Args:
        named: Names, and path or URL, of each bundle.
        options: How the server answers.
        load: How bundles are loaded.
        scale: The number of replicas and their resources.

    Raises:
        OptionError: If an option is wrong, or Ray is not installed.
        BundleError: If a bundle cannot be read.
    """
    scale.check(options)
    sources = [(names, remote_bundle.source(str(path))) for names, path in named]
    slots = options.max_num_seqs or min(source.slots for _, source in sources)
    threads = load.threads or max(int(scale.num_cpus), 1)
    given = sources, options, replace(load, threads=threads)
    quiet = {"enable_access_log": False}  # the server writes an access log of its own
    routed = RequestRouterConfig(
        request_router_class=PrefixRouter,
        request_router_kwargs={"routing": scale.routing, "slots": slots},
        request_routing_stats_period_s=_REPORT,
    )
    alone = {"max_ongoing_requests": limits.CONNECTIONS, "ray_actor_options": {"num_cpus": 0}, "logging_config": quiet}
    replicas = serve.deployment(
        LoadedReplica,
        name="Replica",
        graceful_shutdown_timeout_s=options.shutdown_timeout,
        health_check_period_s=_HEALTH,
        request_router_config=routed,
        logging_config=quiet,
        **scale.scaling(slots),
    )
    front = serve.deployment(Entrance, name="Front", **alone)
    return front.bind(replicas.bind(given), given)


def app(args: Mapping[str, Any]) -> Application:
    """Build the Ray Serve application from plain values.

    Args:
        args: `bundles`: one or several, each as a path, a URL or NAME=…; `serve`, `load` and `ray`: the fields of
            `ServeOptions`, `LoadOptions` and `RayOptions`.

    Raises:
        OptionError: If an argument is wrong.
        BundleError: If a bundle cannot be read.
    """
    given = dict(args)
    bundles = given.pop("bundles", [])
    try:
        serving, loading, scaling = (dict(given.pop(name, {})) for name in ("serve", "load", "ray"))
        if given:
            raise OptionError(f"{', '.join(given)}: give bundles, serve, load and ray")
        for each in (serving, loading, scaling):
            each.update({name: tuple(value) for name, value in each.items() if isinstance(value, list)})
        serving.setdefault("api_keys", environment_keys())
        serving.setdefault("admin_key", os.environ.get(ADMIN_KEY))
        if not bundles:
            raise OptionError("there are no bundles: give their paths or URLs")
        options, load, scale = ServeOptions(**serving), LoadOptions(**loading), RayOptions(**scaling)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"the arguments of specbuild.serve.ray.application:app are wrong: {message_of(error)}"
        ) from None
    return build(names_of([bundles] if isinstance(bundles, str) else list(bundles), ()), options, load, scale)


def _stop_by_signals(stopping: threading.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def run(named: Named, options: ServeOptions, load: LoadOptions, scale: RayOptions, log: RequestLog) -> int:
    """Serve on Ray until a signal ends it; return the exit status.

    Args:
        named: Names, and path or URL, of each bundle.
        options: How the server listens and answers.
        load: How bundles are loaded.
        scale: The replicas, and the cluster's address; without one a cluster is started on this machine.
        log: The server's log.

    Raises:
        OptionError: If an option is wrong; before it serves.
        BundleError: If a bundle cannot be read; before it serves.
        ExecutionError: If Ray Serve does not start.
    """
    with listener.listen(options) as listening:  # checks the address and finds a free port
        port = listening.getsockname()[1]
    made = build(named, options, load, scale)
    stopping = threading.Event()
    _stop_by_signals(stopping)
    try:
        ray.init(address=scale.address, include_dashboard=False, log_to_driver=True, configure_logging=False)
        secured = {"ssl_certfile": options.ssl_certfile, "ssl_keyfile": options.ssl_keyfile}
        http = {"host": options.host, "port": port, **{k: str(v) for k, v in secured.items() if v}}
        serve.start(http_options=http)
        serve.run(made, name=NAME, route_prefix=options.root_path or "/")
        _stop_by_signals(stopping)  # again, because Ray's own handler ends the process at once
    except Exception as error:  # Ray raises plain Exceptions
        raise ExecutionError(f"Ray Serve did not start ({message_of(error)[:300]}): see its log above") from None
    where = f"http{'s' if secured['ssl_certfile'] else ''}://{options.host}:{port}{options.root_path}"
    log.event("info", f"serving at {where}", ray=scale.address or "local")
    try:
        stopping.wait()
        log.event("info", "draining")
        serve.delete(NAME)
    finally:
        if scale.address is None:
            serve.shutdown()
        ray.shutdown()
    return 0
