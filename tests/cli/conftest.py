"""Fixtures of the command line's tests: small bundles with a chat template."""

import logging
import shutil
from pathlib import Path

import pytest
from campaign.bundle_copy import put

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATE = "chat_template.jinja"
REFUSAL = "{% if messages[-1]['content'] == 'forbidden' %}{{ raise_exception('not that') }}{% endif %}"


@pytest.fixture(scope="session")
def tiny(make_checkpoint, tmp_path_factory):
    """A checkpoint that builds fast, with a chat template; read it, do not change it."""
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", num_hidden_layers=1)
    logging.getLogger("torch.__trace").propagate = False  # thousands of records that pytest would keep
    (folder / TEMPLATE).write_text(CHAT_TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny_bundle(tiny, once, build_shared):
    """A small bundle without a draft; read it, do not change it."""
    sizes = {"max_seq_len": 64, "max_batch_size": 1}
    return once("tiny.bundle", lambda path: build_shared(target=str(tiny), output=path, **sizes))


@pytest.fixture(scope="session")
def chatty(bundle, tmp_path_factory):
    """The reference pair's bundle with a chat template, which refuses what is `forbidden`."""
    path = Path(shutil.copytree(bundle, tmp_path_factory.mktemp("chat") / "b"))
    put(path, TEMPLATE, (CHAT_TEMPLATE + REFUSAL).encode(), hashed=True, chat_template=TEMPLATE)
    return path
