"""Answer a text-generation request: from its parsed body to its response, log line, metrics and trace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import msgspec
from fastapi import Request
from starlette.responses import Response

from specbuild.serve.openai.formats import Format
from specbuild.serve.request import tools
from specbuild.serve.request.admission import Admission
from specbuild.serve.request.body import Kind, decoded
from specbuild.serve.request.fields import ChatRequest, Sampling
from specbuild.serve.request.generation import (
    ClientGoneError,
    Draw,
    EventStream,
    Generation,
    Watcher,
    cancelled,
    unless_gone,
)
from specbuild.serve.request.grammars import GrammarCompiler
from specbuild.serve.request.models import Models, ServedModel
from specbuild.serve.request.parameters import Caller
from specbuild.serve.request.rate_limits import RateLimits
from specbuild.serve.request.supervision import Supervisor
from specbuild.serve.shadow.shadow_check import Oracle
from specbuild.serve.telemetry.logs import error_of
from specbuild.serve.telemetry.traces import Trace, Traces

from . import limits
from .errors import ApiError, api_error, json_response
from .metrics import Metrics
from .options import ServeOptions

_TOKENIZING = 2  # threads
_TEXTS = 64  # requests of /tokenize and the like at once; more are refused
_GONE = (ClientGoneError, asyncio.CancelledError, GeneratorExit)  # the client no longer waits for the answer
PING = b": ping\n\n"  # a comment of server-sent events, which no client shows
Done = Callable[[BaseException | None], None]


class CanarySide(Watcher, Protocol):
    """A server's side of a canary; see `Canary` and, on Ray, `ReplicaCanary`."""

    async def arm(
        self, served: ServedModel, body: Sampling, tenant: str | None
    ) -> tuple[ServedModel, str | None, Draw | None]:
        """Return the model for a request, its speculation (None: as it asks), and its draw if it counts."""
        ...


class Formats(Protocol):
    """Builds the `Format` of a generation; the format classes themselves are such builders."""

    prefix: str
    operation: str

    def __call__(self, generation: Generation, *given: Any) -> Format:
        """Return the format of a generation; `given`: the further arguments of `Format`."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    """Everything that the routes need: models, options, metrics, traces, watchers and thread pools."""

    models: Models
    options: ServeOptions
    metrics: Metrics
    traces: Traces = field(default_factory=Traces)
    oracle: Oracle | None = None
    canary: CanarySide | None = None
    watchers: Sequence[Watcher] = ()  # including oracle and canary
    rates: RateLimits = field(default_factory=RateLimits)
    supervisor: Supervisor | None = None  # of the watchers; None: nothing runs them
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_TOKENIZING, "specbuild-tokenize"))
    text_pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "specbuild-text"))
    text_admission: Admission = field(default_factory=lambda: Admission(1, _TEXTS - 1))
    grammars: GrammarCompiler = field(default_factory=GrammarCompiler)

    def drain(self) -> None:
        """Refuse new requests and report not ready from now on."""
        for model in self.models.all:
            model.admission.draining = True

    @property
    def refuses_unknown(self) -> bool:
        """Whether a field that no route knows is an error."""
        return self.options.extra_fields == "refuse"

    async def read(self, request: Request, kind: type[Kind]) -> Kind:
        """Return a request's body, which is read in a thread unless it is small; raises ApiError."""
        data = await json_of(request)
        if len(data) <= limits.SMALL_BODY_BYTES:
            return decoded(kind, data, self.refuses_unknown)
        return await asyncio.to_thread(decoded, kind, data, self.refuses_unknown)

    async def tokenizing(self, work: Callable[[], Any]) -> Any:
        """Run a function for a request that wants tokens and no text, beside generation; raises ApiError 429."""
        with self.text_admission.room(1) as ticket:
            found = await asyncio.get_running_loop().run_in_executor(self.text_pool, work)
            ticket.started()
            return found

    @property
    def requests(self) -> int:
        """Number of requests in progress in all models."""
        return sum(model.admission.requests for model in self.models.all)


