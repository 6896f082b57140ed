"""Simulate a fleet of 10 to 1,000 replicas by discrete events over measured step times, by routing and speculation.

python benchmarks/fleet.py check SCALE_OUT.json                 the two replicas of scale_out.py, simulated
python benchmarks/fleet.py run BENCH.json --out FOLDER          fleet.json, and fleet.html with its plots

A replica has slots like an engine. A request takes the free slot with its chat's earlier turns, an empty one, or the
longest unused. Prompts share steps with decoding at the host loop's pace, and sequences slow each other down as
measured. Requests are routed by `specbuild.serve.prefixes`, with whole turns as blocks. A user's chat has turns with
pauses for thinking.
"""

from __future__ import annotations

import argparse
import base64
import heapq
import io
import json
import multiprocessing
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

import common

from specbuild.runtime.decoding.host_loop import PACE, PACE_OF_ALL
from specbuild.serve.prefixes import BLOCK, Places

ROUTINGS = ("random", "round robin", "prefix")
PRICE = 0.085  # default price of a machine per hour
USERS, WINDOW = 6000, 3000.0  # to find the machines needed: users whose chats begin within WINDOW seconds
ENDS, ARRIVES, BEGINS = range(3)  # events: a request ends, arrives, has its prompt prefilled
SEEDS = 12  # simulations of what was measured, since routing draws
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
    """An engine: each slot's text as (user, tokens, turns), and requests that prefill and that decode, by slot."""

    held: list[tuple[int, int, int]]
    free: list[int]  # slots, the longest unused first
    turns: dict[int, Turn] = field(default_factory=dict)
    prompts: list[tuple[float, int]] = field(default_factory=list)  # (`read` at which prefill ends, slot)
    ends: list[tuple[float, int]] = field(default_factory=list)  # (`progress` at which the request ends, slot)
    waiting: deque[Turn] = field(default_factory=deque)
    read: float = 0.0  # seconds that each prompt has been prefilled
    progress: float = 0.0  # tokens that each decoding sequence has emitted
    at: float = 0.0  # the time of both
    busy: float = 0.0  # seconds in which a request ran
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
        heapq.heappush(self.events, (when, ARRIVES, self._turn, turn))

    def run(self, again: Any, until: float = float("inf")) -> list[Turn]:
        """Simulate until no event is left or `until`, calling `again(turn, now)` after each request; return all."""
        while self.events:
            now, kind, number, what = heapq.heappop(self.events)
            if now > until:
                break
            if kind == ARRIVES:
                self._route(now, what)
            elif self.replicas[number].version == what:
                self._advance(self.replicas[number], now)
                if kind == BEGINS:
                    self._begin(now, number)
                else:
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
        self._admit(replica)
        self._plan(number)

    def _rates(self, replica: Replica) -> tuple[float, float]:
        """Return the seconds that each prompt is prefilled, and the tokens that each sequence emits, in a second."""
        token, reading, decoding = self.costs.token, len(replica.prompts), len(replica.ends)
        if not reading or not decoding:
            return 1 / max(reading, 1), 1 / token[decoding - 1] if decoding else 0.0
        step = max(PACE * token[decoding - 1], PACE_OF_ALL * token[decoding + reading - 1])
        return (step - token[decoding - 1]) / step / reading, 1 / step

    def _advance(self, replica: Replica, now: float) -> None:
        read, emitted = self._rates(replica)
        replica.busy += (now - replica.at) * bool(replica.turns)
        replica.read += (now - replica.at) * read
        replica.progress += (now - replica.at) * emitted
        replica.at = now

    def _admit(self, replica: Replica) -> None:
        while replica.waiting and replica.free:
            turn = replica.waiting.popleft()
            common = [text if user == turn.user else min(self.shared, text) for user, text, _ in replica.held]
            mine = (each for each in replica.free if replica.held[each][0] == turn.user)
            empty = (each for each in replica.free if not replica.held[each][1])
            slot = next(mine, next(empty, replica.free[0]))
            replica.free.remove(slot)
            turn.cached = min(max(common), turn.prompt - 1)
            replica.held[slot] = turn.user, turn.prompt + turn.answer - 1, turn.number + 1
            replica.turns[slot] = turn
            heapq.heappush(replica.prompts, (replica.read + (turn.prompt - turn.cached) * self.costs.prompt, slot))

    def _plan(self, number: int) -> None:
        """Schedule the replica's next event as it stands."""
        replica = self.replicas[number]
        replica.version += 1
        read, emitted = self._rates(replica)
        times = list[tuple[float, int]]()
        if replica.prompts:
            times.append((replica.at + max(replica.prompts[0][0] - replica.read, 0.0) / read, BEGINS))
        if replica.ends:
            times.append((replica.at + max(replica.ends[0][0] - replica.progress, 0.0) / emitted, ENDS))
        if times:
            heapq.heappush(self.events, (*min(times), number, replica.version))

    def _begin(self, now: float, number: int) -> None:
        replica = self.replicas[number]
        _, slot = heapq.heappop(replica.prompts)
        turn = replica.turns[slot]
        heapq.heappush(replica.ends, (replica.progress + turn.answer, slot))
        turn.first = now + 1 / self._rates(replica)[1]
        self._plan(number)

    def _end(self, now: float, number: int, again: Any) -> None:
        replica = self.replicas[number]
        _, slot = heapq.heappop(replica.ends)
        turn = replica.turns.pop(slot)
        replica.free.append(slot)
        if self.routing == "prefix":
            self.places.ended(number, f"{turn.user} {turn.number}")
            if not self.random.randrange(4):  # a replica reports its texts after every fourth request on average
                held = [user << 8 | place for user, _, turns in replica.held for place in range(turns)]
                self.places.report(number, held)
        self.done.append(turn)
        self._admit(replica)
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


