"""specbuild's worker: the bundle with all of its drafters."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from protocol import Decoded, serve

from specbuild.runtime import Engine, SamplingParams


class Specbuild:
    """An engine; a mode is the request's `speculation`, "plain" for "off"."""

    modes = ("plain", "auto", "best:5")

    def __init__(self, job: dict[str, Any]) -> None:
        self._decoded = 0
        self._engine = Engine.load(job["bundle"], threads=job["threads"], prefix_caching=False)
        self.versions = {name: version(name) for name in ("specbuild-trt", "onnxruntime", "numpy")}
        self.settings = {"threads": job["threads"], "prefix_caching": False}

    def decode(self, mode: str, tokens: list[int], n: int) -> Decoded:
        """Decode with the engine's own times, which count from submission."""
        speculation = "off" if mode == "plain" else mode
        self._decoded += 1  # a fresh salt, so that no draft comes from earlier answers to the same prompt
        params = SamplingParams(n, ignore_eos=True, speculation=speculation, cache_salt=str(self._decoded))
        (result,) = self._engine.generate([tokens], params)
        if result.error:
            raise result.error
        return Decoded(list(result.token_ids), result.metrics.ttft, result.metrics.e2el)


if __name__ == "__main__":
    serve(Specbuild)
