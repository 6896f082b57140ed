"""A loop on a host in a device's place with a tuned table."""

import numpy as np
from device_requests import Made, prompt_of, request_of
from made_up_chances import table_of
from tiny_models import BUCKETS

from specbuild.runtime import Limits
from specbuild.runtime.decoding.loop import LoopOptions
from specbuild.runtime.speculation.controller import Controller
from specbuild.runtime.speculation.cost_model import CostModel

NODES = BUCKETS[-1]
# By bucket, as a device's steps are: as long for every node count that runs in the same one.
LARGE = {
    "verify": [[1, 10.0], [2, 10.2], [4, 10.6], [5, 11.4], [8, 11.4], [9, 13.0], [16, 13.0]],
    "draft": [[1, 0.5], [16, 0.6]],
    "plain": 0.1,
    "round": 0.2,
    "level": 0.05,
}
SMALL = LARGE | {"verify": [[1, 1.0], [16, 9.0]], "draft": [[1, 0.9], [16, 1.0]]}


class Tuned(Made):
    """A loop and its controller."""

    def __init__(
        self,
        host,
        folder,
        times,
        names=("target", "draft"),
        limits=None,
        ahead=0,
        batch_size=1,
        looks_up=False,
        hostile=False,
        **options,
    ):
        """`hostile`: whether the draft likes best what it should like least."""
        own = LoopOptions(limits or Limits(), **options)
        super().__init__(host, folder, batch_size, names, looks_up, rounds=ahead, options=own)
        cost = CostModel(table_of(times, batch_size, most=NODES), batch_size, padded=True, corrected=False)
        self.controller = Controller(cost, len(names) > 1)
        if hostile:
            model = self.loop.draft_executor.model
            logits = self.device.array(model.tensors.logits)
            model.spoil = lambda nodes: np.negative(logits, out=logits)

    def requests(self, count=1, tokens=40, **fields):
        found = [
            request_of(
                prompt_of(i, 5 + 3 * i), **{"speculation": "best:15", "max_new_tokens": tokens, "seed": i} | fields
            )
            for i in range(count)
        ]
        for each in found:
            each.controller = self.controller.for_request(each.params.temperature)
        return found
