"""Simulate a fleet of 10 to 1,000 replicas by discrete events over measured step times, by routing and speculation.

python benchmarks/fleet.py check BENCH.json --scale-out FILE    the two replicas of scale_out.py, simulated
python benchmarks/fleet.py run BENCH.json --out FOLDER          fleet.json, and fleet.html with its plots

A replica has slots like an engine. A request takes the free slot with its chat's earlier turns, an empty one, or the
longest unused; prefill stops decoding, and sequences slow each other down as measured. Requests are routed by
`specbuild.serve.prefixes`, with whole turns as blocks. A user's chat has turns with pauses for thinking.
"""

from __future__ import annotations

import argparse
import base64
import heapq
import io
import json
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import common

from specbuild.serve.prefixes import BLOCK, Places

ROUTINGS = ("random", "round robin", "prefix")
PRICE = 0.085  # default price of a machine per hour
USERS, WINDOW = 6000, 3000.0  # to find the machines needed: users whose chats begin within WINDOW seconds
TARGET = 8.0  # 99th percentile of seconds to the first token


@dataclass(frozen=True)
class Costs:
    """Seconds per output token with 1, 2, … sequences at once, and seconds per prompt token."""

    token: tuple[float, ...]
    prompt: float


@dataclass(frozen=True)
class Habits:
    """Means of users' chats: seconds of thinking, turns, and tokens of the shared prefix, a question and an answer."""

    think: float = 30.0
    turns: float = 6.0
    shared: int = 64
    question: int = 40
    answer: int = 64


@dataclass(slots=True)
class Turn:
    """A request in a user's chat; `prompt` and `answer` are numbers of tokens."""

    user: int
    number: int
    prompt: int
    answer: int
    came: float
    cached: int = 0
    first: float = 0.0


@dataclass(slots=True)
class Replica:
    """An engine: each slot's text as (user, tokens, turns), and the running requests, which end at a `progress`."""

    held: list[tuple[int, int, int]]
    free: list[int]  # slots, the longest unused first
    running: dict[int, Turn] = field(default_factory=dict)  # by slot
    ends: list[tuple[float, int]] = field(default_factory=list)  # (progress at which the request ends, slot)
    waiting: deque[Turn] = field(default_factory=deque)
    progress: float = 0.0  # tokens that each sequence has emitted
    at: float = 0.0  # the time of `progress`; later than now during prefill
    version: int = 0


