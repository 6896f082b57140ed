"""Stored responses: a bounded SQLite table, in memory or in a file.

Each row is one transaction, so a killed server loses at most the row that it was writing.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import msgspec

from specbuild.runtime.errors import OptionError, OutputError

RESPONSES, BYTES = 10_000, 256 << 20  # maximum stored, over all API keys
_KIND = 0x53504252  # SQLite's application id of these files
_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, id TEXT NOT NULL, size INTEGER NOT NULL,
    body BLOB NOT NULL, UNIQUE (tenant, id))
"""


class Store:
    """Keeps the newest responses; only the tenant that a response was made for can read or delete it. Thread-safe."""

    def __init__(self, path: Path | None = None, max_responses: int = RESPONSES, max_bytes: int = BYTES) -> None:
        """Open the store.

        Args:
            path: The SQLite file; None keeps the responses in memory.
            max_responses: Maximum number of responses.
            max_bytes: Maximum bytes of all responses.

        Raises:
            OptionError: If the file cannot be opened or is a database of something else.
        """
        self._max_responses, self._max_bytes, self._lock = max_responses, max_bytes, threading.Lock()
        try:
            if path is not None:
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._base = sqlite3.connect(str(path or ":memory:"), check_same_thread=False)
            kind, tables = self._one("PRAGMA application_id"), self._one("SELECT count(*) FROM sqlite_master")
            if kind != _KIND and tables:
                raise OptionError(f"{path} is a database of something else: give another file")
            self._base.executescript(
                f"PRAGMA application_id={_KIND}; PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL"
            )
            self._base.executescript(f"PRAGMA secure_delete=ON; {_TABLE}")
        except (OSError, sqlite3.Error) as error:
            told = getattr(error, "strerror", None) or error
            raise OptionError(f"{path} cannot keep responses ({told}): give another file") from None

    def _one(self, query: str) -> int:
        return int(self._base.execute(query).fetchone()[0])

    def put(self, tenant: str | None, number: str, body: Any) -> bool:
        """Store a response and drop the oldest beyond the limits; return whether it fits. Raises OutputError."""
        content = msgspec.json.encode(body)
        if len(content) > self._max_bytes:
            return False
        try:
            with self._lock, self._base:
                insert = "INSERT INTO responses (tenant, id, size, body) VALUES (?, ?, ?, ?)"
                self._base.execute(insert, (tenant or "", number, len(content), content))
                count, total = self._base.execute("SELECT count(*), total(size) FROM responses").fetchone()
                while count > self._max_responses or total > self._max_bytes:
                    oldest = "SELECT number, size FROM responses ORDER BY number LIMIT 1"
                    row, size = self._base.execute(oldest).fetchone()
                    self._base.execute("DELETE FROM responses WHERE number = ?", (row,))
                    count, total = count - 1, total - size
        except sqlite3.Error as error:
            raise OutputError(f"a response cannot be kept ({error})") from None
        return True

    def get(self, tenant: str | None, number: str) -> Any:
        """Return a stored response; None if there is none or it is another tenant's."""
        with self._lock:
            query = "SELECT body FROM responses WHERE tenant = ? AND id = ?"
            row = self._base.execute(query, (tenant or "", number)).fetchone()
        return msgspec.json.decode(row[0]) if row else None

    def size(self, tenant: str | None, number: str) -> int:
        """Return the bytes of a stored response; 0 if there is none or it is another tenant's."""
        with self._lock:
            query = "SELECT size FROM responses WHERE tenant = ? AND id = ?"
            row = self._base.execute(query, (tenant or "", number)).fetchone()
        return int(row[0]) if row else 0

    def delete(self, tenant: str | None, number: str) -> bool:
        """Delete a response; return whether there was one."""
        with self._lock, self._base:
            where = "DELETE FROM responses WHERE tenant = ? AND id = ?"
            return self._base.execute(where, (tenant or "", number)).rowcount > 0

    def close(self) -> None:
        """Write everything and close; nothing can be read afterwards."""
        with self._lock:
            self._base.close()
