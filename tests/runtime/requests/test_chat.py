"""Chats: rendered as transformers' apply_chat_template renders them, for templates in the style of five families."""

from datetime import datetime
from functools import partial

import pytest

from specbuild.runtime import Chat
from specbuild.runtime.errors import PromptError
from specbuild.runtime.requests.chat import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
    {% endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {%- if message.role == 'note' %}{% continue %}{% endif %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""
LLAMA = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.content is mapping or (message.content is iterable and message.content is not string) %}
        {%- for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""  # noqa: E501
MISTRAL = """{{ bos_token }}{% set turns = messages | rejectattr('role', 'equalto', 'system') | list %}
{%- for message in turns %}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
  {%- endif %}
  {%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
  {%- else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}
{%- endfor %}"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set reasoning_content = '' %}
    {%- if message.reasoning_content is string %}{% set reasoning_content = message.reasoning_content %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if reasoning_content and loop.index0 > ns.last_query_index %}
        {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- (message.content or '').lstrip('\\n') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\\n\\n' %}{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first if loop.first else "") }}{{ message['content'] | trim }}{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""  # noqa: E501
FAMILIES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "qwen": QWEN, "gemma": GEMMA}
READ_TOOLS, READ_PARTS = ("llama", "qwen"), ("llama",)
TOOL = {
    "type": "function",
    "function": {"name": "größe", "description": "<b>a & 'b'</b>", "parameters": {"type": "object", "properties": {}}},
}
USER, REPLY = {"role": "user", "content": " Hi <there> & 'you' 日本 🙂\n"}, {"role": "assistant", "content": "Yes."}
SYSTEM = {"role": "system", "content": "  Be brief.  "}
CHATS = {
    "one": {"messages": [USER]},
    "several": {"messages": [SYSTEM, USER, REPLY, USER]},
    "no prompt": {"messages": [SYSTEM, USER, REPLY], "add_generation_prompt": False},
    "tools": {"messages": [SYSTEM, USER], "tools": [TOOL, TOOL]},
    "variables": {
        "messages": [USER],
        "variables": {"enable_thinking": False, "date_string": "26 Jul", "bos_token": "B"},
    },
    "reasoning": {"messages": [USER, REPLY, USER, REPLY | {"thinking": "\nhm\n"}]},
    "loop controls": {
        "messages": [USER, {"role": "note", "content": "x"}, REPLY, {"role": "stop", "content": ""}, USER]
    },
    "calls": {
        "messages": [
            USER,
            REPLY | {"tool_calls": [{"function": {"name": "f", "arguments": {"a": "é<", "b": [1, None]}}}]},
        ],
    },
    "parts": {
        "messages": [
            SYSTEM,
            {"role": "user", "content": [{"type": "text", "text": "in parts"}, {"type": "text", "text": "."}]},
        ]
    },
}


@pytest.fixture(scope="module")
def theirs(pair):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(pair / "target" / "tokenizer.json"), **SPECIAL)


def rendered(render):
    """What came of a rendering: a text, or a refusal."""
    try:
        return "text", render()
    except Exception as error:
        return "refused", type(error).__name__


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_as_transformers_renders_it(theirs, family, chat):
    fields = CHATS[chat]
    other = {"add_generation_prompt": True} | {
        k: v for k, v in fields.items() if k in ("add_generation_prompt", "tools")
    }
    variables = fields.get("variables", {})
    want = rendered(
        lambda: theirs.apply_chat_template(
            fields["messages"], chat_template=FAMILIES[family], tokenize=False, **other, **variables
        )
    )
    got = rendered(lambda: ChatTemplate(FAMILIES[family], SPECIAL).render(Chat(**fields)))
    if chat == "tools" and family not in READ_TOOLS:  # which transformers leaves out in silence
        assert got == ("refused", "PromptError")
        return
    if chat == "parts" and family not in READ_PARTS:  # which transformers prints as Python's lists, or fails over
        assert "in parts." in got[1]
        return
    assert got[0] == want[0]
    assert got[1] == want[1] or (want[0], got[1]) == ("refused", "PromptError")


@pytest.mark.slow
def test_most_of_these_chats_render():
    """The comparison above is one of texts, but for what a family has no words for."""
    pairs = [
        (ChatTemplate(source, SPECIAL), Chat(**fields)) for source in FAMILIES.values() for fields in CHATS.values()
    ]
    kinds = [rendered(partial(template.render, chat))[0] for template, chat in pairs]
    assert kinds.count("text") >= 35
    assert f"Today Date: {datetime.now():%Y}" in ChatTemplate(LLAMA, SPECIAL).render(Chat([SYSTEM, USER], [TOOL]))


def test_messages_are_the_callers_own():
    messages = [dict(USER), dict(REPLY) | {"thinking": "hm"}]
    source = "{{ messages[1].reasoning_content }}{% set _ = messages[0].content %}"
    assert ChatTemplate(source, {}).render(Chat(messages)) == "hm"
    assert messages == [USER, REPLY | {"thinking": "hm"}]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", ["does not parse", "line 1", "as text"]),
        ("a\n{{ 'x' ", ["does not parse", "line 2"]),
        ("{{ raise_exception('no system\nmessage') }}", ["refuses", "no system message"]),
        ("{% set ns = namespace(__class__=1) %}", ["refuses", "__class__"]),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", ["refuses", "_x"]),
        ("{{ missing.field }}", ["refuses", "missing"]),
    ],
)
def test_a_template_that_does_not_parse_or_refuses(source, words):
    with pytest.raises(PromptError) as caught:
        ChatTemplate(source, SPECIAL).render(Chat([USER]))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        *[({"messages": wrong}, "messages") for wrong in ([], "hi", ["hi"], [{"content": "hi"}])],
        *[({"messages": [USER], "tools": wrong}, "tools") for wrong in (TOOL, ["f"])],
        *[({"messages": [USER], "variables": wrong}, "variables") for wrong in ([1], {1: 2}, {"tools": []})],
        ({"messages": [USER], "add_generation_prompt": 1}, "add_generation_prompt"),
        ({"messages": [USER | {"content": object()}]}, "JSON"),
    ],
)
def test_what_is_no_chat_is_refused(fields, word):
    with pytest.raises(PromptError, match=word):
        Chat(**fields)