async def json_of(request: Request) -> bytes:
    """Return the bytes of a body that is JSON by its header, which no page of another origin can claim unasked."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(400, "the body is not JSON by its header: send Content-Type: application/json")
    return await request.body()


async def answer(service: Service, request: Request, body: Sampling, kind: Formats, count: int) -> Response:
    """Answer a text-generation request, streamed or whole.

    Args:
        service: The server's models, options and watchers.
        request: The HTTP request; `Gate` has set `request_id`, `tenant` and `told` in its state.
        body: The request's fields.
        kind: Builds the format of the response.
        count: Number of prompts.

    Raises:
        ApiError: If the request is refused, or fails before its response begins.
        SpecbuildError: If tokenizing or decoding fails before the response begins.
        ClientGoneError: If the client leaves before the response begins.
    """
    options, state = service.options, request.state
    try:
        service.rates.begin(state.tenant)
    finally:
        state.headers = service.rates.headers(state.tenant)
    body = tools.narrowed(body) if isinstance(body, ChatRequest) else body
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if body.store:
        raise ApiError(400, "store: nothing is stored here: leave it out, or use /v1/responses", param="store")
    state.request_id = body.request_id or state.request_id
    served, way, draw = service.models.pick(body.model), None, None
    if service.canary:
        served, way, draw = await service.canary.arm(served, body, state.tenant)
    state.told.update(model=served.name, user=body.user or body.safety_identifier)
    speculates = service.oracle is None or served.name not in service.oracle.stopped
    caller = Caller(
        state.tenant,
        options.share_prefix_cache,
        options.request_timeout,
        speculates,
        options.reasoning_end,
        way,
        options.reading,
    )
    generation = Generation(
        served,
        body,
        caller,
        count,
        service.pool,
        service.grammars,
        service.metrics,
        state.request_id,
        state.tenant,
        draw,
    )
    form = kind(generation, f"{kind.prefix}-{state.request_id}", options.spec_metrics, options.return_token_ids)
    trace = service.traces.begin(kind.operation, served.name, request.headers, body)
    done = partial(_done, service, state.told, form, trace)
    if body.stream:
        return await _streamed(request, form, done)
    try:
        response = json_response(await unless_gone(request.receive, form.response()))
    except (Exception, asyncio.CancelledError) as error:
        done(error)
        raise
    done(None)
    return response


async def _streamed(request: Request, form: Format, done: Done) -> EventStream:
    """Return the response of a stream once its first event is there, or has been waited for long enough."""
    events = form.events()
    first = asyncio.ensure_future(anext(events))
    try:
        await unless_gone(request.receive, asyncio.wait({first}, timeout=limits.FIRST_EVENT_SECONDS))
        if first.done():
            first.result()
    except BaseException as error:
        await cancelled(first)
        await events.aclose()
        done(error)
        raise
    return EventStream(_events(form, first, events, done))


async def _events(
    form: Format, first: asyncio.Future[bytes], events: AsyncGenerator[bytes, None], done: Done
) -> AsyncGenerator[bytes, None]:
    """Yield comments until the first event is there, then all events; an error becomes the last one."""
    left: BaseException | None = None
    try:
        while not first.done():
            yield PING
            await asyncio.wait({first}, timeout=limits.PING_SECONDS)
        yield first.result()
        async for event in events:
            yield event
    except Exception as error:
        form.failed = error
        yield form.fault(error)
    except BaseException as error:
        left = error
        raise
    finally:
        await cancelled(first)
        await events.aclose()
        done(left)


def _done(
    service: Service, told: dict[str, Any], form: Format, trace: Trace | None, error: BaseException | None
) -> None:
    """Finish an ended request: fill its log line, count a rejection, and inform the watchers and the trace."""
    generation, kind = form.generation, None
    if isinstance(error, _GONE):
        kind = "499"
        told["error"] = "the client left"
        generation.status = 499
    elif failed := error or form.failed:
        said = api_error(failed)
        kind = said.code or str(said.status)
        generation.status = said.status
        if form.failed:  # after the first event the status can no longer change
            told.update(error_of(failed))
        elif said.code:
            service.metrics.rejected(generation.served.name, said.code)
    results = list(generation.results.values())
    told["prompt_tokens"] = sum(map(len, generation.prompts))
    told["output_tokens"] = sum(len(result.token_ids) for result in results)
    service.rates.spend(generation.tenant, told["prompt_tokens"] + told["output_tokens"])
    told["finish_reason"] = ",".join(sorted({result.finish_reason for result in results})) or None
    own = [result.metrics for result in results if result.metrics]
    if own:
        stats = [each.speculative_decoding for each in own]
        told["ttft"] = min((each.ttft for each in own if each.first_token is not None), default=None)
        told["queue_time"] = max(each.queue_time for each in own)
        told["draft_tokens"] = sum(each.num_draft_tokens for each in stats)
        told["accepted_tokens"] = sum(each.num_accepted_draft_tokens for each in stats)
    if service.options.log_requests:
        given = {name: getattr(generation.body, name, None) for name in ("prompt", "messages")}
        told["prompt"] = msgspec.json.encode({name: value for name, value in given.items() if value}).decode()
        told["text"] = json.dumps([result.text for result in results])
    for watcher in service.watchers:
        watcher.ended(generation)
    if trace:
        trace.end(told["prompt_tokens"], results, kind)
