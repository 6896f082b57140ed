"""Compare the acceptance of shared noise with that of rejection sampling, on the same pair, texts and candidates.

At each position of sampled texts the target's and the draft's distributions p and q are compared. With k candidates,
specbuild accepts if argmax(log p + g) is among the k best of log q + g, where g is Gumbel noise. Rejection sampling
draws k candidates from q one after another, without replacement, and accepts x if a uniform number is below
p(x) / q(x), where p is what the earlier candidates left of it (Leviathan et al. 2023, arXiv 2211.17192; for several
candidates SpecInfer, arXiv 2305.09781, and Sequoia, arXiv 2402.12374). Both emit an exact sample of p.

    python benchmarks/rejection.py pycode.bundle --temperature 0.8 --out benchmarks/results
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from common import prompts, save
from numpy.typing import NDArray

from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.decoding.host_loop import HostLoop

Array = NDArray[np.float64]
CANDIDATES = (1, 2, 3, 4)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--trials", type=int, default=64, help="draws at each position")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    args = parser.parse_args()
    rng, shared, rejected = np.random.default_rng(0), list[Array](), list[Array]()
    with Engine.load(args.bundle) as engine:
        params = SamplingParams(args.max_new_tokens, temperature=args.temperature, seed=0, ignore_eos=True)
        chosen = prompts()[: args.num_prompts]
        for prompt, result in zip(chosen, engine.generate(chosen, params), strict=True):
            tokens = [*engine.tokenizer.encode(prompt), *result.token_ids]
            for p, q in zip(*distributions(engine, tokens, len(result.token_ids), args.temperature), strict=True):
                shared.append(by_shared_noise(p, q, rng, args.trials))
                rejected.append(by_rejection(p, q, rng, args.trials))
    ours, theirs = (np.array(each).mean(axis=0) for each in (shared, rejected))
    errors = [float(np.array(each).std(axis=0).max() / np.sqrt(len(each))) for each in (shared, rejected)]
    settings = {name: value for name, value in vars(args).items() if name not in ("bundle", "out")}
    result = {"candidates": CANDIDATES, "shared_noise": ours.tolist(), "rejection_sampling": theirs.tolist()}
    result |= {"standard_errors": errors, "positions": len(shared), "settings": settings}
    save(args.out, "rejection-cpu", result)


def distributions(engine: Engine, tokens: list[int], count: int, temperature: float) -> tuple[Array, Array]:
    """Return p and q before each of the last `count` tokens, `float64[count, V]` each."""
    with engine.scheduler.exclusive() as loop:
        if loop.draft_executor is None:
            raise SystemExit("the bundle has no draft")
        models = (loop, HostLoop(loop.draft_executor, None, loop.reader.chunk, loop.emission.eos))
        found = []
        for model in models:
            logits = model.logits(tokens[:-1], count).astype(np.float64) / temperature
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            found.append(weights / weights.sum(axis=1, keepdims=True))
    return found[0], found[1]


def by_shared_noise(p: Array, q: Array, rng: np.random.Generator, trials: int) -> Array:
    """Return how often one of k candidates is the target's choice under shared noise, for each k."""
    noise = rng.gumbel(size=(trials, len(p)))
    with np.errstate(divide="ignore"):
        choice, drafted = (np.log(p) + noise).argmax(axis=1), np.log(q) + noise
    rank = (drafted > drafted[np.arange(trials), choice][:, None]).sum(axis=1)
    return np.array([(rank < k).mean() for k in CANDIDATES])


def by_rejection(p: Array, q: Array, rng: np.random.Generator, trials: int) -> Array:
    """Return how often rejection sampling accepts one of k candidates, drawn without replacement, for each k."""
    accepted = np.zeros(len(CANDIDATES))
    for order in (np.log(np.maximum(q, 1e-300)) + rng.gumbel(size=(trials, len(q)))).argsort(axis=1)[:, ::-1]:
        rest, draft = p, q
        for k, token in enumerate(order[: CANDIDATES[-1]]):
            if draft[token] <= 0 or rng.random() * draft[token] < rest[token]:
                accepted[k:] += 1
                break
            rest = np.maximum(rest - draft, 0)
            rest = rest / max(rest.sum(), 1e-300)
            draft = draft.copy()
            draft[token] = 0
            draft = draft / max(draft.sum(), 1e-300)
    return accepted / trials


if __name__ == "__main__":
    main()
