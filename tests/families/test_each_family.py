"""Every text decoder of transformers: as a CPU runs it, or refused in a line that names what is missing."""

import pytest
from family_check import check_family
from tiny_families import families

from specbuild.runtime.errors import CheckpointError

# whose layers have what no other family's have
SPECIAL = "deepseek_v2 deepseek_v3 gemma3n_text gemma4_text gpt_oss lfm2 llama4_text mimo_v2_flash".split()


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", SPECIAL)
def test_layers_that_differ(model_type):
    check_family(model_type)


@pytest.mark.soak
@pytest.mark.parametrize("model_type", [name for name in families() if name not in SPECIAL])
def test_a_family_builds_or_is_refused(model_type):
    reason = ""
    try:
        check_family(model_type)
    except CheckpointError as error:
        reason = str(error)
    assert "\n" not in reason
