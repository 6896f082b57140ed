"""The listener: addresses that are taken, and sockets that dead servers left."""

import socket

import pytest

from specbuild.runtime.errors import OptionError
from specbuild.serve.http import listener
from specbuild.serve.options import ServeOptions


def test_a_port_that_is_taken():
    options = ServeOptions(port=0)
    first = listener.listen(options)
    port = first.getsockname()[1]
    assert listener.url(first, ServeOptions()) == f"http://127.0.0.1:{port}"
    with pytest.raises(OptionError, match="another process listens"):
        listener.listen(ServeOptions(port=port))
    listener.close(first, options)
    listener.close(listener.listen(ServeOptions(port=port)), options)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1", "a" * 300])
def test_an_address_that_is_not_ours(host):
    with pytest.raises(OptionError, match="cannot listen"):
        listener.listen(ServeOptions(host=host, port=0))


def test_a_unix_socket_comes_and_goes(tmp_path):
    options = ServeOptions(uds=tmp_path / "s")
    first = listener.listen(options)
    assert listener.url(first, options) == f"unix:{options.uds}"
    with pytest.raises(OptionError, match="another process listens"):
        listener.listen(options)
    first.close()  # as a process that is killed does
    assert (tmp_path / "s").exists()
    last = listener.listen(options)
    last.close()  # as the server has done by then
    listener.close(last, options)
    assert not (tmp_path / "s").exists()


def test_a_file_is_not_a_socket(tmp_path):
    (tmp_path / "s").write_text("mine")
    with pytest.raises(OptionError):
        listener.listen(ServeOptions(uds=tmp_path / "s"))
    assert (tmp_path / "s").read_text() == "mine"


def test_a_silent_client_is_dropped_by_the_system():
    listening = listener.listen(ServeOptions(port=0))
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    listener.close(listening, ServeOptions())
