"""The flags of --ray: they become options, and one alone that does nothing is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from specbuild.cli.ray_flags import OPTIONS, taken
from specbuild.runtime.errors import OptionError


def given(**values: Any) -> dict[str, Any]:
    return {"port": 1, **{str(option.name): None for option in OPTIONS}, "use_ray": False, **values}


def test_nothing_given_is_no_ray() -> None:
    values = given()
    assert taken(values) is None
    assert values == {"port": 1}, "the rest is left"


def test_flags_become_options() -> None:
    options = taken(given(use_ray=True, autoscale="0, 4", num_cpus=2.0, routing="random", downscale_delay_s=3.0))
    assert options is not None
    assert (options.autoscale, options.num_cpus, options.routing, options.address) == ((0, 4), 2.0, "random", None)
    assert options.downscale_delay_s == 3.0


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"num_replicas": 2}, "--num-replicas does nothing without --ray"),
        ({"use_ray": True, "num_replicas": 2, "autoscale": "1,2"}, "give one of them"),
        ({"use_ray": True, "autoscale": "4"}, "MIN,MAX"),
        ({"use_ray": True, "autoscale": "a,b"}, "MIN,MAX"),
    ],
)
def test_what_is_wrong_is_said(values: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        taken(given(**values))


def test_ray_is_not_imported_until_it_is_asked_for() -> None:
    code = """
import sys
from specbuild.cli import ray_flags, serve
from specbuild.serve import prefixes, ray_options, remote_bundle, server
given = {str(option.name): None for option in ray_flags.OPTIONS} | {"use_ray": True}
options = ray_flags.taken(given)
if ray_options.find_spec("ray"):
    options.check(server.ServeOptions())
sys.exit("ray" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
