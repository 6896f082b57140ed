"""onnxruntime-genai's worker: float32 graphs by its own model builder; plain, with a draft model, and with lookup."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnxruntime_genai as genai
from conversion import converted
from protocol import Decoded, serve

DRAFT_THREADS = 1  # with 2, its two spinning thread pools compete for two cores and halve its speed

MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("alone", {}),
    **{f"lookup 8, {n}-grams": ("alone", {"ngram_size": n, "max_draft_tokens": 8}) for n in (3, 4)},
    "lookup 8, chained": ("alone", {"ngram_size": 3, "max_draft_tokens": 8, "ngram_chained_lookup": True}),
    **{f"draft {k}": ("drafted", {"max_draft_tokens": k}) for k in (3, 5)},
    "draft, adaptive": ("drafted", {"min_adaptive_k": 2}),
}


class OnnxRuntimeGenAI:
    """The target with and without a draft; a mode is one of the two, with a generator's speculative options."""

    modes = tuple(MODES)

    def __init__(self, job: dict[str, Any]) -> None:
        folder = Path(job["folder"])
        target, draft = (converted(Path(job[name]), folder, _build(job[name])) for name in ("target", "draft"))
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            self._models = {
                "alone": _model(Path(scratch) / "alone", target, None, job["threads"]),
                "drafted": _model(Path(scratch) / "drafted", target, draft, job["threads"]),
            }
        self.versions = {name: version(name) for name in ("onnxruntime-genai", "onnxruntime")}
        self.settings = {"threads": job["threads"], "draft_threads": DRAFT_THREADS, "precision": "fp32"}

    def decode(self, mode: str, tokens: list[int], n: int) -> Decoded:
        """Decode with the documented loop, which generates one token per iteration."""
        name, options = MODES[mode]
        started = time.perf_counter()
        params = genai.GeneratorParams(self._models[name])
        params.set_search_options(max_length=len(tokens) + n, do_sample=False)
        if options:
            params.set_speculative_options(**options)
        generator = genai.Generator(self._models[name], params)
        generator.append_tokens(tokens)
        generator.generate_next_token()
        first = time.perf_counter() - started
        while not generator.is_done():
            generator.generate_next_token()
        out = generator.get_sequence(0)
        total = time.perf_counter() - started
        return Decoded([int(token) for token in out[len(tokens) :]], first, total)


def _build(source: str) -> Any:
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-p", "fp32", "-e", "cpu"]
    return lambda out: [*command, "-o", str(out), "-c", str(out.with_name("cache"))]


def _model(folder: Path, target: Path, draft: Path | None, threads: int) -> genai.Model:
    """Load a copy of `target` with its threads and, if given, a draft.

    A model must have an end-of-text token, so it gets the vocabulary's last one; if that is emitted, tokens are missing
    and run.py reports it.
    """
    shutil.copytree(target, folder, copy_function=os.link, ignore=shutil.ignore_patterns("genai_config.json"))
    config = json.loads((target / "genai_config.json").read_text(encoding="utf-8"))
    model = config["model"]
    model["eos_token_id"] = model["vocab_size"] - 1
    model["decoder"]["session_options"]["intra_op_num_threads"] = threads
    if draft:
        shutil.copytree(draft, folder / "draft", copy_function=os.link)
        model["draft"] = json.loads((draft / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
        model["draft"]["filename"] = f"draft/{model['draft']['filename']}"
        model["draft"]["session_options"]["intra_op_num_threads"] = DRAFT_THREADS
    (folder / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
    return genai.Model(str(folder))


if __name__ == "__main__":
    serve(OnnxRuntimeGenAI)
