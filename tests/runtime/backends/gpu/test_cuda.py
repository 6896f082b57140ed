"""The GPU as a device: what is said without one here, the geometry of its copies, and on a GPU what it does."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from device import gpus

from specbuild.runtime.backends.gpu.cuda import Cuda, check_driver, driver_fault
from specbuild.runtime.backends.gpu.device import Tensor
from specbuild.runtime.errors import ExecutionError

without_gpu = pytest.mark.skipif(gpus() > 0, reason="needs a machine without a GPU")
needs_gpu = pytest.mark.skipif(not gpus(), reason="needs an NVIDIA GPU and its driver")
CACHE = (6, 2, 3, 20, 4)  # [2 · layers, slots, heads, rows, D]


@without_gpu
@pytest.mark.parametrize("call", [check_driver, Cuda])
def test_without_a_gpu_it_says_so_in_one_line(call: object) -> None:
    with pytest.raises(ExecutionError, match=r"no NVIDIA driver \(libcuda.so.1\): install one for CUDA 13.0|no GPU"):
        call()


@pytest.mark.parametrize(
    ("version", "status", "devices", "fault"),
    [
        *(
            (13000, 0, 1, None),
            (14000, 0, 2, None),
            (12080, 0, 1, "is for CUDA 12.8, and 13.0 is needed: update the driver"),
        ),
        *(
            (13000, 100, 0, "shows no GPU"),
            (13000, 0, 0, "shows no GPU"),
            (0, 803, 0, "does not start (CUDA error 803)"),
        ),
    ],
)
def test_what_is_wrong_with_a_driver(version, status, devices, fault):
    found = driver_fault((13, 0), version, status, devices)
    assert found is None if fault is None else fault in str(found)


def test_importing_it_needs_no_package_of_cuda():
    code = """import sys, specbuild.runtime.backends.tensorrt.model
assert not {"cuda", "tensorrt", "tensorrt_rtx"} & {*sys.modules}"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("Device", "set_current name arch properties create_stream"),
        ("Stream", "handle wait sync record close"),
        ("Buffer", "handle close"),
        ("LegacyPinnedMemoryResource", "allocate"),
        ("EventOptions", "timing_enabled"),
        ("Event", "__sub__"),
    ],
)
def test_cuda_core_has_what_is_used(name, attributes):
    found = pytest.importorskip("cuda.core")
    for part in name.split("."):
        found = getattr(found, part)
    assert [each for each in attributes.split() if not hasattr(found, each)] == []


@pytest.fixture
def cuda():
    device = Cuda()
    yield device
    device.close()


def put(cuda, array, stream):
    tensor, staged = cuda.empty(array.shape, array.dtype), cuda.pinned(array.shape, array.dtype)
    staged[...] = array
    cuda.upload(tensor, staged, stream)
    return tensor


def get(cuda, tensor, stream):
    array = cuda.pinned(tensor.shape, tensor.dtype)
    cuda.download(array, tensor, stream)
    cuda.wait(stream)
    return array.copy()


@pytest.mark.gpu
@needs_gpu
def test_what_a_gpu_is(cuda):
    free, total = cuda.memory
    assert 0 < free <= total
    assert cuda.name
    assert cuda.capability.isdigit()
    assert cuda.multiprocessors > 0
    assert cuda.driver_version >= (13, 0)
    assert all(isinstance(each, str) for each in cuda.identity.values())  # as a timing table's machine is written
    assert cuda.measure_bandwidth(1 << 24, 3) > 0


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_notes_the_time(cuda):
    stream, other = cuda.stream(), cuda.stream()
    large = cuda.empty((1 << 26,), np.uint8)
    begin = cuda.mark(stream)
    for _ in range(10):
        cuda.fill(large, 1, stream)
    middle, unrelated = cuda.mark(stream), cuda.mark(other)
    cuda.fill(large, 2, stream)
    end = cuda.mark(stream)
    cuda.wait(stream)
    cuda.wait(other)
    assert 0 < end - middle < end - begin < 1000
    assert cuda.mark(stream, begin) is begin, "it is used again"
    cuda.wait(stream)
    assert begin - end > 0
    assert isinstance(unrelated - end, float)


