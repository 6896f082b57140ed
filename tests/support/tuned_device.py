"""A loop on a host in a device's place with a tuned table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from device_requests import Made, prompt_of, request_of
from made_up_chances import table_of
from tiny_models import BUCKETS

from specbuild.runtime import Limits
from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.decoding.loop import LoopOptions
from specbuild.runtime.requests.sequence import Sequence
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
        host: KernelLibrary,
        folder: Path,
        times: dict[str, Any],
        names: tuple[str, ...] = ("target", "draft"),
        limits: Limits | None = None,
        ahead: int = 0,
        batch_size: int = 1,
        looks_up: bool = False,
        hostile: bool = False,
        **options: Any,
    ) -> None:
        """`hostile`: whether the draft likes best what it should like least."""
        own = LoopOptions(limits or Limits(), **options)
        super().__init__(host, folder, batch_size, names, looks_up, rounds=ahead, options=own)
        cost = CostModel(table_of(times, batch_size, most=NODES), batch_size, padded=True, corrected=False)
        self.controller = Controller(cost, len(names) > 1)
        if hostile:
            model: Any = self.loop.draft_executor.model  # type: ignore[union-attr]
            logits = self.device.array(model.tensors.logits)
            model.spoil = lambda nodes: np.negative(logits, out=logits)

    def requests(self, count: int = 1, tokens: int = 40, **fields: Any) -> list[Sequence]:
        found = [
            request_of(
                prompt_of(i, 5 + 3 * i), **{"speculation": "best:15", "max_new_tokens": tokens, "seed": i} | fields
            )
            for i in range(count)
        ]
        for each in found:
            each.controller = self.controller.for_request(each.params.temperature)
        return found
