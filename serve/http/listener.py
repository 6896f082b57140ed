"""The socket that a server listens on."""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path

from specbuild.runtime.errors import OptionError
from specbuild.serve.limits import SEND_SECONDS
from specbuild.serve.options import ServeOptions

_BACKLOG = 1024


def listen(options: ServeOptions) -> socket.socket:
    """Return a listening socket; raises OptionError if the address is taken or not this machine's."""
    try:
        return _unix(options.uds) if options.uds else _tcp(options.host, options.port)
    except (OSError, UnicodeError) as error:
        where = options.uds or f"{options.host}:{options.port}"
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "another process listens there" if taken else getattr(error, "strerror", None) or error
        raise OptionError(f"cannot listen at {where} ({why}): give another --host, --port or --uds") from None


def _tcp(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # end connections that acknowledge nothing for so long
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SEND_SECONDS))
        made.bind(address)
        made.listen(_BACKLOG)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


def _unix(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            _remove_stale(path)
        made.bind(str(path))
        made.listen(_BACKLOG)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


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