@pytest.mark.gpu
@needs_gpu
def test_copies_and_moves_on_a_gpu(cuda):
    stream, cache = cuda.stream(), np.random.default_rng(1).normal(size=CACHE).astype(np.float16)
    there, twin, expected = put(cuda, cache, stream), cuda.empty(CACHE, np.float16), cache.copy()
    assert not get(cuda, twin, stream).any()
    cuda.copy(twin, there, stream)
    for slot, row, other, to, count in ((1, 5, 1, 4, 1), (1, 9, 1, 6, 1), (1, 19, 1, 7, 1), (1, 2, 0, 7, 5)):
        cuda.move_rows(twin, (slot, row), (other, to), count, stream)
        expected[:, other, :, to : to + count] = expected[:, slot, :, row : row + count].copy()
    np.testing.assert_array_equal(get(cuda, twin, stream), expected)
    np.testing.assert_array_equal(get(cuda, there, stream), cache)
    long, short = cuda.empty((3, 64), np.int32), np.arange(15, dtype=np.int32).reshape(3, 5)
    cuda.copy_rows(long, put(cuda, short, stream), stream)
    np.testing.assert_array_equal(get(cuda, long, stream), np.pad(short, ((0, 0), (0, 59))))


@pytest.mark.gpu
@needs_gpu
def test_streams_wait_for_each_other_on_a_gpu(cuda):
    first, second = cuda.stream(), cuda.stream()
    big, last = cuda.empty((1 << 28,), np.uint8), cuda.empty((1,), np.uint8)
    for byte in (1, 2, 3):
        cuda.fill(big, byte, first)
    cuda.after(second, first)
    cuda.copy(last, Tensor(big.address + big.nbytes - 1, (1,), big.dtype), second)
    assert get(cuda, last, second) == 3


@pytest.mark.gpu
@needs_gpu
def test_graphs_on_a_gpu(cuda):
    stream, other = cuda.stream(), cuda.stream()
    source = put(cuda, np.arange(64, dtype=np.int32), stream)
    to = cuda.empty((64,), np.int32)

    def enqueue():  # on two streams, which is one graph
        cuda.fill(source, 1, stream)
        cuda.after(other, stream)
        cuda.copy(to, source, other)
        cuda.after(stream, other)

    step = cuda.graph(enqueue, stream)
    assert cuda.uncaptured == []
    assert step is not enqueue
    cuda.wait(stream)
    assert not get(cuda, to, stream).any(), "captured, and not run"
    for _ in range(2):
        cuda.fill(to, 0, stream)
        step()
        assert (get(cuda, to, stream) == 0x01010101).all()


UNCAPTURABLE = """
import numpy as np
from specbuild.runtime.backends.gpu.cuda import Cuda

cuda = Cuda()
stream, to, found = cuda.stream(), cuda.empty((4,), np.uint8), cuda.pinned((4,), np.uint8)


def enqueue():
    cuda.fill(to, 7, stream)
    cuda.wait(stream)  # which no capture allows


def filled(byte):
    cuda.download(found, to, stream)
    cuda.wait(stream)
    return (found == byte).all()


step = cuda.graph(enqueue, stream)
assert step is enqueue
assert len(cuda.uncaptured) == 1 and "\\n" not in cuda.uncaptured[0]
assert cuda.loop(lambda handle: enqueue(), stream) is None
step()
assert filled(7)
good = cuda.graph(lambda: cuda.fill(to, 9, stream), stream)
assert len(cuda.uncaptured) == 2, "the stream can be captured again"
good()
assert filled(9)
cuda.close()
"""


@pytest.mark.gpu
@needs_gpu
def test_what_cannot_be_captured_still_runs_on_a_gpu():
    """In a process of its own, for it is this that has ended some."""
    done = subprocess.run([sys.executable, "-c", UNCAPTURABLE], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.gpu
@needs_gpu
def test_too_little_memory_says_how_much_on_a_gpu(cuda):
    with pytest.raises(ExecutionError, match=r"16777216 MiB do not fit the GPU, \d+ of \d+ MiB are free"):
        cuda.empty((1 << 44,), np.uint8)
    cuda.empty((4,), np.uint8)


@pytest.mark.gpu
@needs_gpu
def test_what_is_freed_is_free_on_a_gpu(cuda):
    free, other = cuda.memory[0], Cuda()
    other.empty((1 << 28,), np.uint8)
    assert free - cuda.memory[0] >= 1 << 28
    other.close()
    assert free - cuda.memory[0] < 1 << 27
