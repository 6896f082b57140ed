"""The results: rates and their ratios, for JSON and as a table in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.protocol import Decoded

RATES = ("request", "decode")
OURS, OUR_MODE, PLAIN = "specbuild", "auto", "plain"


@dataclass
class Tally:
    """Totals of one mode of one peer; `equal`: requests with the same tokens as specbuild's plain decoding."""

    requests: int = 0
    tokens: int = 0
    first: float = 0.0
    total: float = 0.0
    equal: int = 0

    def add(self, decoded: Decoded, equal: bool) -> None:
        """Count a request."""
        self.requests, self.equal = self.requests + 1, self.equal + equal
        self.tokens, self.first, self.total = (
            self.tokens + len(decoded.tokens),
            self.first + decoded.first,
            self.total + decoded.total,
        )

    def rate(self, which: str) -> float:
        """Return tokens per second of whole requests ("request"), or after their first tokens ("decode")."""
        if which == "request":
            return self.tokens / self.total
        return (self.tokens - self.requests) / (self.total - self.first)


def fastest(tallies: Mapping[str, Tally], which: str) -> str:
    """Return the mode with the highest rate."""
    return max(tallies, key=lambda mode: tallies[mode].rate(which))


def ratios(peers: Mapping[str, Mapping[str, Tally]]) -> dict[str, Any]:
    """Return a row for each peer's modes, and `auto` over the best mode of the other peers.

    specbuild must be among the peers.
    """
    ours = peers[OURS][OUR_MODE]
    rows: dict[str, Any] = {}
    for name, tallies in peers.items():
        plain = {mode: tally for mode, tally in tallies.items() if mode.startswith(PLAIN)}
        rows[name] = {
            mode: {
                "requests": tally.requests,
                "equal_to_specbuild_plain": tally.equal,
                "ttft_ms": round(tally.first / tally.requests * 1e3, 1),
                **{f"{which}_tokens_per_s": round(tally.rate(which), 1) for which in RATES},
                **{
                    f"{which}_over_own_plain": round(tally.rate(which) / plain[fastest(plain, which)].rate(which), 2)
                    for which in RATES
                    if plain
                },
                **{f"{which}_auto_over_this": round(ours.rate(which) / tally.rate(which), 2) for which in RATES},
            }
            for mode, tally in tallies.items()
        }
    others = {(name, mode): tally for name in peers if name != OURS for mode, tally in peers[name].items()}
    best = {which: max(others, key=lambda key: others[key].rate(which)) for which in RATES if others}
    return {
        "peers": rows,
        "auto_over_fastest_peer": {
            which: {"peer": key[0], "mode": key[1], "ratio": round(ours.rate(which) / others[key].rate(which), 2)}
            for which, key in best.items()
        },
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Return the table, a line for each mode."""
    lines = [
        "| | request tokens/s | of its plain | `auto` is | decode tokens/s | of its plain | `auto` is | texts equal |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, modes in result["peers"].items():
        for mode, row in modes.items():
            cells = [f"{name}, {mode}"]
            for which in RATES:
                cells.append(f"{row[f'{which}_tokens_per_s']:,.0f}")
                cells.append(f"{row.get(f'{which}_over_own_plain', 0):.2f}×")
                cells.append(f"{row[f'{which}_auto_over_this']:.2f}×")
            cells.append(f"{row['equal_to_specbuild_plain']} of {row['requests']}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
