"""Options under headings, in the help of commands that have many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

SAMPLING = (
    *("max_new_tokens", "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("frequency_penalty", "presence_penalty", "seed", "stop", "n", "logprobs", "deadline", "ignore_eos"),
)
STRUCTURED = ("json_schema", "regex", "grammar", "choice")
SPECULATION = (
    *("no_speculation", "drafter", "tree", "max_draft_tokens", "min_expected_speedup", "schedule", "show", "stats"),
    *("trees", "spec_metrics"),
)
LOADING = ("batch_size", "threads", "prefix_caching", "kv_cache_tokens", "resident", "gpu_weights_percent")
GENERATE = {
    "Sampling": SAMPLING,
    "Structured outputs": STRUCTURED,
    "Speculation": SPECULATION,
    "Machine": LOADING,
}
SERVE = {
    "Listening": (
        *("host", "port", "uds", "ui", "health_route", "predict_route", "ssl_certfile", "ssl_keyfile", "root_path"),
        *("allowed_origins", "api_key", "admin_host", "admin_port", "admin_uds", "admin_key", "shutdown_timeout"),
    ),
    "Requests": (
        *("served_model_name", "max_waiting", "max_queued_tokens", "request_timeout", "return_token_ids"),
        *("requests_per_minute", "tokens_per_minute"),
        *("extra_fields", "response_store", "share_prefix_cache", "chat_template"),
    ),
    "Tools and reasoning": ("reasoning_end", "reasoning_parser", "tool_call_parser", "auto_tool_choice"),
    "Speculation": SPECULATION,
    "Machine": (*LOADING, "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    "Shadow oracle and samples": (
        *("shadow", "shadow_dir", "shadow_keep_prompts", "shadow_action", "text_sample", "text_sample_share"),
    ),
    "Logs, metrics, cost": (
        *("log_requests", "metrics_prefix", "price_per_hour", "currency", "ledger", "ledger_rotate", "owner"),
    ),
    "Canary": ("canary",),
    "Ray Serve": (
        *("use_ray", "num_replicas", "autoscale", "address", "target_ongoing_requests", "max_ongoing_requests"),
        *("max_queued_requests", "upscale_delay_s", "downscale_delay_s", "num_cpus", "num_gpus", "routing"),
    ),
}
BUILD = {
    "Models": ("target", "draft", "output", "recipe", "force", "dry_run"),
    "Precision": (
        *("precision", "draft_precision", "tensor_type", "output_tensor_type", "token_embedding_type", "calibration"),
        *("calib_size", "calib_seed", "calibration_cache", "max_kl"),
    ),
    "Shapes and speculation": ("draft_vocab_size", "max_seq_len", "max_batch_size", "buckets", "tree", "tune"),
    "Devices": (
        *("backend", "cuda_arch", "arch", "attention", "kv_cache_dtype", "block_size", "prompt_chunk"),
        *("builder_optimization_level", "workspace", "timing_cache", "weight_streaming", "version_compatible"),
        *("hardware_compatible",),
    ),
}


def grouped(headings: Mapping[str, Sequence[str]]) -> type[click.Command]:
    """A class of commands whose help has options under headings.

    Args:
        headings: Names of parameters by heading. A name also stands for those that begin with it and an underscore,
            unless they have a heading of their own. What has none is listed first, under "Options".
    """
    exact = {name: heading for heading, names in headings.items() for name in names}

    def heading_of(name: str) -> str:
        if name in exact:
            return exact[name]
        return exact.get(name.split("_")[0], "Options")

    class Grouped(click.Command):
        """Click's command with its own list of options."""

        def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in ("Options", *headings)}
            for parameter in self.get_params(ctx):
                if record := parameter.get_help_record(ctx):
                    rows[heading_of(parameter.name or "")].append(record)
            for heading, records in rows.items():
                if records:
                    with formatter.section(heading):
                        formatter.write_dl(records)

    return Grouped
