"""Test the shadow oracle on bundles: it must be silent on honest requests; how soon does it find a flipped weight bit?

python -m benchmarks.serve.shadow_oracle NAME=BUNDLE … [--out FILE] [--requests 10000] [--flips 12]

Requests are short pieces of pycode's prompts with 1 to 16 new tokens, greedy and sampled, with `auto` and with fixed
trees, 48 at once; each is decoded again without speculation. Then bits of weights are flipped, one at a time, for steps
with a tree only, as if verification had a graph of its own: the target's other steps are unchanged.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import OUT, machine, parser, prompts, save
from specbuild.runtime import AsyncEngine, Bundle, Engine
from specbuild.runtime.backends.cpu.load import load_model
from specbuild.runtime.bundle.atomic_output import write
from specbuild.runtime.bundle.bundle import file_record
from specbuild.runtime.bundle.manifest import MANIFEST
from specbuild.serve.errors import ApiError
from specbuild.serve.metrics import Metrics
from specbuild.serve.options import ServeOptions
from specbuild.serve.request.admission import Admission
from specbuild.serve.request.fields import CompletionRequest
from specbuild.serve.request.generation import Generation, Workers
from specbuild.serve.request.grammars import GrammarCompiler
from specbuild.serve.request.models import Models, ServedModel
from specbuild.serve.request.parameters import Caller, defaults_of
from specbuild.serve.shadow.shadow_check import Oracle

AT_ONCE, FEW = 48, 8  # requests at once: honest ones, and those with a flipped bit
WEIGHTS = "target/weights.bin"
ENOUGH = 480  # requests after which a flipped bit that was not found counts as without effect


class Log:
    """A log that keeps what the oracle writes."""

    def __init__(self) -> None:
        self.lines = list[str]()

    def event(self, level: str, message: str, **fields: Any) -> None:
        """See `RequestLog`."""
        self.lines.append(f"{level}: {message} {fields}")


class Shadowed:
    """An engine whose requests are all shadowed; `outcomes`: counts of the shadows' outcomes and of failed requests."""

    def __init__(self, engine: Engine, bundle: Path, seed: int, at_once: int) -> None:
        defaults = defaults_of(Bundle.open(bundle))
        self.model = ServedModel(("m",), bundle, AsyncEngine(engine), defaults, Admission(engine.batch_size, 256))
        self._at_once = at_once
        self._workers = Workers(ThreadPoolExecutor(2), GrammarCompiler(), Metrics({"m": engine}))
        self.outcomes, self.log, self._drawn = Counter[str](), Log(), random.Random(seed)
        self._texts = [engine.encode(each) for each in prompts()]
        self.oracle = Oracle(Models([self.model]), ServeOptions(shadow=1.0), self, self.log)  # type: ignore[arg-type]

    def shadowed(self, model: str, outcome: str) -> None:
        """See `Metrics`."""
        self.outcomes[outcome] += 1

    def _asked(self) -> CompletionRequest:
        drawn, text = self._drawn, self._drawn.choice(self._texts)
        begin = drawn.randrange(max(len(text) - 4, 1))
        return CompletionRequest(
            prompt=text[begin : begin + drawn.randint(1, 16)],
            max_tokens=drawn.randint(1, 16),
            temperature=drawn.choice([0, 0.7, 1.0]),
            top_p=drawn.choice([1.0, 0.9]),
            seed=drawn.randrange(1 << 32),
            speculation=drawn.choice(["auto", "auto", "best:5", "chain:3", "topk:2,2"]),
        )

    async def _request(self) -> None:
        asked = self._asked()
        generation = Generation(self.model, asked, Caller())
        try:
            async for _ in generation.chunks(self._workers):
                pass
        except ApiError:
            self.outcomes["request failed"] += 1
        self.oracle.ended(generation)

    async def run(self, requests: int, until: tuple[str, ...] = ()) -> int:
        """Send requests, some at a time, and wait for their shadows; stop at one of the outcomes in `until`.

        Return the number of requests sent.
        """
        watching, asked = asyncio.create_task(self.oracle.run()), 0
        while asked < requests and not any(self.outcomes[each] for each in until):
            count = min(self._at_once, requests - asked)
            await asyncio.gather(*(self._request() for _ in range(count)))
            await self.oracle.settled()
            asked += count
        watching.cancel()
        return asked


