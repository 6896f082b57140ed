"""What agents' packages send: the helpers of `openai` for tools and responses, and those of `anthropic`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
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
GREEDY = {"temperature": 0}  # which Anthropic's models no longer take
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


def test_messages_whole_streamed_and_counted(server: Server) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)
    asked: dict[str, Any] = {"model": "pycode", "messages": SAID, "max_tokens": 12, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    assert whole.content[0].type == "text"
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12) == (whole.stop_reason, 12)
    counted = client.messages.count_tokens(model="pycode", messages=SAID).input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**asked | {"extra_body": {"temperature": -1.0}})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).messages.create(**asked)


def test_messages_call_tools(server: Server) -> None:
    """The stream's helper puts the call together, and its result goes back by the package's own blocks."""
    client = anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)
    tool: Any = {"name": "weather", "input_schema": SCHEMA}
    asked: dict[str, Any] = {"model": "pycode", "max_tokens": 90, "extra_body": GREEDY, "tools": [tool]}
    asked |= {"messages": SAID, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    (call,) = client.messages.create(**asked).content
    assert (call.type, final.stop_reason) == ("tool_use", "tool_use")
    assert final.content[0].type == "tool_use"
    assert final.content[0].input == call.input
    back: Any = [*SAID, {"role": "assistant", "content": [call.model_dump(exclude_none=True)]}]
    back.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sun"}]})
    assert client.messages.create(**asked | {"messages": back}).usage.output_tokens
