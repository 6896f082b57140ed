"""Our own chats and code, as a tokenizer takes them."""

import pytest
from transformers import AutoTokenizer

from specbuild.builder.quantize.kinds import CHATS, CODE, kinds


@pytest.fixture
def tokenizer(pair):
    return AutoTokenizer.from_pretrained(pair / "target")


def test_chats_go_through_the_template(tokenizer):
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    found = kinds(tokenizer, 1000)
    assert list(found) == ["chat", "code"]
    asked, said = CHATS[0]
    assert tokenizer.decode(found["chat"][0]) == f"user: {asked}\nassistant: {said}\n"


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}"])
def test_there_are_no_chats_without_a_template_that_takes_them(tokenizer, template):
    tokenizer.chat_template = template
    found = kinds(tokenizer, 1000)
    assert list(found) == ["code"]
    assert [tokenizer.decode(each) for each in found["code"]] == list(CODE)
    assert {len(each) for each in kinds(tokenizer, 7)["code"]} == {7}
