"""Decodes with a bundle on the stand-in card, in a process of its own; what is asked comes as JSON, and the answer too.

python decode.py < {"bundle", "prompts", "params", "expected", "trees", "ways": [{"batch_size", "resident"}]}
"""

import json
import sys
from contextlib import contextmanager
from dataclasses import replace

import card_driver

from specbuild.measure.exactness import compare
from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.backends.gpu.cuda import Cuda
from specbuild.runtime.decoding.device.resident_run import ResidentRun


@contextmanager
def followed():
    """The graphs of loops, and the entries that rounds which follow each other have written, by run."""
    graphs, counts = list[bool](), list[int]()
    capture, real, launch = Cuda.loop, ResidentRun.next_results, ResidentRun.launch

    def captured(self, body, stream):
        graph = capture(self, body, stream)
        graphs.append(graph is not None)
        return graph

    def launched(self, *given):
        launch(self, *given)
        if self.running:
            counts.append(0)

    def entry(self):
        counts[-1] += 1
        return real(self)

    Cuda.loop, ResidentRun.launch, ResidentRun.next_results = captured, launched, entry
    try:
        yield graphs, counts
    finally:
        Cuda.loop, ResidentRun.launch, ResidentRun.next_results = capture, launch, real


def decode(asked, way):
    """All prompts by every tree."""
    params = [SamplingParams(**each) for each in asked["params"]]
    with followed() as (graphs, counts), Engine.load(asked["bundle"], **way) as engine:
        cases = []
        for tree in asked["trees"]:
            wanted = [replace(each, speculation=tree) for each in params]
            case = compare(engine, tree, asked["prompts"], wanted, asked["expected"])
            cases.append({"differ": len(case.divergences), **case.to_dict()})
        return {"notes": engine.notes, "cases": cases, "followed": counts, "loops": sum(graphs)}


def main():
    asked, found, compilations = json.load(sys.stdin), [], []
    for way in asked["ways"]:
        before = compiled()
        found.append(decode(asked, way))
        compilations.append(compiled() - before)
    left = card_driver.counts()
    del left["events"]  # which the libraries keep
    print(json.dumps({"ways": found, "compilations": compilations, "left": left}))


def compiled():
    """How many kernels TensorRT-RTX has compiled so far."""
    rtx = sys.modules.get("tensorrt_rtx")
    return len(rtx.compilations) if rtx else 0


if __name__ == "__main__":
    main()
