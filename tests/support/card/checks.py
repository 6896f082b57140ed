"""The stand-in card keeps to a driver's rules; run by tests/test_card.py in a process that finds it."""

import ctypes
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from card_driver import counts
from cuda.bindings import driver
from device import call, take_gpu

CARD = ctypes.CDLL("libcuda.so.1")
HOST = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
MODE = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
LOOP = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
KIND = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL


def refusal(name, *arguments):
    """The name of what a call is refused with; "" where it is not."""
    status, *_ = getattr(driver, name)(*arguments)
    return "" if status == driver.CUresult.CUDA_SUCCESS else status.name.removeprefix("CUDA_ERROR_")


@pytest.fixture(autouse=True)
def nothing_left():
    """Every test frees what it makes."""
    take_gpu()
    before = counts()
    yield
    CARD.card_refuse(None, 0, 0)
    assert counts() == before


@pytest.fixture
def streams():
    """Two streams that wait for nothing."""
    made = call("cuStreamCreate", 1), call("cuStreamCreate", 1)
    yield made
    for stream in made:
        call("cuStreamDestroy", stream)


class Log:
    """Host functions as kernels: which ran, in order."""

    def __init__(self):
        self.ran = list[str]()
        self._kept = list[Any]()

    def __call__(self, stream, name, then=lambda: None):
        def run(_):
            self.ran.append(name)
            then()

        function = HOST(run)
        self._kept.append(function)
        assert CARD.card_enqueue(ctypes.c_void_p(int(stream)), function, None) == 0


def order(first, second):
    """What the second is given from now on waits for the first."""
    event = call("cuEventCreate", 0)
    call("cuEventRecord", event, first)
    call("cuStreamWaitEvent", second, event, 0)
    call("cuEventDestroy", event)


def captured(stream, enqueue):
    call("cuStreamBeginCapture", stream, MODE)
    enqueue()
    return call("cuStreamEndCapture", stream)


def launched(graph, stream):
    exec_ = call("cuGraphInstantiate", graph, 0)
    call("cuGraphLaunch", exec_, stream)
    call("cuGraphExecDestroy", exec_)
    call("cuStreamSynchronize", stream)


def test_nothing_runs_before_a_wait(streams):
    log, (first, second) = Log(), streams
    log(first, "a")
    log(second, "b")
    assert log.ran == []
    order(second, first)
    log(first, "c")
    call("cuStreamSynchronize", first)
    assert log.ran == ["a", "b", "c"]
    for _ in range(40):
        log(second, "d")
    found = [refusal("cuStreamQuery", second) for _ in range(100)]
    assert (found[0], found[-1]) == ("NOT_READY", "")
    assert log.ran.count("d") == 40


def test_memory_has_ends(streams):
    to, array = call("cuMemAlloc", 100), np.arange(100, dtype=np.uint8)
    assert refusal("cuMemcpyHtoD", to, array.ctypes.data, 101) == "INVALID_VALUE"
    assert refusal("cuMemsetD8Async", int(to) + 50, 0, 51, streams[0]) == "INVALID_VALUE"
    assert refusal("cuMemAlloc", 1 << 40) == "OUT_OF_MEMORY"
    call("cuMemcpyAsync", to, array.ctypes.data, 100, streams[0])
    array[:] = 0  # what is not pinned was read when it was enqueued
    call("cuMemcpyAsync", array.ctypes.data, to, 100, streams[0])
    assert array.tolist() == list(range(100))
    call("cuMemFree", to)
    assert refusal("cuMemFree", to) == "INVALID_VALUE"


@pytest.mark.parametrize(
    "forbidden",
    ["cuCtxSynchronize", "cuStreamSynchronize", "cuStreamQuery", "cuMemAlloc", "cuMemcpyHtoD"],
)
def test_what_breaks_a_capture(streams, forbidden):
    stream, array, log = streams[0], np.zeros(1, np.uint8), Log()
    arguments = {"cuMemAlloc": (1,), "cuMemcpyHtoD": (0, array.ctypes.data, 1), "cuCtxSynchronize": ()}
    call("cuStreamBeginCapture", stream, MODE)
    assert refusal(forbidden, *arguments.get(forbidden, (stream,))) == "STREAM_CAPTURE_UNSUPPORTED"
    assert CARD.card_enqueue(ctypes.c_void_p(int(stream)), HOST(lambda _: None), None) == 901
    status, graph = driver.cuStreamEndCapture(stream)
    assert (status.name, int(graph or 0)) == ("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", 0)
    graph = captured(stream, lambda: log(stream, "again"))
    launched(graph, stream)
    call("cuGraphDestroy", graph)
    assert log.ran == ["again"]


