"""Compare specbuild with its peers on one pair, one file of prompts and one machine: tokens per second and ratios.

python -m benchmarks.peers.run --target DIR --draft DIR --bundle BUNDLE [options]

Temperature 0, batch 1, one request at a time; in float32, or with GGUF files as --target and --draft in their own
numbers. For each prompt all modes of all peers take turns, and prompts begin with different ones. All get the same
token ids and decode the same number of tokens, past an end-of-text token.
The README.md beside this file describes each peer, and how its threads and precision are set.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import OUT, PROMPTS, ROOT, machine, parser, save
from benchmarks.peers import environments
from benchmarks.peers.protocol import Decoded
from benchmarks.peers.table import OUR_MODE, OURS, PLAIN, Tally, markdown, ratios
from benchmarks.peers.worker import PeerError, Worker
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.engine.composition import tokenizer_of
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.requests.prompt_file import read

PEERS = (OURS, "transformers", "openvino", "onnxruntime-genai")
OF_GGUF = (OURS, "llama-cpp")  # that read GGUF files
PAUSE = 0.05  # seconds between turns, in which spinning thread pools go to sleep


def options(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line; raise PeerError if it is invalid."""
    found = parser(__doc__, OUT / "peers.json")
    found.add_argument("--target", type=Path, required=True, help="folder of a checkpoint, or a GGUF file")
    found.add_argument("--draft", type=Path, required=True, help="folder of a checkpoint, or a GGUF file")
    found.add_argument("--bundle", type=Path, required=True, help="built of the two, and tuned")
    found.add_argument("--prompts", type=Path, default=PROMPTS, help="a prompt file")
    found.add_argument("--num-prompts", type=int, default=8, help="so many, evenly spread over the file")
    found.add_argument("--max-new-tokens", type=int, default=128)
    found.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    found.add_argument("--openvino-defaults", action="store_true", help="let OpenVINO choose its precision (bf16, …)")
    found.add_argument("--only", metavar="PEER,…", help="of the peers; default: all that read such checkpoints")
    found.add_argument("--folder", type=Path, default=ROOT / "build" / "peers", help="for environments, models")
    asked = found.parse_args(arguments)
    peers = OF_GGUF if asked.target.is_file() else PEERS
    asked.only = [OURS, *(name for name in (asked.only or ",".join(peers)).split(",") if name != OURS)]
    if unknown := set(asked.only) - set(peers):
        raise PeerError(f"--only {','.join(sorted(unknown))}: use {', '.join(peers)}")
    for path in (asked.target, asked.draft, asked.bundle / "manifest.json"):
        if not path.exists():
            raise PeerError(f"{path} is missing: --target and --draft are checkpoints, --bundle is built of them")
    if min(asked.num_prompts, asked.threads) < 1 or asked.max_new_tokens < 2:
        raise PeerError("--num-prompts and --threads are at least 1, --max-new-tokens at least 2")
    return asked


def token_ids(file: Path, count: int, bundle: Path) -> list[list[int]]:
    """Return the token ids of `count` prompts of a file, evenly spread; raise PeerError if it cannot be read."""
    try:
        requests, tokenizer = read(str(file), {}), tokenizer_of(Bundle.open(bundle), None)
        if count > len(requests):
            raise PeerError(f"--num-prompts {count} is more than the {len(requests)} prompts of {file}")
        return [tokenizer.encode(requests[i * len(requests) // count].prompt) for i in range(count)]
    except SpecbuildError as error:
        raise PeerError(str(error)) from None


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
        prompts = token_ids(asked.prompts, asked.num_prompts, asked.bundle)
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