def _play(how: tuple[int, int, float, str, Costs, Habits]) -> dict[str, float]:
    return play(*how)


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


def replayed(whole: dict[str, Any], routing: str, slower: float, outside: float, seed: int) -> dict[str, float]:
    """Simulate the chats of scale_out.py with their numbers of tokens; return its figures.

    Args:
        whole: Its result: an engine's times alone, and the requests.
        routing: How requests are routed.
        slower: How much slower than alone engines are.
        outside: Seconds of each request outside of the engines.
        seed: What routing draws from.
    """
    from scale_out import AT_ONCE, CROWDS, TOKENS

    token = tuple(slower * between(whole["engine"]["token"], many) for many in range(1, max(CROWDS) + 1))
    prompts = {(user, turn): prompt for user, turn, prompt, *_ in whole["random"]["rows"]}  # the same by any routing
    shared = min(prompt for (_, turn), prompt in prompts.items() if not turn) // 2
    fleet = Fleet(2, routing, Costs(token, slower * whole["engine"]["prompt"]), shared, seed)
    waiting, took = sorted({user for user, _ in prompts}), list[float]()

    def begin(now: float) -> None:
        if waiting:
            ask(waiting.pop(0), 0, now)

    def ask(user: int, turn: int, now: float) -> None:
        fleet.arrive(now + outside, Turn(user, turn, prompts[user, turn], TOKENS, now))

    def again(turn: Turn, now: float) -> None:
        took.append(now - turn.came)
        if (turn.user, turn.number + 1) in prompts:
            ask(turn.user, turn.number + 1, now)
        else:
            begin(now)

    for _ in range(AT_ONCE):
        begin(0.0)
    done = fleet.run(again)
    return {
        "hit_rate": sum(each.cached for each in done) / sum(each.prompt for each in done),
        "seconds_median": median(took),
        "seconds": max(each.at for each in fleet.replicas),
        "busy": sum(each.busy for each in fleet.replicas),
    }


def check(whole: dict[str, Any]) -> dict[str, Any]:
    """Hold simulated and measured figures of scale_out.py's two replicas side by side; simulated ones are means.

    Two numbers are taken from the replicas' own metrics in the run with random routing: how busy their engines were,
    which says how much slower they are beside a server on the same cores, and a request's seconds outside of them.
    """
    alone = fmean(replayed(whole, "random", 1.0, 0.0, seed)["busy"] for seed in range(SEEDS))
    slower, outside = whole["random"]["busy"] / alone, whole["random"]["outside"]
    found: dict[str, Any] = {"slower": round(slower, 3), "outside": outside}
    for routing in ("random", "prefix"):
        played = [replayed(whole, routing, slower, outside, seed) for seed in range(SEEDS)]
        found[routing] = {}
        for name in ("hit_rate", "seconds_median", "seconds"):
            mean, real = fmean(each[name] for each in played), whole[routing][name]
            found[routing][name] = {"simulated": round(mean, 4), "measured": real, "off_by": round(mean / real - 1, 3)}
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
    asked = [
        (name, (replicas, users, WINDOW * (users / USERS) * (enough / replicas), routing, costs, habits))
        for replicas, users in sizes
        for name, costs in ways.items()
        for routing in ROUTINGS
    ]
    with multiprocessing.get_context("spawn").Pool() as pool:
        for (name, how), told in zip(asked, pool.imap(_play, [how for _, how in asked]), strict=True):
            rows.append({"speculation": name, "routing": how[3], **told})
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
    parser.add_argument("result", type=Path, help="of specbuild bench, or to check of scale_out.py")
    parser.add_argument("--slots", type=int, default=16, help="sequences that an engine decodes at once")
    parser.add_argument("--price", type=float, default=PRICE)
    parser.add_argument("--sizes", default="10:3000", help="replicas:users, such as 10:3000,100:30000,1000:1000000")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = json.loads(options.result.read_text())
    if options.what == "check":
        print(json.dumps(check(result["whole"]), indent=1))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = [(int(replicas), int(users)) for replicas, users in (each.split(":") for each in options.sizes.split(","))]
    run(costs_from(result, options.slots), options.out, options.price, sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
