"""Fixtures of the runtime's tests: the tokenizer, the bundle's compiled models, and models made of a hash."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from spellings import Spelling

from specbuild.runtime import Bundle, Engine, LoadOptions, RequestMetrics, TreeSpec
from specbuild.runtime.backends.cpu.load import load_model
from specbuild.runtime.backends.executor import Executor, ModelSpec, StepInput
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.drafting.model import Draft, ModelDrafter
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.errors import PromptError
from specbuild.runtime.requests import sequence as requests
from specbuild.runtime.requests.detokenizer import Detokenizer
from specbuild.runtime.requests.prediction import Prediction
from specbuild.runtime.requests.text import Text
from specbuild.runtime.requests.tokenizer import Tokenizer
from specbuild.runtime.sampling.sampler import Sampler
from specbuild.runtime.speculation.tree import Tree
from specbuild.runtime.speculation.tree_growth import Growth

VOCAB = 12


@pytest.fixture(scope="session")
def tokenizer(pair):
    """The reference pair's tokenizer."""
    return Tokenizer(pair / "target" / "tokenizer.json", None, {})


@pytest.fixture(scope="session")
def load(bundle):
    """`load(model, batch_size)`: a fresh executor of one of the bundle's models."""
    opened, loaded = Bundle.open(bundle), list[Executor]()

    def make(name, batch_size):
        loaded.append(load_model(opened, name, batch_size, threads=1))
        return loaded[-1]

    yield make
    for executor in loaded:
        executor.close()


class HashModel:
    """Logits drawn from a hash of the text, all of it or its last `order` tokens; `error`: how far from the target."""

    def __init__(self, seed=0, error=0.0, order=0):
        self.seed, self.error, self.order = seed, error, order

    def __call__(self, tokens):
        key = zlib.crc32(np.array(tokens[-self.order :], dtype=np.int64).tobytes())
        logits = np.random.default_rng([self.seed, key]).normal(0, 2, VOCAB)
        off = np.random.default_rng([self.seed + 1, key]).normal(0, 2, VOCAB)
        return (logits + self.error * off).astype(np.float32)


class HashExecutor:
    """An executor whose cache rows are (position, token); a node's text is what it sees, in the order of positions."""

    buckets, closed = None, False

    def __init__(self, model, batch_size=1, capacity=256, max_nodes=64):
        self.spec = ModelSpec("fake", 1, 1, 1, VOCAB, capacity, max_nodes)
        self.model, self.batch_size, self.seconds = model, batch_size, 0.0
        self.rows: list[list[Any]] = [[(-1, -1)] * capacity for _ in range(batch_size)]
        self.steps = deque[list[StepInput]](maxlen=4096)  # the latest

    def step(self, inputs):
        self.seconds += 1.0
        self.steps.append(list(inputs))
        assert len({step_input.slot for step_input in inputs}) == len(inputs)
        return [self._step_input(step_input) for step_input in inputs]

    def _step_input(self, step_input):
        rows, count = self.rows[step_input.slot], len(step_input.tokens)
        end = step_input.start + count
        assert 0 < count <= self.spec.max_nodes
        assert end <= self.spec.capacity
        rows[step_input.start : end] = self.rows_of(step_input)
        visible = step_input.visible
        if visible is None:
            visible = np.tri(count, end - step_input.committed, step_input.start - step_input.committed, dtype=np.bool_)
        assert visible.shape == (count, end - step_input.committed)
        logits = np.empty((step_input.logits, VOCAB), dtype=np.float32)
        for index, seen in enumerate(visible[count - step_input.logits :]):
            drafted = zip(rows[step_input.committed :], seen, strict=False)
            text = sorted(rows[: step_input.committed] + [row for row, sees in drafted if sees])
            assert [position for position, *_ in text] == list(range(len(text)))
            logits[index] = self.model(self.text_of(text))
        return logits

    def rows_of(self, step_input):
        """What a step's nodes write into their rows, the positions first."""
        return list(zip(step_input.positions, step_input.tokens, strict=True))

    def text_of(self, rows):
        """What the model is given for the rows that a node sees."""
        return [token for _, token in rows]

    def commit(self, slot, rows, start):
        kept = self.rows[slot]
        moved = [kept[row] for row in rows]
        kept[start:] = moved + [(-1, -1)] * (self.spec.capacity - start - len(moved))

    def erase(self, slot):
        """Nothing is kept that could spoil others."""

    def copy(self, slot, source, rows):
        assert slot != source
        self.rows[slot][:rows] = self.rows[source][:rows]

    def hidden(self, slot):
        return np.zeros((self.spec.capacity, 0), dtype=np.float32)

    @property
    def cache_bytes(self):
        return 0

    def close(self):
        self.closed = True


