"""OpenVINO GenAI's worker: LLMPipeline on IR by optimum-intel, with float32 weights, arithmetic and caches."""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from conversion import converted
from protocol import Decoded, serve

FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
REPORTED = (
    *FLOAT32,
    "INFERENCE_NUM_THREADS",
    "NUM_STREAMS",
    "ENABLE_HYPER_THREADING",
    "ENABLE_CPU_PINNING",
    "SCHEDULING_CORE_TYPE",
)

MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("paged", {}),
    "plain, stateful": ("stateful", {}),
    **{f"lookup {k}": ("lookup", {"num_assistant_tokens": k, "max_ngram_size": 3}) for k in (5, 10)},
    **{f"draft {k}": ("draft", {"num_assistant_tokens": k}) for k in (3, 5, 8)},
    "draft, sure of 0.4": ("draft", {"assistant_confidence_threshold": 0.4}),
}


class OpenVINO:
    """A pipeline for each way of drafting; a mode is a pipeline with a request's options."""

    modes = tuple(MODES)

    def __init__(self, job: dict[str, Any]) -> None:
        folder = Path(job["folder"])
        target, draft = (str(converted(Path(job[name]), folder, _export(job[name]))) for name in ("target", "draft"))
        options = {"INFERENCE_NUM_THREADS": job["threads"], "NUM_STREAMS": 1, **(FLOAT32 if job["float32"] else {})}
        paged = options | {"scheduler_config": _scheduler()}
        self._pipelines = {
            "stateful": genai.LLMPipeline(target, "CPU", ATTENTION_BACKEND="SDPA", **options),
            "paged": genai.LLMPipeline(target, "CPU", **paged),
            "lookup": genai.LLMPipeline(target, "CPU", prompt_lookup=True, **paged),
            "draft": genai.LLMPipeline(target, "CPU", draft_model=genai.draft_model(draft, "CPU", **options), **paged),
        }
        self.versions = {name: version(name) for name in ("openvino", "openvino-genai", "optimum-intel")}
        compiled = ov.Core().compile_model(f"{target}/openvino_model.xml", "CPU", options)
        self.settings = {key: _name(compiled.get_property(key)) for key in REPORTED} | {"prefix_caching": False}

    def decode(self, mode: str, tokens: list[int], n: int) -> Decoded:
        """Decode and time `generate`; the time of the first token is the pipeline's own, without a streamer."""
        pipeline, options = MODES[mode]
        config = genai.GenerationConfig(max_new_tokens=n, ignore_eos=True, do_sample=False, **options)
        ids = np.array([tokens], dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        started = time.perf_counter()
        result = self._pipelines[pipeline].generate(inputs, config)
        total = time.perf_counter() - started
        return Decoded(list(result.tokens[0]), result.perf_metrics.get_ttft().mean / 1e3, total)


def _export(source: str) -> Any:
    optimum = str(Path(sys.executable).with_name("optimum-cli"))
    options = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
    return lambda out: [optimum, "export", "openvino", "--model", source, *options, str(out)]


def _scheduler() -> genai.SchedulerConfig:
    """Return a scheduler for one request, without prefix caching and with a GB of cache."""
    config = genai.SchedulerConfig()
    config.cache_size, config.enable_prefix_caching, config.max_num_batched_tokens = 1, False, 1 << 20
    return config


def _name(value: Any) -> Any:
    if isinstance(value, int):
        return value
    return value.to_string() if isinstance(value, ov.Type) else str(value)


if __name__ == "__main__":
    serve(OpenVINO)
