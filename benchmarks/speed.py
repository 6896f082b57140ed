"""Speed, as ratios in one run: transformers, plain decoding and speculation, interleaved prompt by prompt.

python benchmarks/speed.py [--out DIR]

Temperature 0, all cores, batch 1, float32. Tokens/s are of the decode phase: output tokens after the first over the
time after the first; whole requests, prompt included, are reported beside them. `host_share` is the loop's own time,
all but model execution, as a share of all rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from specbuild.runtime import Engine, SamplingParams

NEW_TOKENS = 128
TREES = ("chain:4", "topk:2,3", "topk:4,4", "best:5", "best:16")


class Contender:
    """One way of decoding: tokens and seconds so far."""

    def __init__(self, run: Callable[[str], tuple[int, float, float]]) -> None:
        self.run, self.tokens, self.first, self.seconds, self.requests = run, 0, 0.0, 0.0, 0

    def turn(self, prompt: str) -> None:
        """Decode one prompt."""
        tokens, first, seconds = self.run(prompt)
        self.tokens, self.first, self.seconds = self.tokens + tokens, self.first + first, self.seconds + seconds
        self.requests += 1

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first token."""
        return (self.tokens - self.requests) / (self.seconds - self.first)

    @property
    def request_rate(self) -> float:
        """Tokens a second, prompt included."""
        return self.tokens / self.seconds


def ours(engine: Engine, speculation: str, sink: dict[str, Any]) -> Callable[[str], tuple[int, float, float]]:
    """specbuild with a tree, or "off"; `sink` collects where the time went."""
    params = SamplingParams(max_new_tokens=NEW_TOKENS, speculation=speculation)

    def run(prompt: str) -> tuple[int, float, float]:
        stats = engine.stats
        before = (stats.total, stats.loop, stats.rounds)
        result = engine.generate(prompt, params)[0]
        if result.error:
            raise result.error
        for key, now, then in zip(
            ("total", "loop", "rounds"), (stats.total, stats.loop, stats.rounds), before, strict=True
        ):
            sink[key] = sink.get(key, 0) + now - then
        drafting = result.metrics.speculative_decoding
        sink["accepted"] = sink.get("accepted", 0) + drafting.num_accepted_draft_tokens
        sink["steps"] = sink.get("steps", 0) + drafting.num_spec_steps
        return len(result.token_ids), result.metrics.ttft, result.metrics.e2el

    return run


def hugging_face(folder: Path) -> Callable[[str], tuple[int, float, float]]:
    """`transformers.generate`, greedy, float32; the first token is timed by a call of its own."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def generate(ids: Any, count: int) -> tuple[int, float]:
        started = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
            )
        return out.shape[1] - ids.shape[1], time.perf_counter() - started

    def run(prompt: str) -> tuple[int, float, float]:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        first = generate(ids, 1)[1]
        tokens, seconds = generate(ids, NEW_TOKENS)
        return tokens, first, seconds

    return run


def measure(bundle: Path, target: Path, prompts: list[str]) -> dict[str, Any]:
    """All contenders on one bundle."""
    sinks: dict[str, dict[str, Any]] = {}
    with (
        Engine.load(bundle, prefix_caching=False) as both,
        Engine.load(bundle, drafter="model", prefix_caching=False) as model,
        Engine.load(bundle, drafter="ngram", prefix_caching=False) as ngram,
    ):
        contenders = {"transformers": Contender(hugging_face(target))}
        for name, engine, speculation in (
            ("plain", both, "off"),
            ("default", both, "auto"),
            *((f"model, {tree}", model, tree) for tree in TREES),
            ("ngram, best:5", ngram, "best:5"),
        ):
            contenders[name] = Contender(ours(engine, speculation, sinks.setdefault(name, {})))
        for contender in contenders.values():
            contender.run(prompts[0])
        for sink in sinks.values():
            sink.clear()
        for prompt in prompts:
            for contender in contenders.values():
                contender.turn(prompt)
    plain = contenders["plain"]
    rows = {}
    for name, contender in contenders.items():
        rows[name] = {
            "decode_tokens_per_s": round(contender.decode_rate, 1),
            "decode_speedup_over_plain": round(contender.decode_rate / plain.decode_rate, 2),
            "request_speedup_over_plain": round(contender.request_rate / plain.request_rate, 2),
            "ttft_ms": round(contender.first / contender.requests * 1e3, 1),
        }
        if name in sinks:
            sink = sinks[name]
            rows[name] |= {
                "mean_acceptance_length": round(1 + sink["accepted"] / max(sink["steps"], 1), 2),
                "round_ms": round(sink["total"] / sink["rounds"] * 1e3, 3),
                "host_share": round(sink["loop"] / sink["total"], 4),
            }
    return rows


def main() -> None:
    """Measure both bundles and save."""
    out = common.arguments(__doc__).out
    built, prompts = common.bundles(out), common.prompts()
    result = {
        "new_tokens": NEW_TOKENS,
        "pycode": measure(built["pycode"], common.PAIR / "target", prompts),
        "wide": measure(built["wide"], out / "wide", prompts[::2]),
    }
    common.save(out, "speed", result)


if __name__ == "__main__":
    main()