class Fleet:
    """A simulated fleet of replicas; `run` simulates it."""

    def __init__(self, replicas: int, routing: str, costs: Costs, shared: int, seed: int = 0) -> None:
        self.costs, self.shared, self.routing, self._turn = costs, shared, routing, 0
        self.replicas = [self._empty() for _ in range(replicas)]
        self.names = list(range(replicas))
        self.places = Places(Random(seed), "prefix", len(costs.token))
        self.places.keep(self.names)
        self.random = Random(seed)
        self.events: list[tuple[float, int, int, Any]] = []  # time, kind, replica or a number, version or a turn
        self.done: list[Turn] = []

    def _empty(self) -> Replica:
        slots = len(self.costs.token)
        return Replica([(-1, 0, 0)] * slots, list(range(slots)))

    def arrive(self, when: float, turn: Turn) -> None:
        """Schedule a request's arrival."""
        self._turn += 1
        heapq.heappush(self.events, (when, 1, self._turn, turn))

    def run(self, again: Any, until: float = float("inf")) -> list[Turn]:
        """Simulate until no event is left or `until`, calling `again(turn, now)` after each request; return all."""
        while self.events:
            now, kind, number, what = heapq.heappop(self.events)
            if now > until:
                break
            if kind:
                self._route(now, what)
            elif self.replicas[number].version == what:
                self._end(now, number, again)
        return self.done

    def _route(self, now: float, turn: Turn) -> None:
        if self.routing == "prefix":
            blocks = [turn.user << 8 | place for place in range(turn.number + 1)]
            number = self.places.choose(self.names, blocks)[0]
            known = self.places.depth(number, blocks)
            read = turn.prompt * (len(blocks) - known) // len(blocks)
            self.places.sent(number, f"{turn.user} {turn.number}", blocks, read + BLOCK * known, turn.answer)
        elif self.routing == "random":
            number = self.random.randrange(len(self.names))
        else:
            number = self._turn % len(self.names)
            self._turn += 1
        replica = self.replicas[number]
        self._advance(replica, now)
        replica.waiting.append(turn)
        self._admit(replica, now)
        self._plan(number)

    def _advance(self, replica: Replica, now: float) -> None:
        """Advance a replica to now, unless it is already ahead because of a prefill."""
        if now > replica.at:
            if replica.running:
                replica.progress += (now - replica.at) / self.costs.token[len(replica.running) - 1]
            replica.at = now

    def _admit(self, replica: Replica, now: float) -> None:
        while replica.waiting and len(replica.running) < len(replica.held):
            turn = replica.waiting.popleft()
            common = [text if user == turn.user else min(self.shared, text) for user, text, _ in replica.held]
            mine = (each for each in replica.free if replica.held[each][0] == turn.user)
            empty = (each for each in replica.free if not replica.held[each][1])
            slot = next(mine, next(empty, replica.free[0]))
            replica.free.remove(slot)
            turn.cached = min(max(common), turn.prompt - 1)
            replica.at = max(replica.at, now) + (turn.prompt - turn.cached) * self.costs.prompt
            turn.first = replica.at + self.costs.token[len(replica.running)]
            replica.held[slot] = turn.user, turn.prompt + turn.answer - 1, turn.number + 1
            replica.running[slot] = turn
            heapq.heappush(replica.ends, (replica.progress + turn.answer, slot))

    def _plan(self, number: int) -> None:
        replica = self.replicas[number]
        replica.version += 1
        if replica.ends:
            left = max(replica.ends[0][0] - replica.progress, 0) * self.costs.token[len(replica.running) - 1]
            heapq.heappush(self.events, (replica.at + left, 0, number, replica.version))

    def _end(self, now: float, number: int, again: Any) -> None:
        replica = self.replicas[number]
        self._advance(replica, now)
        _, slot = heapq.heappop(replica.ends)
        turn = replica.running.pop(slot)
        replica.free.append(slot)
        if self.routing == "prefix":
            self.places.ended(number, f"{turn.user} {turn.number}")
            if not self.random.randrange(4):  # a replica reports its texts after every fourth request on average
                held = [user << 8 | place for user, _, turns in replica.held for place in range(turns)]
                self.places.report(number, held)
        self.done.append(turn)
        self._admit(replica, now)
        self._plan(number)
        again(turn, now)


