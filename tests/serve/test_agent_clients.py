"""What agents' packages send: the `openai` package's helpers for tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import CHAT_TEMPLATE, Server

pytestmark = pytest.mark.slow
SAID: Any = [{"role": "user", "content": "a loop"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "weather", "strict": True, "parameters": SCHEMA}


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("serve") / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    flags = ["--port", "0", "--api-key", "secret", "--api-key", "other", "--chat-template", str(template)]
    with Server(str(bundle), *flags) as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


def test_tools_whole_streamed_and_answered(client: openai.OpenAI) -> None:
    """The helper that parses arguments takes a strict call, and its message goes back as it came."""
    asked: dict[str, Any] = {"model": "pycode", "messages": SAID, "temperature": 0}
    tools = [{"type": "function", "function": TOOL}]
    asked |= {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    whole = client.chat.completions.parse(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.tool_calls
    call = whole.message.tool_calls[0].function
    assert call.name == "weather"
    assert isinstance(call.parsed_arguments, dict)
    assert call.parsed_arguments["city"] in ("Rome", "Oslo")
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.message.tool_calls
    assert final.message.tool_calls[0].function.arguments == call.arguments
    back: Any = [*SAID, client.chat.completions.create(**asked).choices[0].message.model_dump()]
    back.append({"role": "tool", "tool_call_id": back[-1]["tool_calls"][0]["id"], "content": "sun"})
    again = client.chat.completions.create(model="pycode", messages=back, max_tokens=2)
    assert again.choices[0].finish_reason in ("stop", "length")
