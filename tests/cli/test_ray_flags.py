"""The flags of --ray become options; tests/cli/test_refusals.py has those that do nothing alone."""

import subprocess
import sys

import pytest

from specbuild.cli.ray_flags import OPTIONS, ray_options

GIVEN = {str(option.name): None for option in OPTIONS} | {"use_ray": True}


def test_flags_become_options():
    options = ray_options(GIVEN | {"autoscale": "0, 4", "num_cpus": 2.0, "routing": "random", "downscale_delay_s": 3.0})
    assert options
    assert (options.autoscale, options.num_cpus, options.routing, options.address) == ((0, 4), 2.0, "random", None)
    assert options.downscale_delay_s == 3.0


@pytest.mark.slow
def test_ray_is_not_imported_until_it_is_asked_for():
    code = """
import sys
from specbuild.cli import ray_flags, serve
from specbuild.serve.http import server
from specbuild.serve.ray import options as ray_options, prefixes, remote_bundle
given = {str(option.name): None for option in ray_flags.OPTIONS} | {"use_ray": True}
options = ray_flags.ray_options(given)
if ray_options.find_spec("ray"):
    options.check(server.ServeOptions())
sys.exit("ray" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