def play(replicas: int, users: int, seconds: float, routing: str, costs: Costs, habits: Habits) -> dict[str, float]:
    """Simulate the chats of `users` who arrive over `seconds`; return figures of requests after the first fifth."""
    random = Random(1)
    fleet = Fleet(replicas, routing, costs, habits.shared)
    left: dict[int, int] = {}

    def length(mean: int) -> int:
        return max(int(random.expovariate(1 / mean)), 4)

    for user in range(users):
        left[user] = max(int(random.expovariate(1 / habits.turns)), 1) if habits.turns > 1 else 1
        came = random.random() * seconds
        fleet.arrive(came, Turn(user, 0, habits.shared + length(habits.question), length(habits.answer), came))

    def again(turn: Turn, now: float) -> None:
        if turn.number + 1 < min(left[turn.user], 31):
            came = now + random.expovariate(1 / habits.think)
            longer = turn.prompt + turn.answer + length(habits.question)
            fleet.arrive(came, Turn(turn.user, turn.number + 1, longer, length(habits.answer), came))

    began = time.perf_counter()
    done = [each for each in fleet.run(again, seconds) if each.came > seconds / 5]
    waits = sorted(each.first - each.came for each in done)
    return {
        "replicas": replicas,
        "users": users,
        "requests": len(done),
        "hit_rate": round(sum(each.cached for each in done) / max(sum(each.prompt for each in done), 1), 4),
        "ttft_p50": round(waits[len(waits) // 2], 4),
        "ttft_p99": round(waits[int(0.99 * (len(waits) - 1))], 4),
        "simulated_in_seconds": round(time.perf_counter() - began, 1),
    }


def needed(users: int, seconds: float, routing: str, costs: Costs, habits: Habits) -> dict[str, float]:
    """Return the figures of the fewest replicas whose 99th percentile of first tokens meets TARGET.

    Raises RuntimeError if no number of replicas does, because prompts alone take longer.
    """
    low, high = 1, 4
    while play(high, users, seconds, routing, costs, habits)["ttft_p99"] > TARGET:
        low, high = high, 2 * high
        if low > users:
            raise RuntimeError(f"no number of replicas has {routing} routing's first tokens within {TARGET:g} s")
    while high - low > max(high // 50, 1):
        middle = (low + high) // 2
        late = play(middle, users, seconds, routing, costs, habits)["ttft_p99"] > TARGET
        low, high = (middle, high) if late else (low, middle)
    return play(high, users, seconds, routing, costs, habits)


def costs_from(bench: dict[str, Any], slots: int) -> dict[str, Any]:
    """Return costs from a result of `specbuild bench`: its timing table, and a token's time with `auto` at batch 1.

    With more sequences a token's time grows like a step of six nodes in the table, but never above plain decoding.
    Between and above the table's batches (1, 2 and 4) times are interpolated linearly.
    """
    table = {int(many): times["verify"] for many, times in bench["bundle"]["timings"].items()}
    tpot = {
        run["speculation"]: run["mean_tpot_ms"] / 1000 for run in bench["runs"] if run["speculation"] in ("off", "auto")
    }

    def step(many: float, nodes: int) -> float:
        return between([(size, between(times, nodes)) for size, times in sorted(table.items())], many)

    plain = [round(tpot["off"] * step(many, 1) / step(1, 1), 6) for many in range(1, slots + 1)]
    drafted = [min(tpot["auto"] * step(many, 6) / step(1, 6), plain[many - 1]) for many in range(1, slots + 1)]
    prompt = table[1][-1][1] / table[1][-1][0]
    return {"plain": plain, "speculation": [round(each, 6) for each in drafted], "prompt": round(prompt, 7)}


def between(points: Any, at: float) -> float:
    """Interpolate linearly between the two points around `at`, or extrapolate from the last two."""
    right = next((place for place, (x, _) in enumerate(points) if x >= at), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(right - 1, 0)], points[max(right, 1)]
    return float(y0 + (y1 - y0) * (at - x0) / (x1 - x0))


def costs_of(found: dict[str, Any], name: str) -> Costs:
    """Return the costs in a result of `costs_from`, with or without speculation."""
    return Costs(tuple(found[name]), found["prompt"])


def check(measured: dict[str, Any], costs: Costs) -> dict[str, Any]:
    """Simulate the chats of scale_out.py with their numbers of tokens; return measured and simulated hit rates."""
    from scale_out import AT_ONCE, TOKENS

    rows = measured["chats"]["random"]["rows"]  # the texts do not depend on the routing
    prompts = {(user, turn): prompt for user, turn, prompt, *_ in rows if prompt}
    found: dict[str, Any] = {}
    for routing in ("random", "prefix"):
        shared = min(prompt for (_, turn), prompt in prompts.items() if not turn) // 2
        fleet = Fleet(2, routing, costs, shared)
        waiting = sorted({user for user, _ in prompts})

        def begin(now: float, fleet: Fleet = fleet, waiting: list[int] = waiting) -> None:
            if waiting:
                user = waiting.pop(0)
                fleet.arrive(now, Turn(user, 0, prompts[user, 0], TOKENS, now))

        def again(turn: Turn, now: float, fleet: Fleet = fleet, begin: Any = begin) -> None:
            following = (turn.user, turn.number + 1)
            if following in prompts:
                fleet.arrive(now, Turn(*following, prompts[following], TOKENS, now))
            else:
                begin(now)

        for _ in range(AT_ONCE):
            begin(0.0)
        done = fleet.run(again)
        rate = sum(each.cached for each in done) / sum(each.prompt for each in done)
        real = measured["chats"][routing]["hit_rate"]
        seconds = max(each.first for each in done), measured["chats"][routing]["seconds"]
        found[routing] = {"hit_rate": round(rate, 4), "measured": real, "off_by": round(rate / real - 1, 3)}
        found[routing] |= {"seconds": round(seconds[0], 1), "measured_seconds": seconds[1]}
    return found


def run(found: dict[str, Any], out: Path, price: float, sizes: list[tuple[int, int]]) -> None:
    """Find the machines needed and simulate each size, with every routing and decoding; write results as they come."""
    habits, rows, machines = Habits(), list[dict[str, Any]](), list[dict[str, Any]]()
    ways = {name: costs_of(found, name) for name in ("speculation", "plain")}
    result = {"costs": found, "habits": vars(habits), "price": price, "target": TARGET, "rows": rows}
    result |= {"machines": machines, "machine": common.machine()}
    for name, costs in ways.items():
        for routing in ROUTINGS:
            told = needed(USERS, WINDOW, routing, costs, habits)
            machines.append({"speculation": name, "routing": routing, **told})
            machines[-1]["money_an_hour"] = round(told["replicas"] * price, 2)
            print(machines[-1], flush=True)
            (out / "fleet.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    enough = max(row["replicas"] for row in machines)  # with any routing: else queues grow without end
    for replicas, users in sizes:
        seconds = WINDOW * (users / USERS) * (enough / replicas)
        for name, costs in ways.items():
            for routing in ROUTINGS:
                rows.append({"speculation": name, "routing": routing})
                rows[-1] |= play(replicas, users, seconds, routing, costs, habits)
                print(rows[-1], flush=True)
                (out / "fleet.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (out / "fleet.html").write_text(page(result), encoding="utf-8")


def page(result: dict[str, Any]) -> str:
    """Return a page with plots of hit rates, tails and machines by routing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5))
    largest = max(row["replicas"] for row in result["rows"])
    plots = (
        ("hit_rate", f"tokens of prompts that a cache had, {largest} replicas", result["rows"]),
        ("ttft_p99", f"seconds to the first token, 99th percentile, {largest} replicas", result["rows"]),
        (
            "replicas",
            f"machines for {USERS:,} chats in {WINDOW / 60:g} minutes, p99 ≤ {result['target']:g} s",
            result["machines"],
        ),
    )
    for axis, (key, title, rows) in zip(axes, plots, strict=True):
        for offset, name in ((-0.2, "plain"), (0.2, "speculation")):
            last = [r for r in rows if r["speculation"] == name and (key == "replicas" or r["replicas"] == largest)]
            bars = axis.bar([i + offset for i in range(len(last))], [r[key] for r in last], 0.38, label=name)
            axis.bar_label(bars, fmt="%.3g", fontsize=8)
        axis.set_xticks(range(len(ROUTINGS)), ROUTINGS)
        axis.set_title(title, fontsize=10)
    axes[0].legend()
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=90)
    picture = base64.b64encode(image.getvalue()).decode()
    money = "".join(
        f"<tr><td>{r['routing']}<td>{r['speculation']}<td>{r['replicas']}<td>{r['money_an_hour']}<td>{r['hit_rate']:.0%}"
        for r in result["machines"]
    )
    return (
        "<!doctype html><meta charset=utf-8><title>A fleet on paper</title><h1>A fleet on paper</h1>"
        f"<img src='data:image/png;base64,{picture}'><table>"
        f"<tr><th>routing<th>decoding<th>machines<th>USD an hour<th>hits{money}</table>"
    )


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["check", "run"])
    parser.add_argument("bench", type=Path, help="a result of specbuild bench")
    parser.add_argument("--scale-out", type=Path)
    parser.add_argument("--slots", type=int, default=16, help="sequences that an engine decodes at once")
    parser.add_argument("--price", type=float, default=PRICE)
    parser.add_argument("--sizes", default="10:3000", help="replicas:users, such as 10:3000,100:30000,1000:1000000")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bench = json.loads(options.bench.read_text())
    if options.what == "check":
        measured = json.loads(options.scale_out.read_text())
        print(json.dumps(check(measured, costs_of(costs_from(bench, 4), "speculation")), indent=1))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = [(int(replicas), int(users)) for replicas, users in (each.split(":") for each in options.sizes.split(","))]
    run(costs_from(bench, options.slots), options.out, options.price, sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