@contextmanager
def flipped(bundle: Path, offset: int, bit: int) -> Iterator[Path]:
    """Yield a copy of a bundle with one bit of the target's weights flipped."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(bundle, Path(folder) / "flipped.bundle"))
        data = bytearray((copy / WEIGHTS).read_bytes())
        data[offset] ^= 1 << bit
        (copy / WEIGHTS).write_bytes(data)
        manifest = Bundle.open(bundle).manifest
        files = {**manifest.files, WEIGHTS: file_record(copy / WEIGHTS)}
        write(copy / MANIFEST, replace(manifest, files=files).to_json().encode())
        yield copy


def plant(engine: Engine, damaged: Path) -> None:
    """Make steps with a tree use the damaged bundle's graph, over the same caches."""
    target: Any = engine._loop.target
    other: Any = load_model(Bundle.open(damaged), "target", target.batch_size, target.identity["threads"])
    sound, own, session = target.step, (target._session, target._binding), other._session
    target._session, target._binding = damaged_way = session, session.io_binding()
    target._bind_cache()
    target._session, target._binding = own

    def step(inputs: Any) -> Any:
        if all(each.logits < 2 for each in inputs):
            return sound(inputs)
        (target._session, target._binding), target._bound = damaged_way, None
        try:
            return sound(inputs)
        finally:
            (target._session, target._binding), target._bound = own, None

    target.step = step


def silence(bundle: Path, requests: int) -> dict[str, Any]:
    """Shadow honest requests and return their outcomes."""
    began = time.perf_counter()
    with Engine.load(bundle, batch_size=4, max_waiting=256) as engine:
        shadowed, stats = Shadowed(engine, bundle, 1, AT_ONCE), engine.stats
        asyncio.run(shadowed.run(requests))
        emitted = engine.stats.since(stats).emitted
    counts = {"requests": requests, "seconds": round(time.perf_counter() - began), "tokens": emitted}
    return counts | {"outcomes": dict(shadowed.outcomes), "log": shadowed.log.lines[:3]}


def find(bundle: Path, seed: int) -> dict[str, Any]:
    """Flip a weight's sign (bit 7 of its last byte) or top exponent bit (6) for steps with a tree, and look for it."""
    drawn = random.Random(seed)
    offset = drawn.randrange((bundle / WEIGHTS).stat().st_size // 4) * 4 + 3
    bit = drawn.choice([6, 7])
    with flipped(bundle, offset, bit) as damaged, Engine.load(bundle, batch_size=4, max_waiting=256) as engine:
        plant(engine, damaged)
        shadowed = Shadowed(engine, bundle, seed, FEW)
        asked = asyncio.run(shadowed.run(ENOUGH, until=("different", "request failed")))
    return {"offset": offset, "bit": bit, "requests": asked, "outcomes": dict(shadowed.outcomes)}


def main() -> int:
    """Run both on each bundle; return 1 if an honest text differed, or fewer than half of the bits were found."""
    options = parser(__doc__, OUT / "oracle.json")
    options.add_argument("bundles", nargs="+", metavar="NAME=BUNDLE")
    options.add_argument("--requests", type=int, default=10_000)
    options.add_argument("--flips", type=int, default=12)
    given = options.parse_args()
    found: dict[str, Any] = {}
    for name, _, path in (each.partition("=") for each in given.bundles):
        found[name] = {"honest": silence(Path(path), given.requests)}
        found[name]["flipped"] = [find(Path(path), seed) for seed in range(given.flips)]
        print(save(given.out, {"machine": machine()} | found), flush=True)
    silent = all(each["honest"]["outcomes"] == {"equal": given.requests} for each in found.values())
    detected = sum("different" in flip["outcomes"] for each in found.values() for flip in each["flipped"])
    return int(not silent or 2 * detected < given.flips * len(found))


if __name__ == "__main__":
    sys.exit(main())
