"""A simulated server whose machine is slowed down by others, and clients that ask again when they are answered."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from simulated_queue import Request, SimulatedQueue

SETTLED, TOKENS, MEMORY = 20.0, 48, 3.0  # seconds after a step of load; of a text; seconds of what the table knows


@dataclass
class NoisyQueue(SimulatedQueue):
    """Four slots. slow: times as long as all takes. noise: deviations of logarithms, of rounds and of five seconds."""

    slow: float = 1.0
    noise: tuple[float, float] = (0.2, 0.1)
    seed: int = 0

    def __post_init__(self) -> None:
        self.base, self.row, self.slots = 0.002, 0.0003, 4
        super().__post_init__()
        self._drawn, self._others = random.Random(self.seed), random.Random(self.seed + 1)
        self._drift, self._known, self._at = 0.0, 1.0, 0.0
        self.steering._plain = lambda: (0.002 + 0.0003 * self.slots) * self.slow * self._known

    def _pace(self) -> float:
        """What the next round takes over what it takes alone."""
        keep, memory = math.exp((self._at - self.now) / 5), math.exp((self._at - self.now) / MEMORY)
        self._drift = keep * self._drift + math.sqrt(1 - keep**2) * self.noise[1] * self._others.gauss(0, 1)
        self._known, self._at = memory * self._known + (1 - memory) * math.exp(self._drift), self.now
        return self.slow * math.exp(self._drift + self.noise[0] * self._others.gauss(0, 1))

    def closed(self, seconds: float, clients: int, guarded: bool, pause: float = 0.0, drafts: bool = True) -> None:
        """So many clients, each of which asks `pause` seconds after its last answer."""
        end, coming = self.now + seconds, [self.now] * clients
        self._limit = self._limit if drafts else 0
        while self.now < end:
            due = [at for at in coming if at <= self.now]
            coming = [at for at in coming if at > self.now]
            self.waiting.extend(Request(self.now, TOKENS) for _ in due)
            before, pace = len(self.ended), self._pace()
            self.base, self.row = 0.002 * pace, 0.0003 * pace
            self._round(end)
            coming += [self.now + pause] * (len(self.ended) - before)
            while guarded and self._looked + 1 <= self.now:
                self._looked += 1
                self._look()
        self.waiting.clear()
