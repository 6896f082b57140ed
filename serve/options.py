"""How a server listens and answers; validated on construction."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from specbuild.runtime.errors import OptionError, shown
from specbuild.serve.canary.assignment import CanaryOptions
from specbuild.serve.cost.options import CostOptions
from specbuild.serve.output_parsers.reading import Reading

API_KEYS = "SPECBUILD_API_KEY"  # environment variable: several keys are separated by commas
ADMIN_KEY = "SPECBUILD_ADMIN_KEY"  # environment variable: the operator's key
Extra = Literal["refuse", "ignore"]
SpecMetrics = Literal["none", "summary", "detailed"]
ShadowAction = Literal["log", "off"]


def environment_keys() -> tuple[str, ...]:
    """Return the API keys that the environment has."""
    return tuple(key.strip() for key in os.environ.get(API_KEYS, "").split(",") if key.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of a server.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 is any free one.
        uds: Unix socket to listen on instead.
        api_keys: Keys, one of which every request except health probes needs; without any, no key is needed.
        admin_host: Address on which operators' routes listen, if admin_port is given.
        admin_port: Their port; 0 is any free one, None: there is none.
        admin_uds: Unix socket of the operators' routes instead.
        admin_key: Key that the routes of a canary need; None: they are refused.
        ssl_certfile: Certificate in PEM, for TLS.
        ssl_keyfile: The certificate's key in PEM.
        allowed_origins: Origins of web pages that may call the server (CORS).
        root_path: Path under which a proxy serves this server.
        max_num_seqs: Maximum sequences that share a step; None: what each bundle was built for.
        max_waiting: Maximum samples of each model that wait for a slot.
        max_queued_tokens: Maximum prompt tokens of each model that wait for their first token; None: any number.
        requests_per_minute: Maximum requests of each API key in a minute; None: any number.
        tokens_per_minute: Maximum tokens of each API key in a minute, of prompts and texts; None: any number.
        shutdown_timeout: Maximum seconds of a drain.
        request_timeout: Maximum seconds of a request, its time in the queue included; None: any.
        cost: What the machine costs, and where its ledger is.
        return_token_ids: Whether responses have token ids if the request does not say.
        spec_metrics: How much each response says about its speculation.
        metrics_prefix: Prefix of the metrics that vLLM has too.
        log_requests: Whether the log has prompts and texts.
        extra_fields: Whether fields that no route knows are refused or ignored.
        share_prefix_cache: Whether requests of different API keys share cached prompts.
        shadow: Share of texts, 0 to 1, that the shadow oracle decodes again.
        shadow_dir: Folder with a file for each text that differs; None: none is kept.
        shadow_keep_prompts: Whether these files have the prompt's tokens.
        shadow_action: "off" ends a model's speculation with the first text that differs; "log" only logs it.
        reasoning_end: Token after which structured outputs begin; None: they begin at once.
        reading: How tool calls and reasoning are read from texts.
        response_store: SQLite file for what /v1/responses stores; None: memory.
        canary: What a canary compares; None: there is none.
        text_sample: File for a sample of live texts; None: none.
        text_sample_share: Share of texts, 0 to 1, that go into the sample.
        health_route: Another name of /health, if Vertex AI asks for one.
        predict_route: Another name of /predict, if Vertex AI asks for one.
        ui: Serve a page at / to chat with.

    Raises:
        OptionError: If a value is wrong, or does nothing without another one.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    api_keys: tuple[str, ...] = ()
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    admin_uds: Path | None = None
    admin_key: str | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    max_num_seqs: int | None = None
    max_waiting: int = 256
    max_queued_tokens: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    shutdown_timeout: float = 30.0
    request_timeout: float | None = None
    cost: CostOptions = field(default_factory=CostOptions)
    return_token_ids: bool = False
    spec_metrics: SpecMetrics = "summary"
    metrics_prefix: str = "specbuild:"
    log_requests: bool = False
    extra_fields: Extra = "refuse"
    share_prefix_cache: bool = False
    shadow: float = 0.0
    shadow_dir: Path | None = None
    shadow_keep_prompts: bool = False
    shadow_action: ShadowAction = "log"
    reasoning_end: str | None = None
    reading: Reading = field(default_factory=Reading)
    response_store: Path | None = None
    canary: CanaryOptions | None = None
    text_sample: Path | None = None
    text_sample_share: float = 0.1
    ui: bool = False
    health_route: str | None = None
    predict_route: str | None = None

    def __post_init__(self) -> None:
        for name in ("port", "admin_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65535:
                raise OptionError(f"{name} must be 0…65535, not {shown(getattr(self, name))}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise OptionError("TLS needs both: give --ssl-certfile and --ssl-keyfile")
        for path in (self.ssl_certfile, self.ssl_keyfile):
            if path is not None and not path.is_file():
                raise OptionError(f"{path} is not a file: give a certificate and its key in PEM")
        keys = (*self.api_keys, *(() if self.admin_key is None else (self.admin_key,)))
        if any(not key.isascii() or not key.isprintable() or not key.strip() for key in keys):
            raise OptionError("an API key, or admin_key, has printable ASCII characters, at least one: give another")
        if self.admin_key in self.api_keys:
            raise OptionError("admin_key is one of the API keys: give operators a key of their own")
        for name in ("shutdown_timeout", "request_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise OptionError(f"{name} must be seconds from 0 on, not {shown(value)}")
        if self.request_timeout == 0:
            raise OptionError("request_timeout must be above 0: leave it out for none")
        if self.max_waiting < 1:
            raise OptionError(f"max_waiting must be a whole number of at least 1, not {shown(self.max_waiting)}")
        for name in ("max_queued_tokens", "requests_per_minute", "tokens_per_minute"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise OptionError(f"{name} must be at least 1, not {shown(value)}")
        if self.metrics_prefix not in ("specbuild:", "vllm:"):
            raise OptionError(f"metrics_prefix is specbuild: or vllm:, not {shown(self.metrics_prefix)}")
        kinds = (self.spec_metrics, SpecMetrics), (self.extra_fields, Extra), (self.shadow_action, ShadowAction)
        for value, known in kinds:
            if value not in get_args(known):
                raise OptionError(f"{shown(value)} is none of {', '.join(get_args(known))}")
        for name in ("shadow", "text_sample_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{name} is a share of texts, 0 to 1, not {shown(getattr(self, name))}")
        if self.text_sample is not None and not self.text_sample.resolve().parent.is_dir():
            raise OptionError(f"text_sample {self.text_sample} is in no folder that exists: make it")
        if self.shadow_dir is not None and not self.shadow_dir.is_dir():
            raise OptionError(f"{self.shadow_dir} is not a folder: make it, for what the shadow oracle keeps")
        if self.shadow_dir is None and self.shadow_keep_prompts:
            raise OptionError("shadow_keep_prompts needs shadow_dir, where they are kept: give --shadow-dir")
        if not self.shadow and (self.shadow_dir or self.shadow_action != "log"):
            raise OptionError("shadow_dir and shadow_action do nothing without a share: give --shadow")
        if self.reasoning_end == "":
            raise OptionError("reasoning_end names a token, such as </think>: leave it out for none")
        if self.reasoning_end and self.reading.reasoning:
            raise OptionError("--reasoning-parser knows what ends a reasoning: leave --reasoning-end out")
        for route in (self.health_route, self.predict_route):
            if route is not None and not (route.startswith("/") and route.isprintable()):
                raise OptionError(f"a route begins with /, unlike {shown(route)}")
        if self.root_path and not (self.root_path.startswith("/") and self.root_path.isprintable()):
            raise OptionError(f"root_path begins with /, unlike {shown(self.root_path)}")

    @property
    def operators(self) -> ServeOptions | None:
        """The options of the operators' listener; None if there is none."""
        if self.admin_port is None and self.admin_uds is None:
            return None
        own = replace(self, api_keys=(), allowed_origins=(), root_path="", ui=False)
        return replace(own, host=self.admin_host, port=self.admin_port or 0, uds=self.admin_uds)
