"""`specbuild serve`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from specbuild.runtime import Limits, LoadOptions
from specbuild.runtime.errors import OptionError

from . import generate, interrupts, operating_flags, ray_flags
from .help_groups import SERVE, grouped

API_KEYS = "SPECBUILD_API_KEY"  # several are separated by commas
_MAX_CONFIG = 1 << 20  # bytes
_LIMITS = ("max_draft_tokens", "min_expected_speedup", "schedule")
_LOADS = ("drafter", "threads", "prefix_caching", "kv_cache_tokens", "resident", "gpu_weights_percent")
_READS = ("tool_call_parser", "auto_tool_choice", "reasoning_parser")
_SPENDS = ("price_per_hour", "currency", "ledger", "ledger_rotate", "owner")
_GENERATES = {option.name: option for option in generate.command.params}


def _from_file(context: click.Context, _parameter: click.Parameter, file: Path | None) -> None:
    """Make a YAML file's options the defaults of the command line; raise OptionError for a bad file."""
    if file is None:
        return
    import yaml

    try:
        with file.open("rb") as source:
            text = source.read(_MAX_CONFIG + 1)
        if len(text) > _MAX_CONFIG:
            raise OptionError(f"{file} has more than {_MAX_CONFIG} bytes: give a file of options")
        options = yaml.safe_load(text)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        problem = " ".join(str(getattr(error, "problem", None) or getattr(error, "strerror", None) or error).split())
        raise OptionError(
            f"{file} cannot be read as YAML ({problem[:200]}): give options by their flags' names"
        ) from None
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise OptionError(f"{file} is no table of options: write `port: 8000`, one option to a line")
    context.default_map = {**(context.default_map or {}), **dict(_renamed(context, file, options))}


def _renamed(context: click.Context, file: Path, options: dict[str, Any]) -> Any:
    """Yield a file's options with click's names; values of repeatable options become lists."""
    flags = {
        flag.removeprefix("--"): each
        for each in context.command.params
        if isinstance(each, click.Option)
        for flag in (*each.opts, *each.secondary_opts)
    }
    for name, value in options.items():
        option = flags.get(name.replace("_", "-"))
        if option is None or option.name in ("config", "help"):
            raise OptionError(f"{file} has {name[:80]!r}, which is no option of serve: see specbuild serve --help")
        if isinstance(value, dict | list) and not option.multiple:
            value = json.dumps(value)
        elif option.multiple and not isinstance(value, list):
            value = [value]
        yield option.name, value


