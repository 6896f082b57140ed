"""A graph is captured once, and never at the first use of its key."""

from types import SimpleNamespace

from host_device import HostDevice

from specbuild.runtime.decoding.device.graphs import Graphs


def test_a_first_use_enqueues_and_the_second_captures_for_all_that_follow():
    """What a first use loads or allocates may be in no capture."""
    device = HostDevice()
    stream = device.stream()
    executor = SimpleNamespace(device=device, stream=stream, model=SimpleNamespace(capturable=True))
    executor.timed = lambda enqueue: enqueue()
    made, ran, called = Graphs(executor), list[int](), list[int]()

    def enqueue(key):
        called.append(key)
        device.run(stream, lambda: ran.append(key))

    for key, captured in ((1, 0), (2, 0), (1, 1), (1, 1), (2, 2), (1, 2)):
        made.run(key, lambda key=key: enqueue(key))
        assert device.captured == captured
    device.wait(stream)
    assert ran == [1, 2, 1, 1, 2, 1]
    assert called == [1, 2, 1, 2], "once as it is, once for the graph"
    made.clear()
    for captured in (2, 3):
        made.run(1, lambda: enqueue(1))
        assert device.captured == captured
    for key in range(10, 200):  # so many hold no memory for ever
        made.find(key, lambda: None)
    made.run(1, lambda: enqueue(1))
    assert (device.captured, len(called)) == (3, 7)
