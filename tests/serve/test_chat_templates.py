"""Chat templates that come with specbuild: what they render is what the parsers read, and tools work with them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from route_client import CHATS, SCHEMA, RouteClient, service_of
from serving import Log
from turn_texts import calls, json_objects, whole

from specbuild.runtime import Chat, Engine
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.chat import ChatTemplate
from specbuild.serve.http.chat_templates import SHIPPED, template_text
from specbuild.serve.output_parsers.hermes import Hermes

TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
USER = {"role": "user", "content": "Rome?"}
TOOLS = {"messages": [USER], "tools": [TOOL], "max_tokens": 60, "temperature": 0}
texts = st.text(max_size=8).filter(lambda text: "<" not in text and text == text.strip())


def render(*messages, tools=None, begins=False):
    return ChatTemplate(template_text("hermes"), {}).render(Chat(messages, tools, begins))


def test_the_hermes_template():
    system, answer = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Sun."}
    assert render(system, USER, answer, begins=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nRome?<|im_end|>\n"
        "<|im_start|>assistant\nSun.<|im_end|>\n<|im_start|>assistant\n"
    )
    result = {"role": "tool", "tool_call_id": "1", "content": "31"}
    assert render(USER, result).endswith("<|im_start|>tool\n<tool_response>\n31\n</tool_response><|im_end|>\n")
    told = render(system, USER, tools=[TOOL])
    assert told.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.loads(told.partition("<tools>\n")[2].partition("\n</tools>")[0]) == TOOL


@pytest.mark.slow
@given(texts, st.lists(json_objects, min_size=1, max_size=3))
def test_calls_are_rendered_as_they_are_read(content, given_arguments):
    made = [{"function": {"name": f"f{n}", "arguments": each}} for n, each in enumerate(given_arguments)]
    text = render(USER, {"role": "assistant", "content": content, "tool_calls": made})
    said = text.partition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")
    turn = whole(Hermes(), said)
    assert turn.content.strip() == content
    assert [(name, json.loads(told)) for name, told in calls(turn)] == [
        (f"f{n}", each) for n, each in enumerate(given_arguments)
    ]


def test_a_template_by_its_name_or_file(tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert template_text(str(tmp_path / "own.jinja")) == "{{ messages }}"
    for name, file in SHIPPED.items():
        assert template_text(name) == template_text(str(file))
    with pytest.raises(OptionError, match=r"No such file.*comes with specbuild: hermes"):
        template_text(str(tmp_path / "none"))


@pytest.mark.parametrize(("template", "param"), [("{{ messages[0].content }}", "tools"), (None, "messages")])
def test_what_reads_no_tools_is_refused_with_what_to_serve_with(bundle, template, param):
    with Engine.load(bundle, chat_template=template) as engine:
        status, error = RouteClient(service_of(engine, bundle, Log()), Log()).refusal(CHATS, **TOOLS)
    assert (status, error["param"]) == (400, param)
    assert "--chat-template hermes" in error["message"]
