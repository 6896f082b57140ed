"""The socket that a server listens on."""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path
from typing import Any

from specbuild.runtime.errors import OptionError
from specbuild.serve.limits import SEND_SECONDS
from specbuild.serve.options import ServeOptions

_BACKLOG = 1024


def listen(options: ServeOptions) -> socket.socket:
    """Return a listening socket; raises OptionError if the address is taken or not this machine's."""
    try:
        family, address = _address(options)
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # so that `::` takes IPv4 too
        made = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:
        where = options.uds or f"{options.host}:{options.port}"
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "another process listens there" if taken else getattr(error, "strerror", None) or error
        raise OptionError(f"cannot listen at {where} ({why}): give another --host, --port or --uds") from None
    if family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):  # ends connections that acknowledge nothing
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SEND_SECONDS))
    made.setblocking(False)
    return made


def _address(options: ServeOptions) -> tuple[socket.AddressFamily, Any]:
    """Return the family and address of what is listened on, free of a dead server's socket."""
    if options.uds:
        if options.uds.is_socket():
            _remove_stale(options.uds)
        return socket.AF_UNIX, str(options.uds)
    family, _, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
    return family, address


def _remove_stale(path: Path) -> None:
    """Remove a socket that a dead server left behind; raises OSError if a server listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(errno.EADDRINUSE, "in use")


def close(listening: socket.socket, options: ServeOptions) -> None:
    """Close the socket and remove a Unix socket's file; a second call does nothing."""
    listening.close()
    if options.uds and options.uds.is_socket():
        with contextlib.suppress(OSError):
            options.uds.unlink()


def url(listening: socket.socket, options: ServeOptions) -> str:
    """Return where clients find the server."""
    if options.uds:
        return f"unix:{options.uds}"
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if options.ssl_certfile else 'http'}://{shown}:{port}{options.root_path}"
