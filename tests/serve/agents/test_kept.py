"""Responses under way and kept, by whose they are; `test_routes.py` has them behind a client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from specbuild.serve.agents.kept import Kept
from specbuild.serve.agents.store import Store
from specbuild.serve.errors import ApiError


class Response:
    """One under way, that ends once it is cancelled."""

    def __init__(self) -> None:
        self.number, self.body, self.stop = "r", {"status": "in_progress"}, asyncio.Event()

    def cancel(self) -> None:
        self.stop.set()


def test_one_under_way_is_cancelled_by_its_tenant_alone() -> None:
    async def work() -> None:
        kept, response = Kept(Store()), Response()

        async def run() -> None:
            with kept.running("a", response):
                await response.stop.wait()
                response.body = {"status": "cancelled"}

        kept.behind(run())
        await asyncio.sleep(0)
        assert (await kept.get("a", "r"))["status"] == "in_progress"
        with pytest.raises(ApiError, match="no response"):
            await kept.cancel("b", "r")
        assert (await kept.cancel("a", "r"))["status"] == "cancelled"

    asyncio.run(work())


def test_a_conversation_is_walked_and_needs_all_its_parts() -> None:
    async def work() -> list[Any]:
        kept = Kept(Store())
        for number, before in (("1", None), ("2", "1")):
            response = {"status": "completed", "output": [], "previous_response_id": before}
            row = {"input": [{"role": "user", "content": number}], "response": response}
            await kept.put("a", number, row)
        said = [item.content for item in await kept.conversation("a", "2")]
        assert await kept.conversation("a", None) == []
        await kept.delete("a", "1")
        with pytest.raises(ApiError, match="'1'"):
            await kept.conversation("a", "2")
        return said

    assert asyncio.run(work()) == ["1", "2"]
