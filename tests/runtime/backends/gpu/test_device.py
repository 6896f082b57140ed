"""What decoding and the kernels have to agree on."""

from pathlib import Path

from specbuild.runtime.backends.gpu.device import MAX_NODES


def test_a_tree_has_as_many_nodes_as_the_kernels_take():
    header = (Path(__file__).parents[4] / "plugins" / "kernels.h").read_text(encoding="utf-8")
    assert f"#define SPECBUILD_MOST_NODES {MAX_NODES} " in header
