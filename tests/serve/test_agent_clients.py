"""What agents' packages send: the `openai` package's helpers for tools and responses."""

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


def test_responses_whole_streamed_and_gone_on_with(client: openai.OpenAI, server: Server) -> None:
    asked: dict[str, Any] = {"model": "pycode", "input": "a loop", "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(**asked)
    assert whole.output_text
    with client.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert client.responses.retrieve(whole.id).output_text == whole.output_text
    more = client.responses.create(**asked | {"input": "and", "previous_response_id": whole.id})
    assert more.previous_response_id == whole.id
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="other", max_retries=0)
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(whole.id)
    client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)


def test_responses_call_tools(client: openai.OpenAI) -> None:
    """The stream's helper puts the call together, and the answer goes back by the package's own items."""
    asked: dict[str, Any] = {"model": "pycode", "input": [{"role": "user", "content": "x"}], "temperature": 0}
    asked |= {"tools": [{"type": "function", **TOOL}], "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert "response.function_call_arguments.done" in kinds
    (call,) = final.output
    assert call.type == "function_call"
    whole = client.responses.parse(**asked).output[0]
    assert whole.type == "function_call"
    assert whole.arguments == call.arguments
    back = [*asked["input"], whole.model_dump(exclude={"parsed_arguments"}, exclude_none=True)]
    back.append({"type": "function_call_output", "call_id": whole.call_id, "output": "sun"})
    assert client.responses.create(model="pycode", input=back, max_output_tokens=2).usage
