"""The flags of `specbuild serve --ray`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from specbuild.runtime.errors import OptionError

if TYPE_CHECKING:
    from specbuild.serve.ray.options import RayOptions

_FLAGS: dict[str, dict[str, Any]] = {
    "num-replicas": {"type": int, "metavar": "N", "help": "Engines on Ray, each in its own process; 1 by default."},
    "autoscale": {"metavar": "MIN,MAX", "help": "Replicas by load, in place of --num-replicas; MIN may be 0."},
    "address": {"help": "A running Ray cluster, such as auto or ray://HOST:10001; by default one is started here."},
    "num-cpus": {"type": float, "metavar": "N", "help": "CPUs of each replica, and its threads; 1 by default."},
    "num-gpus": {"type": float, "metavar": "N", "help": "GPUs of each replica; 0 by default."},
    "routing": {
        "type": click.Choice(["prefix", "balanced", "random"]),
        "help": "Which replica gets a prompt: prefix, the default, prefers the one that has its beginning cached.",
    },
    "target-ongoing-requests": {"type": float, "metavar": "N", "help": "Ray Serve's; a bundle's slots by default."},
    "max-ongoing-requests": {"type": int, "metavar": "N", "help": "Ray Serve's; twice a bundle's slots by default."},
    "max-queued-requests": {"type": int, "metavar": "N", "help": "Ray Serve's; 256 by default."},
    "upscale-delay-s": {"type": float, "metavar": "SECONDS", "help": "Ray Serve's."},
    "downscale-delay-s": {"type": float, "metavar": "SECONDS", "help": "Ray Serve's."},
}
OPTIONS: list[click.Option] = [
    click.Option(["--ray", "use_ray"], is_flag=True, help="Serve on Ray Serve: several replicas, on several machines."),
    *(click.Option([f"--{name}"], **given) for name, given in _FLAGS.items()),
]


def ray_options(given: dict[str, Any]) -> RayOptions | None:
    """Remove these flags from the given values and return their options, None without --ray.

    Raises OptionError for a flag without --ray, or a bad value.
    """
    values = {name: given.pop(name) for name in (flag.replace("-", "_") for flag in _FLAGS)}
    values = {name: value for name, value in values.items() if value is not None}
    if not given.pop("use_ray"):
        if values:
            raise OptionError(f"--{next(iter(values)).replace('_', '-')} does nothing without --ray: give that too")
        return None
    from specbuild.serve.ray.options import RayOptions

    if "autoscale" in values:
        if "num_replicas" in values:
            raise OptionError("--num-replicas and --autoscale say the same: give one of them")
        low, comma, high = values["autoscale"].partition(",")
        if not (comma and low.strip().isdecimal() and high.strip().isdecimal()):
            raise OptionError(f"--autoscale is MIN,MAX, such as 0,4, not {values['autoscale'][:80]!r}")
        values["autoscale"] = int(low), int(high)
    return RayOptions(**values)
