"""transformers' worker: `generate` plain, with an assistant model, and with prompt lookup."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch
from protocol import Decoded, serve
from transformers import AutoModelForCausalLM
from transformers.generation import BaseStreamer

FIXED = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
DRAFTS = {"draft": {}, "draft 4": FIXED | {"num_assistant_tokens": 4}}  # {}: defaults, up to 20 while confident
CALLS = {"plain": {}, "lookup 10": {"prompt_lookup_num_tokens": 10}}


class FirstToken(BaseStreamer):
    """A streamer that records when the first new token came; the first put is the prompt."""

    def __init__(self) -> None:
        self.puts, self.at = 0, 0.0

    def put(self, value: Any) -> None:
        """Record the time of the second call."""
        self.puts += 1
        if self.puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        """Do nothing: there is no text to flush."""


class Transformers:
    """Both models, unchanged but in float32; a mode is a set of options of the draft or of the call."""

    modes = (*CALLS, *DRAFTS)

    def __init__(self, job: dict[str, Any]) -> None:
        torch.set_num_threads(job["threads"])
        self._target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
        self._target.generation_config.eos_token_id = None
        self._drafts = {}
        for mode, options in DRAFTS.items():
            self._drafts[mode] = draft = AutoModelForCausalLM.from_pretrained(job["draft"], dtype=torch.float32).eval()
            draft.generation_config.eos_token_id = None
            for key, value in options.items():
                setattr(draft.generation_config, key, value)
        self.versions = {name: version(name) for name in ("transformers", "torch")}
        self.settings = {
            "threads": torch.get_num_threads(),
            "dtype": str(self._target.dtype),
            "attention": self._target.config._attn_implementation,
        }

    @torch.inference_mode()
    def decode(self, mode: str, tokens: list[int], n: int) -> Decoded:
        """Decode and time `generate`; a streamer times the first token."""
        options = {"assistant_model": self._drafts[mode]} if mode in self._drafts else CALLS[mode]
        ids, streamer = torch.tensor([tokens]), FirstToken()
        started = time.perf_counter()
        out = self._target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=n,
            pad_token_id=0,
            streamer=streamer,
            **options,
        )
        total = time.perf_counter() - started
        return Decoded(out[0, len(tokens) :].tolist(), streamer.at - started, total)


if __name__ == "__main__":
    serve(Transformers)
