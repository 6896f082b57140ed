"""Options for serving on Ray Serve: the number of replicas and their resources. Does not import Ray."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any

from msgspec import Meta

from specbuild.runtime.errors import OptionError, shown
from specbuild.serve.option_types import Amount, Count, check_types
from specbuild.serve.options import ServeOptions

from .prefixes import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Options for scaling and routing on Ray Serve; validated on construction.

    Args:
        num_replicas: Number of engines, each in its own process.
        autoscale: Minimum and maximum number of engines, in place of num_replicas; with a minimum of 0 all may stop.
        address: Address of a Ray cluster; None starts one on this machine.
        num_cpus: CPUs per replica, which decodes with as many threads unless `LoadOptions.threads` is set.
        num_gpus: GPUs per replica.
        target_ongoing_requests: See Ray Serve; None: the bundle's slots.
        max_ongoing_requests: See Ray Serve; None: twice the bundle's slots.
        max_queued_requests: See Ray Serve; -1: any number.
        upscale_delay_s: See Ray Serve; None: its default.
        downscale_delay_s: See Ray Serve; None: its default.
        routing: "prefix", "balanced" (two random choices) or "random".

    Raises:
        OptionError: If a value is out of range.
    """

    num_replicas: Count = 1
    autoscale: tuple[Annotated[int, Meta(ge=0)], Count] | None = None
    address: str | None = None
    num_cpus: Amount = 1.0
    num_gpus: Amount = 0.0
    target_ongoing_requests: Annotated[float, Meta(gt=0)] | None = None
    max_ongoing_requests: Count | None = None
    max_queued_requests: Annotated[int, Meta(ge=-1)] = 256
    upscale_delay_s: Amount | None = None
    downscale_delay_s: Amount | None = None
    routing: Routing = "prefix"

    def __post_init__(self) -> None:
        check_types(self)
        if self.autoscale and not self.autoscale[0] <= self.autoscale[1]:
            raise OptionError(f"autoscale is MIN,MAX with MIN ≤ MAX, not {shown(self.autoscale)}")

    def check(self, options: ServeOptions) -> None:
        """Raise OptionError if Ray is not installed, or if an option works in a single process only."""
        if find_spec("ray") is None:
            raise OptionError("--ray needs Ray Serve: pip install 'specbuild-trt[ray]'")
        for name in ("text_sample", "uds", "admin_port", "admin_uds"):
            if getattr(options, name) is not None:
                raise OptionError(
                    f"--{name.replace('_', '-')} is of one server and does not go with --ray: leave it out"
                )

    def prepare(self, options: ServeOptions) -> None:
        """Do what `check` does, then set the environment of Ray and of a cluster that it starts; before its import."""
        self.check(options)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage report
        os.environ.setdefault("RAY_SERVE_USE_GRPC_BY_DEFAULT", "1")  # between processes; costs less than Ray's objects
        os.environ.setdefault("RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH", f"{(1 << 31) - 1}")  # else less than a body

    def scaling(self, slots: int) -> dict[str, Any]:
        """Return the options of Ray's deployment for engines with `slots` slots each."""
        told: dict[str, Any] = {
            "max_ongoing_requests": self.max_ongoing_requests or 2 * slots,
            "max_queued_requests": self.max_queued_requests,
            "ray_actor_options": {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus},
        }
        if self.autoscale is None:
            return {**told, "num_replicas": self.num_replicas}
        low, high = self.autoscale
        delays = {"upscale_delay_s": self.upscale_delay_s, "downscale_delay_s": self.downscale_delay_s}
        target = self.target_ongoing_requests or float(slots)
        scaling = {"min_replicas": low, "max_replicas": high, "target_ongoing_requests": target}
        scaling |= {name: value for name, value in delays.items() if value is not None}
        return {**told, "num_replicas": None, "autoscaling_config": scaling}