@click.command(name="serve", cls=grouped(SERVE))
@click.argument("bundles", nargs=-1, required=True, metavar="[NAME=]BUNDLE…")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_from_file,
    help="A YAML file of these options, by their names; the command line goes before it.",
)
@click.option("--check", is_flag=True, help="Load everything as it would be served, say so, and end.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at; 0.0.0.0 is all.")
@click.option(
    "--port", type=int, default=8000, show_default=True, envvar="AIP_HTTP_PORT", help="0 is any that is free."
)
@click.option("--ui", is_flag=True, help="A page at / to chat with, which shows what speculation does.")
@click.option("--health-route", envvar="AIP_HEALTH_ROUTE", metavar="PATH", help="Another name of /health.")
@click.option("--predict-route", envvar="AIP_PREDICT_ROUTE", metavar="PATH", help="Another name of /predict.")
@click.option("--uds", type=click.Path(path_type=Path), metavar="FILE", help="Listen at a Unix socket instead.")
@click.option(
    "-a",
    "--served-model-name",
    "--alias",
    multiple=True,
    metavar="NAME",
    help="The bundle's name in requests; may be repeated.",
)
@click.option("--api-key", multiple=True, help=f"Needed for all but health; may be repeated, or {API_KEYS}=A,B.")
@click.option("--admin-host", default="127.0.0.1", show_default=True, help="The address of --admin-port.")
@click.option("--admin-port", type=int, metavar="PORT", help="Operators' routes: metrics and health without a key.")
@click.option("--admin-uds", type=click.Path(path_type=Path), metavar="FILE", help="A Unix socket for these instead.")
@click.option("--admin-key", envvar="SPECBUILD_ADMIN_KEY", metavar="KEY", help="Needed for a canary's routes.")
@click.option("--ssl-certfile", type=click.Path(path_type=Path), metavar="FILE", help="For TLS.")
@click.option("--ssl-keyfile", type=click.Path(path_type=Path), metavar="FILE", help="For TLS.")
@click.option("--allowed-origins", metavar="JSON", help='Web pages that may call: ["https://example.com"] or ["*"].')
@click.option("--root-path", default="", metavar="PATH", help="Where a proxy serves this, such as /llm.")
@click.option(
    "-np",
    "--max-num-seqs",
    "--parallel",
    type=int,
    help="Sequences that share a step; what the bundle was built for by default.",
)
@click.option("--max-num-batched-tokens", type=int, metavar="N", help="Tokens of a step at most.")
@click.option("--max-model-len", type=int, metavar="N", help="Tokens of a text at most, the bundle's by default.")
@click.option("--max-waiting", type=int, default=256, show_default=True, help="Samples that wait for a slot at most.")
@click.option("--max-queued-tokens", type=int, metavar="N", help="Tokens of prompts that wait at most.")
@click.option("--requests-per-minute", type=int, metavar="N", help="Requests of each API key at most.")
@click.option("--tokens-per-minute", type=int, metavar="N", help="Tokens of each API key at most.")
@click.option(
    "--shutdown-timeout", type=float, default=30.0, show_default=True, help="Seconds that a drain takes at most."
)
@click.option(
    "--request-timeout",
    type=float,
    metavar="SECONDS",
    help="The time of a request at most, its time in the queue included.",
)
@click.option("--price-per-hour", type=float, metavar="AMOUNT", help="What the machine costs, for specbuild cost.")
@click.option(
    "--currency",
    default="USD",
    show_default=True,
    metavar="CODE",
    help="The currency of --price-per-hour, by ISO 4217.",
)
@click.option("--ledger", type=click.Path(path_type=Path), metavar="FILE", help="Append a row for each request.")
@click.option("--ledger-rotate", metavar="day|SIZE", help="Begin another ledger each day, or from 100MB on.")
@click.option("--owner", multiple=True, metavar="KEY=VALUE", help="Whose it is, for the ledger; may be repeated.")
@click.option(
    "--chat-template",
    "--chat-template-file",
    metavar="FILE|hermes",
    help="Instead of the bundle's; hermes reads tools.",
)
@click.option("--return-token-ids", is_flag=True, help="Responses have token ids, unless a request says otherwise.")
@click.option(
    "--per-request-spec-decode-metrics",
    "spec_metrics",
    type=click.Choice(["none", "summary", "detailed"]),
    default="summary",
    show_default=True,
    help="What each response says of its speculation.",
)
@click.option("--metrics-prefix", type=click.Choice(["specbuild:", "vllm:"]), default="specbuild:", show_default=True)
@click.option("--log-requests", is_flag=True, help="The log has prompts and texts too.")
@click.option(
    "--extra-fields",
    type=click.Choice(["refuse", "ignore"]),
    default="refuse",
    show_default=True,
    help="What becomes of fields that nothing here reads.",
)
@click.option(
    "--reasoning-end",
    metavar="TOKEN",
    help="Structured outputs begin after this token, such as </think>; a request's reasoning_end goes before it.",
)
@click.option(
    "--reasoning-parser",
    metavar="NAME",
    help="Tells reasoning from content: qwen3, deepseek_r1, mistral, or START,END as <think>,</think>.",
)
@click.option(
    "--tool-call-parser",
    default="hermes",
    show_default=True,
    metavar="NAME",
    help="The form of the model's calls of tools: hermes, llama3_json, mistral, or regex:EXPRESSION.",
)
@click.option(
    "--enable-auto-tool-choice/--disable-auto-tool-choice",
    "auto_tool_choice",
    default=True,
    show_default=True,
    help="Whether a model may call tools of its own accord.",
)
@click.option(
    "--response-store",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keep what /v1/responses stores in an SQLite file, over restarts; in memory by default.",
)
@click.option("--share-prefix-cache", is_flag=True, help="Callers of different API keys share cached prompts.")
@click.option(
    "--shadow",
    type=float,
    default=0.0,
    show_default=True,
    metavar="SHARE",
    help="The share of texts, 0 to 1, that are decoded again without speculation in idle time, and compared.",
)
@click.option(
    "--shadow-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Has a file for each text that differs, for specbuild replay.",
)
@click.option("--shadow-keep-prompts", is_flag=True, help="These files have the prompt's tokens too.")
@click.option(
    "--shadow-action",
    type=click.Choice(["log", "off"]),
    default="log",
    show_default=True,
    help="When a text differs: say so, or end the model's speculation as well.",
)
@click.option(
    "--text-sample",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Has live texts, for specbuild distill.",
)
@click.option(
    "--text-sample-share",
    type=float,
    default=0.1,
    show_default=True,
    metavar="SHARE",
    help="The share of texts that go there.",
)
def command(
    bundles: tuple[str, ...],
    served_model_name: tuple[str, ...],
    api_key: tuple[str, ...],
    allowed_origins: str | None,
    max_num_batched_tokens: int | None,
    max_model_len: int | None,
    chat_template: str | None,
    check: bool,
    **values: Any,
) -> None:
    """Serve bundles by OpenAI's API: chats, completions, metrics, health.

    \b
    specbuild serve pycode.bundle --port 8000
    """
    interrupts.exit_at_once()
    draft_tokens, speedup, schedule = (values.pop(name) for name in _LIMITS)
    limits = Limits(draft_tokens, speedup, schedule or ())
    loads = {name: values.pop(name) for name in _LOADS}
    load = LoadOptions(
        **loads,
        limits=limits,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        chat_template=_template(chat_template),
    )
    from specbuild.serve.cost.options import CostOptions
    from specbuild.serve.http import server
    from specbuild.serve.options import ServeOptions, environment_keys
    from specbuild.serve.output_parsers.reading import Reading
    from specbuild.serve.request.models import names_of
    from specbuild.serve.telemetry import logs

    canary = operating_flags.canary_options(values)
    scale = ray_flags.ray_options(values)
    cost = CostOptions(**{name: values.pop(name) for name in _SPENDS})
    reading = Reading(**{name: values.pop(name) for name in _READS})
    operating: dict[str, Any] = {"canary": canary, "cost": cost, "reading": reading}
    options = ServeOptions(
        **values, **operating, api_keys=api_key or environment_keys(), allowed_origins=_origins(allowed_origins)
    )
    log = logs.RequestLog(sys.stderr, options.log_requests)
    logs.install(log)
    bundles_by_name = names_of(list(bundles), served_model_name)
    if check:
        if scale:
            raise OptionError("--check loads bundles here, not on replicas: leave out --ray")
        server.check(bundles_by_name, options, load, log)
        click.echo("specbuild: this can be served", err=True)
        return
    if scale:
        scale.prepare(options)
        from specbuild.serve.ray import application as ray_app

        raise click.exceptions.Exit(ray_app.run(bundles_by_name, options, load, scale, log))
    raise click.exceptions.Exit(server.run(bundles_by_name, options, load, log))


command.params += [_GENERATES[name] for name in (*_LIMITS, *_LOADS)]
command.params += [*operating_flags.OPTIONS, *ray_flags.OPTIONS]


def _origins(value: str | None) -> tuple[str, ...]:
    if value is None:
        return ()
    try:
        origins = json.loads(value)
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(each, str) for each in origins):
        raise OptionError(f'--allowed-origins is a list in JSON, such as ["https://example.com"], not {value[:80]}')
    return tuple(origins)


def _template(value: str | None) -> str | None:
    from specbuild.serve.http.chat_templates import template_text

    return None if value is None else template_text(value)
