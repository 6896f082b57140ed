"""How a server listens and answers; validated on construction."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from specbuild.runtime.errors import OptionError, shown
from specbuild.serve.canary.assignment import CanaryOptions
from specbuild.serve.cost.options import CostOptions
from specbuild.serve.output_parsers.reading import Reading

from .option_types import Amount, Count, Port, Share, check_types

API_KEYS = "SPECBUILD_API_KEY"  # environment variable: several keys are separated by commas
ADMIN_KEY = "SPECBUILD_ADMIN_KEY"  # environment variable: the operator's key
SpecMetrics = Literal["none", "summary", "detailed"]


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
    port: Port = 8000
    uds: Path | None = None
    api_keys: tuple[str, ...] = ()
    admin_host: str = "127.0.0.1"
    admin_port: Port | None = None
    admin_uds: Path | None = None
    admin_key: str | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    max_num_seqs: Count | None = None
    max_waiting: Count = 256
    max_queued_tokens: Count | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    shutdown_timeout: Amount = 30.0
    request_timeout: Amount | None = None
    cost: CostOptions = field(default_factory=CostOptions)
    return_token_ids: bool = False
    spec_metrics: SpecMetrics = "summary"
    metrics_prefix: Literal["specbuild:", "vllm:"] = "specbuild:"
    log_requests: bool = False
    extra_fields: Literal["refuse", "ignore"] = "refuse"
    share_prefix_cache: bool = False
    shadow: Share = 0.0
    shadow_dir: Path | None = None
    shadow_keep_prompts: bool = False
    shadow_action: Literal["log", "off"] = "log"
    reasoning_end: str | None = None
    reading: Reading = field(default_factory=Reading)
    response_store: Path | None = None
    canary: CanaryOptions | None = None
    text_sample: Path | None = None
    text_sample_share: Share = 0.1
    ui: bool = False
    health_route: str | None = None
    predict_route: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
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
        if self.request_timeout == 0:
            raise OptionError("request_timeout must be above 0: leave it out for none")
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
        for name in ("root_path", "health_route", "predict_route"):
            if (route := getattr(self, name)) and not (route.startswith("/") and route.isprintable()):
                raise OptionError(f"{name} begins with /, unlike {shown(route)}")

    @property
    def operators(self) -> ServeOptions | None:
        """The options of the operators' listener; None if there is none."""
        if self.admin_port is None and self.admin_uds is None:
            return None
        own = replace(self, api_keys=(), allowed_origins=(), root_path="", ui=False)
        return replace(own, host=self.admin_host, port=self.admin_port or 0, uds=self.admin_uds)