class Letters(Spelling):
    """A tokenizer of one letter a token."""

    def __init__(self):
        super().__init__(lambda token: chr(97 + token))

    def encode(self, prompt, limit=None):
        if not isinstance(prompt, str | list):
            raise PromptError(f"no prompt: {prompt!r}")
        return [ord(token) - 97 if isinstance(token, str) else token for token in prompt]

    def has(self, token):
        return 0 <= token < VOCAB


class FaultyModel(HashModel):
    """Raises for texts that begin with RAISES, and gives NaN for those that begin with NAN."""

    RAISES, NAN = 10, 11

    def __call__(self, tokens):
        if tokens[0] == self.RAISES:
            raise RuntimeError("the model raises")
        logits = super().__call__(tokens)
        return logits * np.nan if tokens[0] == self.NAN else logits


class Gate:
    """Halts an executor before each of its steps, for tests that act between rounds."""

    def __init__(self, executor):
        self._go, self._halted, self._open = threading.Semaphore(0), threading.Semaphore(0), False
        run = executor.step

        def step(inputs):
            if not self._open:
                self._halted.release()
                self._go.acquire()
            return run(inputs)

        executor.step = step

    def halted(self):
        """Wait until a step is about to begin."""
        assert self._halted.acquire(timeout=60)

    def step(self):
        """Let the step go that is about to begin, and wait for the next."""
        self._go.release()
        self.halted()

    def open(self):
        """Halt no longer."""
        self._open = True
        self._go.release()


class Clock:
    """Stands still until it is set."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture(scope="session")
def hash_model():
    """The class of deterministic models."""
    return HashModel


@pytest.fixture(scope="session")
def hash_executor():
    """The class that runs such a model as the loop asks for it."""
    return HashExecutor


def plain_text(model, prompt, params, eos=frozenset()):
    """What such a model emits, token by token, with no loop and no cache."""
    sampler, tokens = Sampler(params, params.seed or 0, prompt, VOCAB), list(prompt)
    while len(tokens) < len(prompt) + params.max_new_tokens:
        token = sampler.choose(model(tokens), len(tokens) - 1, ())
        tokens.append(token)
        sampler.emit(token, len(tokens) - 1)
        if token in eos:
            break
    return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def plain():
    """See `plain_text`."""
    return plain_text


def sequence_of(prompt, params, index=0, slot=0, vocab_size=VOCAB, **other):
    """A sequence over the hash models' vocabulary, or another."""
    seed, longest = params.seed or 0, len(prompt) + params.max_new_tokens
    tree = None if params.speculation == "off" else TreeSpec.parse(params.speculation)
    return requests.Sequence(
        requests.Request(params, tree, longest, index),
        Text(prompt, longest, Prediction(params.prediction) if params.prediction else None),
        Sampler(params, seed, prompt, vocab_size),
        Detokenizer(other.get("tokenizer", Letters()), prompt, params.stop),
        RequestMetrics(len(prompt), seed, params.speculation),
        slot=slot,
    )


@pytest.fixture(scope="session")
def request_of():
    """See `sequence_of`."""
    return sequence_of


@pytest.fixture
def hash_engine():
    """`hash_engine(batch_size, **LoadOptions)`: an engine over a hash model, with `model`, `loop` and a `gate`."""
    engines = list[Any]()

    def make(batch_size=1, max_waiting=4, gated=False, clock=None, **given):
        model = FaultyModel(1)
        target, draft = (HashExecutor(m, batch_size, 256, 64) for m in (model, HashModel(1, error=0.3)))
        record = SimpleNamespace(vocab_size=VOCAB)
        manifest = SimpleNamespace(models={"target": record}, max_seq_len=192, buckets=[64], default_tree="topk:2,3")
        loop = HostLoop(target, Proposer(ModelDrafter(draft, 8), looks_up=False), 8, frozenset())
        options, times = LoadOptions(max_waiting=max_waiting, **given), [clock] if clock else []
        engine = Engine(manifest, Letters(), loop, batch_size, options, *times)
        engine.model, engine.loop, engine.gate = model, loop, Gate(target)
        if not gated:
            engine.gate.open()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.gate.open()
        engine.close()


def growths(drafter, *sequences):
    """How trees of the shapes that sequences ask for grow together."""
    drafts = [Draft(s, Growth(s.shape, Tree([s.tokens[-1]]))) for s in sequences if s.shape]
    drafter.grow(drafts)
    return [draft.growth for draft in drafts]


@pytest.fixture
def clock():
    """A clock that stands still until it is set."""
    return Clock()
