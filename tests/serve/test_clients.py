"""Clients that nobody here wrote: `openai`, `anthropic` and their helpers, and schemathesis against the schema."""

import subprocess
import sys

import anthropic
import openai
import pytest
from route_client import SAID, SCHEMA
from serving import Server

from specbuild.runtime import Bundle

pytestmark = pytest.mark.nightly
TOOL = {"name": "weather", "strict": True, "parameters": SCHEMA}
CALLED = {"tool_choice": "required", "parallel_tool_calls": False}
TEXT = {"model": "pycode", "prompt": "def main(", "max_tokens": 8, "temperature": 0}
CHAT = {"model": "pycode", "messages": SAID, "temperature": 0}
RESPONSE = {"model": "pycode", "input": "a loop", "temperature": 0}
MESSAGE = {"model": "pycode", "messages": SAID, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def keyed(bundle, chat_template):
    flags = ["--port", "0", "--api-key", "secret", "--api-key", "other", "--chat-template", chat_template]
    with Server(str(bundle), *flags) as server:
        yield server


def openais(server, key):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def anthropics(server, key):
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


@pytest.fixture
def client(keyed):
    return openais(keyed, "secret")


@pytest.fixture
def other(keyed):
    return anthropics(keyed, "secret")


def test_completions_and_chats(client, bundle):
    """The helper that collects a stream takes no text that was cut at a length for a whole one."""
    whole = client.completions.create(**TEXT, logprobs=2)
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.tokens) == 8
    chunks = client.completions.create(**TEXT, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    end = str(Bundle.open(bundle).manifest.eos_token_ids[0])
    asked = CHAT | {"max_tokens": 8, "logit_bias": {end: 100}, "extra_body": {"min_tokens": 4}}
    told = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert len(told.choices[0].logprobs.content[0].top_logprobs) == 2
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == told.choices[0].message.content != ""
    assert final.usage.total_tokens == told.usage.total_tokens


def test_chats_call_tools(client):
    """The helper that parses arguments takes a strict call, and its message goes back as it came."""
    asked = CHAT | CALLED | {"tools": [{"type": "function", "function": TOOL}]}
    whole = client.chat.completions.parse(**asked).choices[0]
    call = whole.message.tool_calls[0].function
    assert (whole.finish_reason, call.name) == ("tool_calls", "weather")
    assert call.parsed_arguments["city"] in ("Rome", "Oslo")
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.message.tool_calls[0].function.arguments == call.arguments
    said = client.chat.completions.create(**asked).choices[0].message
    back = [said.model_dump(), {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "sun"}]
    assert client.chat.completions.create(**CHAT | {"messages": [*SAID, *back]}, max_tokens=2).choices


def test_responses_call_tools(client, keyed):
    """The stream's helper puts the call together, and the answer goes back by the package's own items."""
    asked = RESPONSE | CALLED | {"tools": [{"type": "function", **TOOL}]}
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_response().output
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert "response.function_call_arguments.done" in kinds
    whole = client.responses.parse(**asked).output[0]
    assert (whole.type, whole.arguments) == (call.type, call.arguments)
    back = [*SAID, whole.model_dump(exclude={"parsed_arguments"}, exclude_none=True)]
    back.append({"type": "function_call_output", "call_id": whole.call_id, "output": "sun"})
    kept = client.responses.create(model="pycode", input=back, max_output_tokens=2)
    assert client.responses.retrieve(kept.id).output_text == kept.output_text
    with pytest.raises(openai.NotFoundError):
        openais(keyed, "other").responses.retrieve(kept.id)
    client.responses.delete(kept.id)


def test_messages_whole_streamed_and_counted(other, keyed):
    asked = MESSAGE | {"max_tokens": 12}
    whole = other.messages.create(**asked)
    with other.messages.stream(**asked) as stream:
        text, final = "".join(stream.text_stream), stream.get_final_message()
    assert text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12) == (whole.stop_reason, 12)
    counted = other.messages.count_tokens(model="pycode", messages=SAID).input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.BadRequestError):
        other.messages.create(**asked | {"extra_body": {"temperature": -1.0}})
    with pytest.raises(anthropic.AuthenticationError):
        anthropics(keyed, "none").messages.create(**asked)


def test_messages_call_tools(other):
    """The stream's helper puts the call together, and its result goes back by the package's own blocks."""
    asked = MESSAGE | {"max_tokens": 90, "tools": [{"name": "weather", "input_schema": SCHEMA}]}
    wanted = {"type": "any", "disable_parallel_tool_use": True}
    with other.messages.stream(**asked, tool_choice=wanted) as stream:
        final = stream.get_final_message()
    (call,) = other.messages.create(**asked, tool_choice=wanted).content
    assert (call.type, final.stop_reason, final.content[0].input) == ("tool_use", "tool_use", call.input)
    back = [{"role": "assistant", "content": [call.model_dump(exclude_none=True)]}]
    back.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sun"}]})
    assert other.messages.create(**asked | {"messages": [*SAID, *back]}).usage.output_tokens


@pytest.mark.soak(only=("30",))
@pytest.mark.parametrize("examples", ["3", "30"])
def test_schemathesis_finds_nothing(bundle, chat_template, tmp_path, examples):
    """Every route, with data by the schema and against it: no fault of the server, no response but its own.

    One worker: with two, one sets the limit of recursion while the other parses, which Python 3.11 takes for a fault.
    """
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = f"--checks {checks} --max-examples {examples} --seed 1 --workers 1 --phases examples,coverage,fuzzing"
    flags = ("--port", "0", "--max-model-len", "48", "--request-timeout", "2", "--chat-template", chat_template)
    with Server(str(bundle), *flags) as server:
        run = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *command.split()]
        done = subprocess.run([*run, "--suppress-health-check", "all"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
