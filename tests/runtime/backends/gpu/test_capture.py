"""Graphs that repeat themselves: what is used of CUDA's packages is there, and on a GPU what they do."""

import numpy as np
import pytest
from device import gpus

from specbuild.runtime.backends.gpu import cuda
from specbuild.runtime.backends.kernels.abi import Ring

CALLS = (
    *("cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphCreate", "cuGraphDestroy", "cuGraphInstantiate"),
    *("cuGraphLaunch", "cuGraphExecDestroy", "cuGraphAddNode", "cuGraphAddChildGraphNode", "cuGraphGetEdges"),
    *("cuGraphAddDependencies", "cuGraphRemoveDependencies", "cuGraphConditionalHandleCreate", "cuCtxGetCurrent"),
    *("CUgraphNodeParams", "CUgraphEdgeData", "CU_GRAPH_COND_ASSIGN_DEFAULT"),
)


def test_the_bindings_have_what_a_capture_uses():
    driver = pytest.importorskip("cuda.bindings.driver")
    assert [name for name in CALLS if not hasattr(driver, name)] == []
    assert driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    assert driver.CUgraphNodeParams().conditional is not None


@pytest.mark.gpu
@pytest.mark.skipif(not gpus(), reason="needs an NVIDIA GPU and its driver")
def test_a_loop_on_a_gpu(cuda_kernels):
    """Five rounds and then three, and one where it is stopped, read while they go on."""
    device, rounds = cuda.Cuda(), 8
    stream = device.stream()
    ring, published = device.pinned((rounds, 1, 4), np.int32), device.pinned((1,), np.uint64)
    stop, first, one = (device.pinned((1,), kind) for kind in (np.uint32, np.uint64, np.int32))
    counter, length, emitted = (device.empty((1,), kind) for kind in (np.uint64, np.int32, np.int32))
    one[:] = 1
    device.upload(length, one, stream)
    host = {"ring": ring.ctypes.data, "published": published.ctypes.data, "stop": stop.ctypes.data}
    addresses = {"round": counter.address, "length": length.address, "emitted": emitted.address}
    addresses |= {"counts": length.address, "root_position": length.address}
    sizes = {"most": rounds, "rounds": rounds, "batch": 1, "nodes": 1}

    def body(handle):
        cuda_kernels.library.launch("publish", Ring(**host, **addresses, **sizes, handle=handle), stream)

    step = device.loop(body, stream)
    assert step, device.uncaptured
    for begin, stopped in ((3, 0), (5, 0), (0, 1)):
        first[:] = published[:] = begin
        stop[:], ring[:] = stopped, 0
        device.upload(counter, first, stream)
        step()
        end = begin + 1 if stopped else rounds
        assert all(device.reached(published, value, stream) for value in range(begin + 1, end + 1))
        assert not device.reached(published, end + 1, stream)
        assert ring[:, 0, 0].tolist() == [int(begin <= each < end) for each in range(rounds)]
    device.close()
