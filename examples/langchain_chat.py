"""Answer by LangChain from a server: a chain that streams, and an answer as an object.

specbuild serve coder.bundle --port 8000 &
pip install langchain-openai
python examples/langchain_chat.py http://localhost:8000/v1 coder 'Write quicksort in Python.'
"""

from __future__ import annotations

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Topic(BaseModel):
    """What a question is about."""

    language: str
    difficulty: int


def main(url: str, name: str, question: str, max_tokens: int = 256) -> Topic:
    """Print the streamed answer, then classify the question by a schema."""
    model = ChatOpenAI(base_url=url, api_key="none", model=name, temperature=0, max_completion_tokens=max_tokens)
    chain = ChatPromptTemplate.from_messages([("system", "You are brief."), ("user", "{question}")])
    for text in (chain | model | StrOutputParser()).stream({"question": question}):
        print(text, end="", flush=True)
    topic: Topic = model.with_structured_output(Topic, method="json_schema").invoke(question)
    print(f"\n{topic!r}")
    return topic


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} URL MODEL QUESTION")
    main(*sys.argv[1:])