def test_streams_that_join_and_one_that_is_left_out(streams):
    log, (first, second) = Log(), streams

    def fork(joins):
        log(first, "a")
        order(first, second)
        log(second, "b")
        if joins:
            order(second, first)
        log(first, "c")

    graph = captured(first, lambda: fork(True))
    assert log.ran == []
    for _ in range(2):
        launched(graph, first)
    assert log.ran == ["a", "b", "c"] * 2
    call("cuGraphDestroy", graph)
    call("cuStreamBeginCapture", first, MODE)
    fork(False)
    assert refusal("cuStreamEndCapture", first) == "STREAM_CAPTURE_UNJOINED"
    assert refusal("cuStreamEndCapture", first) == "ILLEGAL_STATE"


@pytest.fixture
def loop():
    """A graph, the body of the loop in it, and the address of its condition."""
    graph = call("cuGraphCreate", 0)
    context = call("cuCtxGetCurrent")
    handle = call("cuGraphConditionalHandleCreate", graph, context, 1, 1)
    params = driver.CUgraphNodeParams()
    params.type = KIND
    params.conditional.handle, params.conditional.type = handle, LOOP
    params.conditional.size, params.conditional.ctx = 1, context
    call("cuGraphAddNode", graph, None, None, 0, params)
    yield graph, params.conditional.phGraph_out[0], int(handle)
    call("cuGraphDestroy", graph)


def test_a_loop_ends_where_it_is_told(streams, loop):
    log, (stream, _), (graph, body, handle) = Log(), streams, loop

    def end():
        if len(log.ran) % 3 == 0:
            ctypes.c_uint.from_address(handle).value = 0

    child = captured(stream, lambda: log(stream, "round", end))
    call("cuGraphAddChildGraphNode", body, None, 0, child)
    call("cuGraphDestroy", child)
    for launches in (1, 2):
        launched(graph, stream)
        assert len(log.ran) == 3 * launches


def test_an_edge_that_lets_a_kernel_begin_early(streams, loop):
    """In the child of a body none is taken; it can be replaced by one that waits."""
    log, (stream, _), (graph, body, handle) = Log(), streams, loop

    def enqueue():
        log(stream, "a")
        assert CARD.card_programmatic(ctypes.c_void_p(int(stream))) == 0
        log(stream, "b", lambda: setattr(ctypes.c_uint.from_address(handle), "value", 0))
        log(stream, "c")

    child = captured(stream, enqueue)
    assert refusal("cuGraphAddChildGraphNode", body, None, 0, child) == "NOT_SUPPORTED"
    (_, *_, count) = driver.cuGraphGetEdges(child)
    status, begins, ends, kinds, count = driver.cuGraphGetEdges(child, count)
    assert not status
    early = [i for i in range(count) if kinds[i].type]
    assert (count, len(early)) == (2, 1)
    edge = [begins[early[0]]], [ends[early[0]]]
    assert refusal("cuGraphRemoveDependencies", child, *edge, None, 1) == "INVALID_VALUE"
    call("cuGraphRemoveDependencies", child, *edge, [kinds[early[0]]], 1)
    call("cuGraphAddDependencies", child, *edge, None, 1)
    call("cuGraphAddChildGraphNode", body, None, 0, child)
    call("cuGraphDestroy", child)
    launched(graph, stream)
    assert log.ran == ["a", "b", "c"]


def test_calls_that_are_refused_on_demand():
    CARD.card_refuse(b"cuMemAlloc", int(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY), 1)
    kept = call("cuMemAlloc", 8)
    assert refusal("cuMemAlloc", 8) == "OUT_OF_MEMORY"
    call("cuMemFree", call("cuMemAlloc", 8))
    call("cuMemFree", kept)


def script(steps):
    """Steps in a process of their own, which they may end."""
    text = f"from cuda.bindings import driver as d; from device import call, take_gpu; take_gpu(); {steps}"
    text = f"import sys; sys.path[:0] = {[each for each in sys.path if each]!r}; {text}"
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("step", "line"),
    [
        ("d.cuGraphDestroy(d.CUgraph(0))", "cuGraphDestroy: (nil) is none"),
        ("g = call('cuGraphCreate', 0); d.cuGraphDestroy(g); d.cuGraphDestroy(g)", "cuGraphDestroy: 0x"),
        ("d.cuGraphExecDestroy(d.CUgraphExec(64))", "cuGraphExecDestroy: 0x40 is none"),
    ],
)
def test_what_ends_a_process(step, line):
    done = script(step)
    assert done.returncode < 0
    assert f"card: {line}" in done.stderr


def test_what_is_written_beside_an_allocation_is_seen():
    done = script(
        "import ctypes; at = int(call('cuMemAlloc', 100)); ctypes.memset(at + 100, 1, 1); call('cuMemFree', at); "
        "print(d.cuCtxSynchronize()[0].name)"
    )
    assert "ILLEGAL_ADDRESS" in done.stdout
    assert "card: something was written beside what was allocated" in done.stderr
