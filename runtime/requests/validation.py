"""Validation: turns prompts and parameters into sequences, or says what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Literal

from specbuild.runtime.bundle.manifest import Manifest
from specbuild.runtime.errors import OptionError, PromptError, SpecbuildError, shown
from specbuild.runtime.sampling.constraint import Constraint
from specbuild.runtime.sampling.grammar import Grammars
from specbuild.runtime.sampling.min_tokens import MinTokens
from specbuild.runtime.sampling.sampler import Sampler, SamplingParams, fresh_seed
from specbuild.runtime.sampling.structured import StructuredOutputs
from specbuild.runtime.sampling.vocabulary import Vocabulary
from specbuild.runtime.speculation.controller import Controller, SequenceController
from specbuild.runtime.speculation.tree import TreeSpec

from .detokenizer import Detokenizer
from .metrics import RequestMetrics, SpeculationStats
from .prediction import Prediction
from .result import Chunk, Result
from .sequence import Request, Sequence
from .text import Text
from .tokenizer import Prompt, Tokenizer, too_long

Prompts = Prompt | Seq[Prompt]
Params = SamplingParams | Seq[SamplingParams] | None
Errors = Literal["raise", "return"]


class Validator:
    """Finds everything that can be wrong with a request before it runs; safe to use from several threads."""

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        fits: Callable[[Sequence], None],
        controller: Controller | None = None,
        trunk: bool = False,
        max_model_len: int | None = None,
    ) -> None:
        """Make the validator of an engine.

        Args:
            manifest: The bundle's manifest.
            tokenizer: The bundle's tokenizer.
            fits: Raises OptionError for a sequence that can never run: see `Loop.check`.
            controller: Chooses the trees of requests with speculation "auto"; None: they get the bundle's default tree.
            trunk: See `Loop`.
            max_model_len: See `LoadOptions`.
        """
        self.max_model_len = max_model_len or manifest.max_seq_len
        self._manifest, self._tokenizer, self._trunk = manifest, tokenizer, trunk
        self._fits, self._controller, self.grammars = fits, controller, Grammars(self._vocabulary)

    def requests(self, prompts: Prompts, params: Params, errors: Errors) -> tuple[list[Sequence], list[Chunk]]:
        """Make the sequences of several prompts.

        Args:
            prompts: A prompt, or a list of prompts; see `Engine.generate`.
            params: Sampling parameters for all prompts, or a list with one for each; None: the defaults.
            errors: "raise" the first error, or "return" errors as results.

        Returns:
            A sequence per sample, prompt by prompt; and, for each sample that cannot run, a chunk with its result.

        Raises:
            PromptError: A prompt cannot be used, and `errors` is "raise".
            OptionError: Parameters cannot be used and `errors` is "raise"; or `errors` or the number of parameters is
                wrong.
        """
        if errors not in ("raise", "return"):
            raise OptionError(f'errors must be "raise" or "return", not {shown(errors)}')
        listed, sequences, refused = _prompt_list(prompts), list[Sequence](), list[Chunk]()
        for index, (prompt, each) in enumerate(zip(listed, params_list(params, len(listed)), strict=True)):
            try:
                sequences += self.samples(prompt, each, index)
            except SpecbuildError as error:
                if errors == "raise":
                    raise type(error)(f"prompt {index + 1}: {error}") from None
                refused += [
                    Chunk(index, sample, "", [], None, Result("", [], "error", None, error=error))
                    for sample in range(each.n)
                ]
        return sequences, refused

    def samples(self, prompt: Prompt, params: SamplingParams, index: int = 0) -> list[Sequence]:
        """Return the n sequences of one prompt, the `index`-th of a call; raises PromptError and OptionError."""
        tokens = self.check(self.encode(prompt))
        params = self._with_min_tokens(self._structured(params))
        tree = self._tree(params.speculation)
        longest = min(len(tokens) + params.max_new_tokens, self.max_model_len)
        first = fresh_seed() if params.seed is None else params.seed
        predicted = self._prediction(params.prediction)
        sequences = [
            Sequence(
                request=Request(params, tree, longest, index, sample),
                text=Text(tokens, longest, Prediction(predicted) if predicted else None),
                sampler=Sampler(params, seed, tokens, self._manifest.models["target"].vocab_size),
                detokenizer=Detokenizer(
                    self._tokenizer, tokens, params.stop, params.min_tokens, params.skip_special_tokens
                ),
                metrics=RequestMetrics(
                    len(tokens),
                    seed,
                    self._named(params.speculation, tree),
                    background=params.background,
                    speculative_decoding=SpeculationStats(num_prediction_tokens=len(predicted)),
                ),
                controller=self._controller_of(params),
            )
            for sample, seed in enumerate((first + i) % 2**64 for i in range(params.n))
        ]
        self._check_bias(params)
        self._fits(sequences[0])
        return sequences

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids; a long prompt may be refused before all is tokenized. Raises PromptError."""
        return self._tokenizer.encode(prompt, self.max_model_len)

    def constraint(self, outputs: StructuredOutputs) -> Constraint:
        """Return the compiled constraint of a structured output, shared while anyone holds it; raises OptionError."""
        return self.grammars.constraint(outputs, self._tokenizer.token_id)

    def known_constraint(self, outputs: StructuredOutputs) -> Constraint | None:
        """Return the constraint of a structured output if it is compiled already; else None."""
        return self.grammars.known(outputs, self._tokenizer.token_id)

    def _prediction(self, given: str | Seq[int] | None) -> list[int]:
        """Return the tokens of a prediction; raise OptionError if they are too many or out of vocabulary."""
        limit, vocab_size = self.max_model_len, self._manifest.models["target"].vocab_size
        try:
            tokens = self._tokenizer.encode_output(given, limit) if isinstance(given, str) else list(given or ())
        except PromptError as error:
            raise OptionError(f"prediction is no text for this model: {error}") from None
        if len(tokens) > limit:
            raise OptionError(f"prediction has {len(tokens)} tokens, and texts have at most {limit}: shorten it")
        if not all(token < vocab_size for token in tokens):
            raise OptionError(f"prediction has a token id outside the vocabulary of {vocab_size}")
        return tokens

    def _structured(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with a structured output replaced by its constraint."""
        outputs = params.structured_outputs
        if outputs is None:
            return params
        found = self.constraint(StructuredOutputs.of(outputs))
        return replace(params, structured_outputs=None, constraint=found)

    def _vocabulary(self) -> Vocabulary:
        ends = tuple(self._manifest.eos_token_ids)
        if not ends:
            raise OptionError("this model has no token that ends a text, so structured_outputs would never end")
        return self._tokenizer.vocabulary(self._manifest.models["target"].vocab_size, ends)

    def _with_min_tokens(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with `min_tokens` added as a constraint."""
        if not params.min_tokens:
            return params
        ends = [*params.stop_token_ids, *([] if params.ignore_eos else self._manifest.eos_token_ids)]
        return replace(params, constraint=MinTokens(params.min_tokens, ends, params.constraint))

    def _named(self, speculation: str, tree: TreeSpec | None) -> str:
        return "auto" if self._controller and speculation == "auto" else str(tree or "off")

    def check(self, tokens: list[int]) -> list[int]:
        """Return a prompt's token ids unchanged; raise PromptError if they are empty, too many or out of vocabulary."""
        vocab_size, longest = self._manifest.models["target"].vocab_size, self.max_model_len
        if not tokens:
            raise PromptError("the prompt is empty: give at least one token")
        if len(tokens) >= longest:
            raise too_long(f"{len(tokens)} tokens", longest)
        if not all(0 <= token < vocab_size for token in tokens):
            raise PromptError(f"the prompt has a token id outside the vocabulary of {vocab_size}")
        return tokens

    def _check_bias(self, params: SamplingParams) -> None:
        """Raise OptionError if a `logit_bias` would make the target choose a row that no token has."""
        for token in params.logit_bias:
            if not self._tokenizer.has(token) and token not in self._manifest.eos_token_ids:
                raise OptionError(f"logit_bias names {token}, which no token has: give ids of the model's tokens")

    def _controller_of(self, params: SamplingParams) -> SequenceController | None:
        if self._controller is None or params.speculation != "auto":
            return None
        return self._controller.for_request(params.temperature, params.session, params.background)

    def _tree(self, speculation: str) -> TreeSpec | None:
        if speculation == "off":
            return None
        default = self._controller.cost.table.widest if self._controller else self._manifest.default_tree
        if speculation != "auto":
            return TreeSpec.parse(speculation).check(self._manifest.buckets[-1])
        return auto_tree(self._manifest, default, self._trunk)


def auto_tree(manifest: Manifest, widest: str, trunk: bool) -> TreeSpec:
    """Return the largest tree that "auto" grows: a chain if side branches are not accepted.

    Args:
        manifest: The bundle's manifest.
        widest: The tree that "auto" may grow otherwise.
        trunk: See `Loop`.

    Raises:
        OptionError: `widest` is not a tree, or the bundle cannot verify it.
    """
    tree = TreeSpec.parse(widest).check(manifest.buckets[-1])
    return tree.trunk if trunk else tree


def _prompt_list(prompts: Any) -> list[Prompt]:
    """Return a list of prompts, given a list or a single prompt."""
    if isinstance(prompts, str) or not isinstance(prompts, list | tuple):
        return [prompts]
    kinds = set(map(type, prompts))
    single = bool(kinds) and all(issubclass(kind, int | Mapping) and kind is not bool for kind in kinds)
    return [prompts] if single else list(prompts)


def params_list(params: Params, count: int) -> list[SamplingParams]:
    """Return parameters for each of `count` prompts; raise OptionError if they are neither one nor `count`."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, list | tuple) or not all(isinstance(each, SamplingParams) for each in params):
        raise OptionError(f"parameters must be SamplingParams, one or a list of them, not {shown(params)}")
    if len(params) != count:
        raise OptionError(f"{len(params)} sampling parameters for {count} prompts: give one, or one for each")
    return list(params)
