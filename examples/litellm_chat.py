"""Answer by LiteLLM from a server, by its provider for vLLM's servers.

specbuild serve coder.bundle --port 8000 &
pip install litellm
python examples/litellm_chat.py http://localhost:8000/v1 coder 'Write quicksort in Python.'
"""

from __future__ import annotations

import sys

import litellm


def main(url: str, name: str, question: str, max_tokens: int = 256) -> str:
    """Print the answer as it comes; return it."""
    messages = [{"role": "user", "content": question}]
    stream = litellm.completion(
        f"hosted_vllm/{name}", messages=messages, api_base=url, max_tokens=max_tokens, temperature=0, stream=True
    )
    answer = ""
    for chunk in stream:
        text = chunk.choices[0].delta.content or ""
        print(text, end="", flush=True)
        answer += text
    print()
    return answer


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} URL MODEL QUESTION")
    main(*sys.argv[1:])
