"""llama.cpp's worker: `llama-server` on GGUF files, a process for each mode, all with the same threads."""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from protocol import Decoded, serve

NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
DRAFTED = (3, 5, 8)  # tokens that the draft model proposes at most
CONTEXT = 4096
LOADING = 300  # seconds until a server has to answer
# Of llama-cpp-python 0.3.36 the server ends by a segmentation fault where it packs weights for AMX (on a Xeon).
PACKING = ["--no-repack"] if "amx_int8" in Path("/proc/cpuinfo").read_text(encoding="utf-8") else []


class LlamaServer:
    """A server for each way of drafting; a mode's server begins when the mode first decodes."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._program, self._log = Path(job["folder"]) / "build" / "bin" / "llama-server", Path(job["folder"])
        plain = ["-m", job["target"], "-t", str(job["threads"]), "-c", str(CONTEXT), "-np", "1", "--no-ui", *PACKING]
        draft = [*plain, "-md", job["draft"], "--spec-type", "draft-simple"]
        self._modes = {"plain": plain}
        self._modes |= {f"draft {count}": [*draft, "--spec-draft-n-max", str(count)] for count in DRAFTED}
        self._modes |= {name: [*plain, "--spec-type", name] for name in NGRAMS}
        atexit.register(self.close)
        self._addresses, self._servers = dict[str, str](), list[subprocess.Popen[bytes]]()
        found = subprocess.run([self._program, "--version"], capture_output=True, text=True, check=True)
        self.versions = {"llama.cpp": found.stderr.splitlines()[0]}
        self.settings = {"threads": job["threads"], "prefix_caching": False, "repack": not PACKING}

    @property
    def modes(self) -> list[str]:
        """See Peer."""
        return list(self._modes)

    def decode(self, mode: str, tokens: list[int], n: int) -> Decoded:
        """Decode and time one request; the time of the first token is the server's own for the prompt."""
        address = self._addresses.get(mode) or self._begin(mode)
        asked = {"prompt": tokens, "n_predict": n, "temperature": 0, "ignore_eos": True}
        asked |= {"cache_prompt": False, "return_tokens": True}
        started = time.perf_counter()
        answer = _posted(f"{address}/completion", asked)
        total = time.perf_counter() - started
        return Decoded(answer["tokens"], answer["timings"]["prompt_ms"] / 1e3, total)

    def _begin(self, mode: str) -> str:
        """Begin a mode's server; return its address once it answers."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with (self._log / f"{mode.replace(' ', '-')}.log").open("wb") as log:
            command = [self._program, *self._modes[mode], "--port", str(port)]
            self._servers.append(subprocess.Popen(command, stdout=log, stderr=log))
        address, until = f"http://127.0.0.1:{port}", time.monotonic() + LOADING
        while True:
            try:
                urlopen(f"{address}/health").close()
                self._addresses[mode] = address
                return address
            except OSError:
                if self._servers[-1].poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"llama-server did not begin: see {log.name}") from None
                time.sleep(0.2)

    def close(self) -> None:
        """End all servers."""
        for each in self._servers:
            each.terminate()


def _posted(url: str, content: dict[str, Any]) -> dict[str, Any]:
    request = Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as response:
        found: dict[str, Any] = json.load(response)
        return found


if __name__ == "__main__":
    serve(LlamaServer)
