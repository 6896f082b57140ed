"""What is enqueued on a stream as a CUDA graph of cuda.core: one that runs once, and one that repeats itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .device import Step


def once(core: Any, stream: Any, enqueue: Step) -> Any:
    """A graph of what `enqueue` enqueues on the stream, and on others that it orders with it."""
    with _captured(stream, enqueue) as builder:
        return builder.complete()


def repeated(core: Any, stream: Any, body: Callable[[int], None]) -> Any:
    """A graph that repeats what `body` enqueues until the condition, whose handle it is given, is 0.

    The round is captured by itself and becomes the loop's body as a child: a capture right into a conditional body
    that fails ends the process in some drivers (NVIDIA/cuda-python issue 2918).
    """
    whole = core.graph.GraphDefinition()
    condition = whole.create_condition(default_value=1)  # 1 again at every launch
    with _captured(stream, lambda: body(int(condition.handle))) as builder:
        whole.while_loop(condition).body.embed(builder.graph_definition)
        return whole.instantiate()


@contextmanager
def _captured(stream: Any, enqueue: Step) -> Iterator[Any]:
    """The builder, its capture at an end."""
    builder = stream.create_graph_builder()
    try:
        builder.begin_building("thread_local")
        enqueue()
        yield builder.end_building()
    finally:
        for _ in range(2):  # the first ends a capture that is still open, complains of it, and frees nothing
            with suppress(Exception):
                builder.close()
        del builder
