"""Test the SLA guard with a step of load on a real server: the tail of requests, and what the guard did.

python -m benchmarks.serve.slo_step BUNDLE [--out FILE] [--quiet 20] [--busy 60] [--after 60] [--percentile 99]

Requests ask for a wide tree, which speeds up a single one but slows down four at once. The objective is the geometric
mean of two tails of four requests at once, with this tree and without speculation, both measured at the beginning.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import OUT, Server, machine, parser, prompts, save, serving

SLOTS, TREE, TOKENS = 4, "topk:7,7", 48
CALIBRATED = 15.0  # seconds of each load that determines the objective
WIDE = 1.5  # minimum slowdown of four with the tree over four without speculation
FIELDS = ("message", "slo_level", "max_draft_tokens", "tail", "cause")  # of the log's entries
SETTLED = 20.0  # seconds after the step from which the tail must meet the objective


def load(
    server: Server, clients: int, seconds: float, speculation: str, pause: float = 0.0
) -> list[tuple[float, float]]:
    """Run clients against a server; return each request's end (wall clock) and its seconds per token.

    Args:
        server: The server.
        clients: The number of clients, each with one request at a time.
        seconds: How long they send requests.
        speculation: The requests' `speculation`.
        pause: Seconds between two requests of a client.
    """
    found, end, texts = list[tuple[float, float]](), time.time() + seconds, prompts()

    def client(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            turn = number
            while time.time() < end:
                body: dict[str, Any] = {"prompt": texts[turn % len(texts)], "max_tokens": TOKENS, "seed": turn}
                body |= {"temperature": 0.8, "speculation": speculation, "ignore_eos": True}
                answer = http.post("/v1/completions", json=body).json()
                own, turn = answer["metrics"], turn + clients
                tokens = answer["usage"]["completion_tokens"]
                found.append((time.time(), (own["e2el"] - own["ttft"]) / max(tokens - 1, 1)))
                time.sleep(pause)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def tail(samples: list[tuple[float, float]], percentile: float, since: float = 0.0) -> float:
    """Return a percentile of the seconds per token of requests that ended at `since` or later."""
    times = sorted(seconds for at, seconds in samples if at >= since)
    return times[min(math.ceil(percentile / 100 * len(times)), len(times)) - 1]


def step(bundle: Path, quiet: float, busy: float, after: float, percentile: float = 99.0) -> dict[str, Any]:
    """Run the step; return the objective, the tails and every change of the guard's level, times in seconds.

    Args:
        bundle: The bundle.
        quiet: Seconds of light load before the step.
        busy: Seconds of the step.
        after: Seconds of light load after it.
        percentile: The percentile of the objective and the tails.

    Raises:
        RuntimeError: The tree does not slow down four requests enough, or the server did not start.
    """
    slots = ("--max-num-seqs", str(SLOTS))
    with serving(bundle, *slots) as server:
        load(server, SLOTS, 3.0, TREE)  # warm-up: the first steps of a shape are slower
        alone = tail(load(server, 1, CALIBRATED / 3, TREE), percentile)
        held_up, plain = (tail(load(server, SLOTS, CALIBRATED, how), percentile) for how in (TREE, "off"))
    if held_up < WIDE * plain:
        slower = f"four by {TREE} are {held_up / plain:.2f} times as slow as without speculation"
        raise RuntimeError(f"{slower}, less than {WIDE}: nothing to guard here now, try again on a quiet machine")
    objective = math.sqrt(held_up * plain)
    with serving(bundle, *slots, "--slo", f"tpot={objective:.6f},p{percentile:g}") as server:
        before = load(server, 1, quiet, TREE, pause=0.05)
        began = time.time()
        loaded = load(server, SLOTS, busy, TREE)
        ended = time.time()
        later = load(server, 1, after, TREE, pause=0.3)
        lines = [line for line in server.lines if "slo_level" in line]
    changes = [{"at": round(written(line) - began, 1), **{n: line.get(n) for n in FIELDS}} for line in lines]
    back = next((c["at"] for c in changes if c["slo_level"] == 0 and c["at"] > ended - began), None)
    return {
        "tree": TREE,
        "percentile": percentile,
        "objective": objective,
        "tail of one alone": alone,
        "tail of the load, unguarded": held_up,
        "tail of the load, without speculation": plain,
        "tail before the step": tail(before, percentile),
        "tail, 20 s after the step on": tail(loaded, percentile, began + SETTLED),
        "tail, 10 s after the step to 20": tail([s for s in loaded if s[0] < began + SETTLED], percentile, began + 10),
        "tail after the load": tail(later, percentile),
        "requests": [len(before), len(loaded), len(later)],
        "load ended": round(ended - began, 1),
        "seconds until everything was drafted again": None if back is None else round(back - (ended - began), 1),
        "changes": changes,
    }


def written(line: dict[str, Any]) -> float:
    """Return when a log entry was written."""
    return datetime.fromisoformat(line["time"]).timestamp()


def main() -> int:
    """Run one step and write it; return 1 if the tail stayed above the objective, or drafting did not fully recover."""
    options = parser(__doc__, OUT / "slo-step.json")
    options.add_argument("bundle", type=Path)
    for name, value in (("quiet", 20.0), ("busy", 60.0), ("after", 60.0), ("percentile", 99.0)):
        options.add_argument(f"--{name}", type=float, default=value)
    given = options.parse_args()
    found = step(given.bundle, given.quiet, given.busy, given.after, given.percentile)
    print(save(given.out, {"machine": machine()} | found))
    below = found["tail, 20 s after the step on"] < found["objective"]
    return int(not below or found["seconds until everything was drafted again"] is None)


if __name__ == "__main__":
    sys.exit(main())
