"""Compare specbuild with its peers on one pair, one file of prompts and one machine: tokens per second and ratios.

python -m benchmarks.peers.run --target DIR --draft DIR --bundle BUNDLE [options]

Temperature 0, batch 1, float32, one request at a time. For each prompt all modes of all peers take turns, and prompts
begin with different ones. All get the same token ids and decode the same number of tokens, past an end-of-text token.
The README.md beside this file describes each peer, and how its threads and precision are set.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.common import OUT, PROMPTS, ROOT, machine, parser, save
from benchmarks.peers import environments
from benchmarks.peers.protocol import Decoded
from benchmarks.peers.table import OUR_MODE, OURS, PLAIN, Tally, markdown, ratios
from benchmarks.peers.worker import PeerError, Worker

PEERS = (OURS, "transformers", "openvino", "onnxruntime-genai")
PAUSE = 0.05  # seconds between turns, in which spinning thread pools go to sleep


def options(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line; raise PeerError if it is invalid."""
    found = parser(__doc__, OUT / "peers.json")
    found.add_argument("--target", type=Path, required=True, help="folder of a checkpoint with a tokenizer.json")
    found.add_argument("--draft", type=Path, required=True, help="folder of a checkpoint")
    found.add_argument("--bundle", type=Path, required=True, help="built of the two, and tuned")
    found.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON objects with a prompt, a line each")
    found.add_argument("--num-prompts", type=int, default=8, help="so many, evenly spread over the file")
    found.add_argument("--max-new-tokens", type=int, default=128)
    found.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    found.add_argument("--openvino-defaults", action="store_true", help="let OpenVINO choose its precision (bf16, …)")
    found.add_argument("--only", default=",".join(PEERS), metavar="PEER,…", help="of the peers; default: %(default)s")
    found.add_argument("--folder", type=Path, default=ROOT / "build" / "peers", help="for environments, models")
    asked = found.parse_args(arguments)
    asked.only = [OURS, *(name for name in asked.only.split(",") if name != OURS)]
    if unknown := set(asked.only) - set(PEERS):
        raise PeerError(f"--only {','.join(sorted(unknown))}: use {', '.join(PEERS)}")
    for path in (asked.target / "tokenizer.json", asked.draft / "config.json", asked.bundle / "manifest.json"):
        if not path.is_file():
            raise PeerError(f"{path} is missing: --target and --draft are checkpoints, --bundle is built of them")
    if min(asked.num_prompts, asked.threads) < 1 or asked.max_new_tokens < 2:
        raise PeerError("--num-prompts and --threads are at least 1, --max-new-tokens at least 2")
    return asked


def token_ids(file: Path, count: int, target: Path) -> list[list[int]]:
    """Return the token ids of `count` prompts of a file, evenly spread; raise PeerError if it cannot be read."""
    try:
        texts = [json.loads(line)["prompt"] for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PeerError(f"{file} cannot be read ({error}): give JSON objects with a prompt, a line each") from None
    if count > len(texts):
        raise PeerError(f"--num-prompts {count} is more than the {len(texts)} prompts of {file}")
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    return [tokenizer.encode(texts[i * len(texts) // count]).ids for i in range(count)]


@contextmanager
def workers(asked: argparse.Namespace) -> Iterator[dict[str, Worker]]:
    """Yield a worker process for each requested peer; they are loaded one after the other."""
    job = {name: str(getattr(asked, name).resolve()) for name in ("target", "draft", "bundle")}
    job |= {"threads": asked.threads, "float32": not asked.openvino_defaults}
    with ExitStack() as stack:
        started = {}
        for name in asked.only:
            folder = asked.folder.resolve() / name
            folder.mkdir(parents=True, exist_ok=True)
            python = environments.python(name, folder)
            print(f"{name}: loading", file=sys.stderr)
            started[name] = stack.enter_context(Worker(name, python, job | {"folder": str(folder)}))
        yield started


class Round:
    """The modes of all peers, which take turns; a mode that fails is `refused` and gets no further turn."""

    def __init__(self, peers: dict[str, Worker]) -> None:
        self.peers, self.refused = peers, dict[str, str]()
        self.turns = [(name, mode) for name, peer in peers.items() for mode in peer.modes]

    def decode(self, tokens: list[int], n: int, begin: int = 0) -> dict[tuple[str, str], Decoded]:
        """Decode a prompt in all modes; return the results by peer and mode. `begin`: the index of the first turn."""
        decoded = {}
        for name, mode in self.turns[begin:] + self.turns[:begin]:
            time.sleep(PAUSE)
            try:
                decoded[name, mode] = self.peers[name].decode(mode, tokens, n)
            except PeerError as error:
                print(error, file=sys.stderr)
                self.refused[f"{name}, {mode}"] = str(error)
        self.turns = [turn for turn in self.turns if turn in decoded]
        if not {(OURS, PLAIN), (OURS, OUR_MODE)} <= decoded.keys():
            raise PeerError(f"there is nothing to compare with: {'; '.join(self.refused.values())}")
        return decoded


def measure(peers: dict[str, Worker], prompts: list[list[int]], n: int) -> dict[str, Any]:
    """Run all turns of all prompts after a warm-up; return the rates and ratios."""
    every = Round(peers)
    every.decode(prompts[0], n)
    tallies = {turn: Tally() for turn in every.turns}
    for number, tokens in enumerate(prompts):
        print(f"prompt {number + 1} of {len(prompts)}: {len(tokens)} tokens", file=sys.stderr)
        decoded = every.decode(tokens, n, number * len(every.turns) // len(prompts))
        for turn, one in decoded.items():
            tallies[turn].add(one, one.tokens == decoded[OURS, PLAIN].tokens)
    by_peer = {name: {mode: tallies[peer, mode] for peer, mode in every.turns if peer == name} for name in peers}
    return ratios({name: modes for name, modes in by_peer.items() if modes}) | {"refused": every.refused}


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison, print and write it; return the exit status."""
    try:
        asked = options(arguments)
        prompts = token_ids(asked.prompts, asked.num_prompts, asked.target)
        with workers(asked) as peers:
            about = {name: {key: peer.about[key] for key in ("versions", "settings")} for name, peer in peers.items()}
            result = measure(peers, prompts, asked.max_new_tokens)
    except PeerError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    workload = {
        "target": asked.target.name,
        "prompts": asked.prompts.name,
        "num_prompts": len(prompts),
        "prompt_tokens": [len(each) for each in prompts],
        "max_new_tokens": asked.max_new_tokens,
        "threads": asked.threads,
    }
    save(asked.out, {"machine": machine(), "workload": workload, "about": about} | result)
    print(markdown(result))
    for which, best in result["auto_over_fastest_peer"].items():
        print(f"{which}: auto is {best['ratio']:.2f}× the fastest peer's best mode, {best['peer']}, {best['mode']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
