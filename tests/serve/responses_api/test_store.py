"""The store: bounded, apart by tenant, whole after a kill."""

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys

import pytest

from specbuild.runtime.errors import OptionError
from specbuild.serve.errors import ApiError
from specbuild.serve.responses_api.response_registry import ResponseRegistry
from specbuild.serve.responses_api.store import Store


@pytest.mark.parametrize("kept", [False, True])
def test_a_response_is_its_tenants(tmp_path, kept):
    store = Store(tmp_path / "kept.db" if kept else None)
    assert store.put("a", "1", {"x": "é"})
    assert store.get("a", "1") == {"x": "é"}
    assert store.get("b", "1") is store.get(None, "1") is None
    assert not store.delete("b", "1")
    assert store.delete("a", "1")
    assert store.get("a", "1") is None


def test_it_is_bounded_by_number_and_bytes():
    store = Store(max_responses=3, max_bytes=100)
    for number in range(5):
        store.put("a", str(number), number)
    assert [store.get("a", str(number)) for number in range(5)] == [None, None, 2, 3, 4]
    assert store.put("a", "large", "x" * 90)
    assert [store.get("a", str(number)) for number in (3, 4)] == [3, 4]
    store.put("a", "larger", "x" * 95)
    assert [store.get("a", number) for number in ("4", "large")] == [None, None]
    assert store.get("a", "larger") == "x" * 95
    assert not store.put("a", "too large", "x" * 200)


def test_a_conversation_is_bounded_by_its_bytes():
    store, before = Store(), None
    for number in range(30):
        said = [{"type": "message", "role": "user", "content": "x" * (1 << 20)}]
        response = {"status": "completed", "output": [], "previous_response_id": before}
        store.put(None, f"r{number}", {"input": said, "response": response})
        before = f"r{number}"
    kept = ResponseRegistry(store)
    assert len(asyncio.run(kept.conversation(None, "r3"))) == 4
    with pytest.raises(ApiError, match="begin another"):
        asyncio.run(kept.conversation(None, "r29"))


def test_a_file_is_its_owners_and_of_responses(tmp_path):
    path = tmp_path / "kept.db"
    Store(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
    other, text = tmp_path / "other.db", tmp_path / "text"
    with sqlite3.connect(other) as base:
        base.execute("CREATE TABLE mine (x)")
    text.write_text("no database at all, and longer than a header of one hundred bytes is" * 3)
    for wrong in (other, text, tmp_path / "none" / "kept.db"):
        with pytest.raises(OptionError, match="give another file"):
            Store(wrong)


def test_a_kill_loses_the_row_being_written_at_most(tmp_path):
    """What was put before a kill is there, whole, and the file goes on."""
    path = tmp_path / "kept.db"
    program = (
        "import sys; from pathlib import Path; from specbuild.serve.responses_api.store import Store\n"
        "store, number = Store(Path(sys.argv[1])), 0\n"
        "while True:\n"
        "    store.put('a', str(number), [number] * 2000); print(number, flush=True); number += 1\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout
        for line in writer.stdout:
            if int(line) == 30:
                writer.send_signal(signal.SIGKILL)
                break
        last = max([30, *(int(line) for line in writer.stdout if line.endswith("\n"))])
    store = Store(path)
    assert all(store.get("a", str(number)) == [number] * 2000 for number in range(last + 1))
    assert store.get("a", str(last + 2)) is None
    assert store.put("a", "after", json.loads("1"))
