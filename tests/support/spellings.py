"""Tokenizers that need no vocabulary: a token's text or bytes are what a function says."""

from specbuild.runtime.requests.text_decoder import ByteDecoder
from specbuild.runtime.requests.token_pieces import Piece


class Spelling:
    """The part of a `Tokenizer` that makes texts."""

    def __init__(self, spell):
        self.spell = spell

    def __getitem__(self, token):
        said = self.spell(token)
        data = said.encode() if isinstance(said, str) else said
        return Piece(data, data, special=False)

    def decoder(self, prompt=(), skip_special_tokens=True):
        return ByteDecoder(self, prompt, skip_special_tokens)

    def decode(self, ids):
        decoder = self.decoder()
        return decoder.feed(ids) + decoder.finish()
