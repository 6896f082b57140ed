"""Shows the state of a running engine: times, caches, queue, health and the limits on its drafts."""

from __future__ import annotations

from specbuild.runtime.bundle.manifest import Manifest
from specbuild.runtime.decoding.loop import Loop
from specbuild.runtime.errors import OptionError, shown
from specbuild.runtime.requests.metrics import RunStats
from specbuild.runtime.requests.validation import Validator
from specbuild.runtime.speculation.cost_model import CostModel
from specbuild.runtime.speculation.draft_limits import Limits
from specbuild.runtime.speculation.timing_table import TimingTable

from .health import Health, Usage
from .scheduler import Scheduler


class EngineView:
    """The part of an engine that tells of it; any thread may ask at any time."""

    name: str
    manifest: Manifest
    batch_size: int
    scheduler: Scheduler
    timings: TimingTable | None  # None: the bundle was never tuned
    _loop: Loop
    _validator: Validator
    _cost: CostModel | None

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a text, prompt and output together."""
        return self._validator.max_model_len

    @property
    def stats(self) -> RunStats:
        """The time of all rounds since loading by its parts: a snapshot, so ask again for later rounds."""
        return self._loop.stats

    @property
    def correction(self) -> float:
        """Ratio of the target's recent step times to those of the timing table; 1 without a table."""
        return self._cost.correction if self._cost else 1.0

    @property
    def limits(self) -> Limits:
        """Limits on drafting, to be set at any time; OptionError for more nodes than at loading: see `Limits`."""
        return self._loop.planner.current

    @limits.setter
    def limits(self, limits: Limits) -> None:
        if not isinstance(limits, Limits):
            raise OptionError(f"limits must be Limits, not {shown(limits)}")
        if limits.min_expected_speedup > 1 and not self.timings:
            raise OptionError(f"min_expected_speedup needs a tuned bundle: tune {self.name}")
        self._loop.planner.limit(limits)

    @property
    def notes(self) -> list[str]:
        """Notes on what does not run as it should: steps that could not be captured in a CUDA graph, and why."""
        return self._loop.notes

    @property
    def exact(self) -> bool:
        """Return whether a seed always gives one text; else rounding may turn gaps below `manifest.exactness_bound`."""
        return self._loop.exactness is not None

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV caches of target and draft."""
        return self._loop.cache_bytes

    @property
    def cached_texts(self) -> list[tuple[str | None, list[int]]]:
        """The `cache_salt` and the token ids of each text in a slot's cache."""
        return self._loop.admission.cached_texts()

    @property
    def usage(self) -> Usage:
        """The requests that wait and run now, and the fill of the caches."""
        return self.scheduler.usage(self.batch_size * self.manifest.max_seq_len)

    def health(self) -> Health:
        """Return whether the engine makes rounds and what it waits for; answers even while a round hangs."""
        return self.scheduler.health()
