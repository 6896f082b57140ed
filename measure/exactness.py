"""Exactness: are the tokens those of plain decoding, and if not, was the first difference a near-tie?

Two ways of computing the same logits differ by rounding. A first divergence whose deciding margin is below the
precision's bound is a near-tie; any other is real. Where steps have an exactness class, every divergence is real.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import Any

from specbuild.runtime import Engine, Result
from specbuild.runtime.sampling.sampler import Sampler, SamplingParams


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first output token that differs from the expected one.

    `margin`: how far the choice was from the other token, in the units of `Sampler.margin`. `real`: no near-tie.
    """

    prompt: int
    position: int
    expected: int
    got: int
    margin: float
    real: bool


@dataclass(frozen=True, slots=True)
class Case:
    """One way of decoding compared with the expected tokens: the prompts and tokens compared, and the divergences."""

    name: str
    prompts: int
    tokens: int
    mean_acceptance_length: float
    divergences: list[Divergence]

    @property
    def exact(self) -> bool:
        """Return whether all divergences are near-ties."""
        return not any(d.real for d in self.divergences)

    def to_dict(self) -> dict[str, Any]:
        """Return the case as report.json stores it."""
        return asdict(self) | {"exact": self.exact}


def compare(
    engine: Engine,
    name: str,
    prompts: Seq[Seq[int]],
    params: Seq[SamplingParams],
    expected: Seq[Seq[int]],
    near_ties: bool = False,
) -> Case:
    """Decode prompts and compare the output tokens with the expected ones.

    Args:
        engine: The engine that decodes.
        name: The name of the case.
        prompts: Token ids of each prompt.
        params: Each prompt's parameters; every seed must be set.
        expected: The expected output token ids of each prompt.
        near_ties: Whether the expected tokens were computed elsewhere, so that rounding may have changed a near-tie.

    Raises:
        SpecbuildError: The error of the first request that failed.
    """
    bound = 0.0 if engine.exact and not near_ties else engine.manifest.exactness_bound
    found, accepted, rounds, results = list[Divergence](), 0, 0, _decode(engine, prompts, params)
    for index, (prompt, each, want, result) in enumerate(zip(prompts, params, expected, results, strict=True)):
        assert result.metrics  # every request ran
        stats = result.metrics.speculative_decoding
        accepted, rounds = accepted + stats.num_accepted_draft_tokens, rounds + stats.num_spec_steps
        divergence = _first(engine, index, prompt, each, list(want), result.token_ids, bound)
        if divergence:
            found.append(divergence)
    tokens = sum(len(want) for want in expected)
    return Case(name, len(prompts), tokens, 1 + accepted / max(rounds, 1), found)


def plain(engine: Engine, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[list[int]]:
    """Return the output tokens of plain decoding for each prompt."""
    return [result.token_ids for result in plain_results(engine, prompts, params)]


def plain_results(engine: Engine, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[Result]:
    """Return the results of plain decoding for each prompt."""
    return _decode(engine, prompts, [replace(each, speculation="off") for each in params])


def _decode(engine: Engine, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[Result]:
    """Decode the prompts; raise the first error, since the missing tokens of a failed request are no divergence."""
    results = engine.generate([list(prompt) for prompt in prompts], params)
    for result in results:
        if result.error:
            raise result.error
    return results


def _first(
    engine: Engine, index: int, prompt: Seq[int], params: SamplingParams, want: list[int], got: list[int], bound: float
) -> Divergence | None:
    differing = [i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b]
    if not differing:
        if len(want) == len(got):
            return None
        at = min(len(want), len(got))
        return Divergence(index, at, [*want, -1][at], [*got, -1][at], float("inf"), True)
    at = differing[0]
    history = [*prompt, *want[:at]]
    sampler = Sampler(params, params.seed or 0, prompt, engine.manifest.models["target"].vocab_size)
    for offset, token in enumerate(want[:at]):
        sampler.emit(token, len(prompt) + offset)
    logits, position = engine.logits(history), len(history) - 1
    choice = sampler.choose(logits, position, ())
    other = got[at] if choice == want[at] else want[at]
    margin = sampler.margin(logits, position, (), other)
    return Divergence(index, at, want[at], got[at], margin, margin >= bound)
