"""CUDA graphs of what is enqueued on a stream: one that runs once, and one that repeats itself.

Captures use the driver's own calls, because cuda.core up to 1.2.2 destroys the graph of a failed capture twice, which
ends the process. Here the end of a capture either gives a graph, destroyed once, or fails and leaves nothing to
destroy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from specbuild.runtime.errors import ExecutionError

from .device import Step

Do = Callable[[tuple[Any, ...]], Any]  # returns the results of a driver's call; raises ExecutionError


class _OverlapError(ExecutionError):
    """The driver refused a loop whose body has kernels that start before the kernels in front of them have ended."""


class Capture:
    """Makes graphs of what is enqueued on one GPU's streams; a graph is freed with the function that launches it."""

    def __init__(self, driver: Any, do: Do, current: AbstractContextManager[None]) -> None:
        """Prepare captures on one GPU.

        Args:
            driver: The driver module of cuda.bindings.
            do: Returns the results of a driver's call; raises ExecutionError if it failed.
            current: Makes the GPU's context the thread's.
        """
        self._driver, self._do, self._current = driver, do, current
        self.active = False  # whether a graph is being captured

    def once(self, stream: int, enqueue: Step) -> Step:
        """Return a function that launches a graph of what `enqueue` enqueues on `stream` and streams ordered with it.

        Raises:
            ExecutionError: If that cannot be captured.
        """
        with self._current, self._captured(stream, enqueue) as graph:
            return self._launching(graph, stream)

    def repeated(self, stream: int, body: Callable[[int], None]) -> Step:
        """Return a function that launches a graph which repeats what `body` enqueues until a condition is 0.

        `body` is given the condition's handle. If the driver refuses a body in which kernels overlap by programmatic
        launch, the kernels are made to wait for each other.

        Raises:
            ExecutionError: If the body cannot be captured, or must not be a loop's.
        """
        with self._current:
            try:
                return self._loop(stream, body, overlap=True)
            except _OverlapError:
                return self._loop(stream, body, overlap=False)

    def _loop(self, stream: int, body: Callable[[int], None], overlap: bool) -> Step:
        """Return a function that launches a graph: a conditional node whose body's only child is the captured round.

        The round is not captured right into the body, because a failed capture there ends the process in some drivers
        (NVIDIA/cuda-python issue 2918).
        """
        driver, do = self._driver, self._do
        with self._destroyed(do(driver.cuGraphCreate(0))) as whole:
            context, default = do(driver.cuCtxGetCurrent()), driver.CU_GRAPH_COND_ASSIGN_DEFAULT
            condition = do(driver.cuGraphConditionalHandleCreate(whole, context, 1, default))  # 1 again at every launch
            with self._captured(stream, lambda: body(int(condition))) as captured:
                early = self._early(captured)
                if not overlap:
                    self._serialise(captured, early)
                try:
                    inside = self._while(whole, condition, context)
                    do(driver.cuGraphAddChildGraphNode(inside, None, 0, captured))  # the node gets a copy
                    return self._launching(whole, stream)
                except ExecutionError as error:
                    if overlap and early:
                        raise _OverlapError(str(error)) from error
                    raise

    def _while(self, graph: Any, condition: Any, context: Any) -> Any:
        """Add a conditional node to a graph, and return its empty body."""
        driver, params = self._driver, self._driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = condition
        params.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        params.conditional.size, params.conditional.ctx = 1, context
        self._do(driver.cuGraphAddNode(graph, None, None, 0, params))
        return params.conditional.phGraph_out[0]

    def _early(self, graph: Any) -> list[tuple[Any, Any, Any]]:
        """Return the edges over which a kernel may start early: source, target, and the driver's data of the edge."""
        driver, count = self._driver, self._do(self._driver.cuGraphGetEdges(graph))[-1]
        *edges, _ = self._do(driver.cuGraphGetEdges(graph, count)) if count else ([], [], [], 0)
        early = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
        return [edge for edge in zip(*edges, strict=True) if edge[2].type == early]

    def _serialise(self, graph: Any, early: list[tuple[Any, Any, Any]]) -> None:
        """Replace early edges by edges over which a kernel starts when the one in front of it has ended."""
        driver = self._driver
        for source, to, edge in early:
            self._do(driver.cuGraphRemoveDependencies(graph, [source], [to], [edge], 1))
            self._do(driver.cuGraphAddDependencies(graph, [source], [to], [driver.CUgraphEdgeData()], 1))

    @contextmanager
    def _captured(self, stream: int, enqueue: Step) -> Iterator[Any]:
        """Yield the graph of what is enqueued; if the end of the capture fails, there is no graph."""
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._do(self._driver.cuStreamBeginCapture(stream, mode))
        self.active = True
        try:
            enqueue()
        except BaseException:
            status, graph = self._driver.cuStreamEndCapture(stream)
            if not status:
                self._driver.cuGraphDestroy(graph)
            raise
        finally:
            self.active = False
        with self._destroyed(self._do(self._driver.cuStreamEndCapture(stream))) as graph:
            yield graph

    @contextmanager
    def _destroyed(self, graph: Any) -> Iterator[Any]:
        """Yield a graph, and destroy it at the end."""
        try:
            yield graph
        finally:
            self._do(self._driver.cuGraphDestroy(graph))

    def _launching(self, graph: Any, stream: int) -> Step:
        """Return a function that launches a graph's executable, which outlives the graph."""
        executable = self._do(self._driver.cuGraphInstantiate(graph, 0))

        def launch() -> None:
            with self._current:
                self._do(self._driver.cuGraphLaunch(executable, stream))

        def destroy() -> None:  # takes effect once its launches have run
            with self._current:
                self._driver.cuGraphExecDestroy(executable)

        weakref.finalize(launch, destroy).atexit = False
        return launch
