"""Requests of clients: openai, anthropic, LangChain and LiteLLM as recorded, the others by their published shapes."""

import json

import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from data_files import rows
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from route_client import CHATS, COMPLETIONS, MESSAGES, RESPONSES

REQUESTS = rows("client_requests.jsonl")
TYPES = {  # of a whole answer, and of a stream's events
    COMPLETIONS: (Completion, Completion),
    CHATS: (ChatCompletion, ChatCompletionChunk),
    RESPONSES: (Response, ResponseStreamEvent),
    MESSAGES: (Message, RawMessageStreamEvent),
    f"{MESSAGES}/count_tokens": (MessageTokensCount, None),
}


@pytest.mark.parametrize("asked", REQUESTS, ids=[f"{asked['client']}-{asked['path']}" for asked in REQUESTS])
def test_an_answer_has_the_shape_that_its_client_reads(client, asked):
    whole, event = TYPES[asked["path"].partition("?")[0]]
    reply = client.post(asked["path"], json=asked["body"])
    assert reply.status_code == 200, reply.text
    if not asked["body"].get("stream"):
        answer = reply.json()
        if asked["body"].get("echo"):
            for choice in answer["choices"]:  # OpenAI's first token has null too, against its package's type
                for name in ("token_logprobs", "top_logprobs"):
                    assert choice["logprobs"][name].pop(0) is None
        TypeAdapter(whole).validate_python(answer)
        return
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n") if line.startswith("data: ")]
    events = [TypeAdapter(event).validate_python(json.loads(line)) for line in lines if line != "[DONE]"]
    assert len(events) > 1
