"""Requests for loops over tiny models, the scheduler's part of a round, and such a loop with what it is made of."""

from dataclasses import fields

import numpy as np
from hash_models import sequence_of
from host_device import HostDevice, HostQueue
from spellings import Spelling
from tiny_models import CHUNK, VOCAB, executor

from specbuild.runtime.decoding.device.loop import DeviceLoop
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.decoding.loop import DEFAULTS
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.sampler import SamplingParams

REQUESTS = [
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 12, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 0.9, "frequency_penalty": 0.6, "presence_penalty": 0.3, "logit_bias": {10: 2.0, 11: -5.0}},
    {"repetition_penalty": 1.4, "logit_bias": {3: 1.5}},
    {"speculation": "off", "temperature": 1.0},
    {"frequency_penalty": 0.8, "temperature": 1.0, "speculation": "off"},
]
LENGTHS = [3, 33, 1, 12, 26, 2, 7]


class Words(Spelling):
    def __init__(self):
        super().__init__(lambda token: chr(0x4E00 + token))


def request_of(prompt, **fields):
    params = SamplingParams(**{"max_new_tokens": 14, "seed": 7} | fields)
    return sequence_of(prompt, params, slot=-1, vocab_size=VOCAB, tokenizer=Words())


def prompt_of(seed, length):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return tokens


def requests(tree):
    return [
        request_of(prompt_of(i, length), **{"speculation": tree, "max_new_tokens": 9 + 2 * i, "seed": i} | fields)
        for i, (length, fields) in enumerate(zip(LENGTHS, REQUESTS, strict=True))
    ]


def run(loop, waiting):
    """As the scheduler does: a freed slot takes the next sequence."""
    everyone, waiting = waiting, list(waiting)
    active, free = list[Sequence](), list(range(loop.target.batch_size))
    while waiting or active:
        while waiting and free and (slot := loop.admission.pick(waiting[0], free)) is not None:
            active.append(waiting.pop(0))
            active[-1].slot = slot
            free.remove(slot)
        before = [len(s.tokens) + s.cached for s in active]
        loop.round(active)
        assert all(s.finish_reason or len(s.tokens) + s.cached > b for s, b in zip(active, before, strict=True))
        for sequence in [s for s in active if s.finish_reason]:
            loop.release(sequence.slot)
            free.append(sequence.slot)
            active.remove(sequence)
    return everyone


def again(sequence, **change):
    """The same request once more, but for a change."""
    own = {field.name: getattr(sequence.params, field.name) for field in fields(SamplingParams)}
    return request_of(sequence.tokens[: sequence.metrics.num_prompt_tokens], **own | change)


def plain(folder, wanted, name="target", eos=frozenset()):
    """The same requests one by one, without speculation, by the loop on the host."""
    alone = HostLoop(executor(name, HostDevice(), folder, 1), Proposer(looks_up=False), CHUNK, eos)
    return run(alone, [again(each, speculation="off") for each in wanted])


def check_plain(folder, done, name="target", eos=frozenset()):
    """Every text is whole, and plain decoding's."""
    expected = [s.output for s in plain(folder, done, name, eos)]
    assert [(s.error, s.output) for s in done] == [(None, output) for output in expected]


class Made:
    """A loop with what it is made of."""

    def __init__(
        self,
        host,
        folder,
        batch_size=2,
        names=("target", "draft"),
        looks_up=False,
        eos=frozenset(),
        rounds=0,
        options=DEFAULTS,
    ):
        """`looks_up`: whether texts are continued from themselves; `rounds`: that follow each other at most."""
        self.device = HostDevice()
        self.target, *drafts = [executor(name, self.device, folder, batch_size) for name in names]
        draft, queue = drafts[0] if drafts else None, HostQueue(host, self.device)
        self.loop = DeviceLoop(self.target, draft, queue, eos, looks_up, options=options, ahead=rounds)
