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
from specbuild.runtime.decoding.device.resident_run import ResidentRun


@contextmanager
def followed():
    """The entries that rounds which follow each other have written, by how many there were in each loop."""
    counts, real, launch = list[int](), ResidentRun.next_results, ResidentRun.launch

    def launched(self, *given):
        launch(self, *given)
        if self.running:
            counts.append(0)

    def entry(self):
        counts[-1] += 1
        return real(self)

    ResidentRun.launch, ResidentRun.next_results = launched, entry
    try:
        yield counts
    finally:
        ResidentRun.launch, ResidentRun.next_results = launch, real


def decode(asked, way):
    """All prompts by every tree."""
    params = [SamplingParams(**each) for each in asked["params"]]
    with followed() as counts, Engine.load(asked["bundle"], **way) as engine:
        cases = []
        for tree in asked["trees"]:
            wanted = [replace(each, speculation=tree) for each in params]
            case = compare(engine, tree, asked["prompts"], wanted, asked["expected"])
            cases.append({"differ": len(case.divergences), **case.to_dict()})
        resident = engine._loop.resident
        graphs = sum(step is not None for step in resident.graphs._graphs.values()) if resident else 0
        return {"notes": engine.notes, "cases": cases, "followed": counts, "loops": graphs}


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
