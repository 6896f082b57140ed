"""Other tokenizers than the reference pair's, and drafts that have them."""

import inspect
import json
import shutil

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

END = "<|end|>"


def byte_level(size, *sources):
    """A byte-level BPE of so many tokens, trained on modules' own text; its last token ends a text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(map(inspect.getsource, sources), trainer)
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def sentencepiece(words):
    """A BPE of these words and their beginnings as SentencePiece writes it, with a byte for whatever else there is."""
    pieces, merges = dict[str, int](), []
    for piece in ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]:
        pieces[piece] = len(pieces)
    for word in words:
        for character in word:
            pieces.setdefault(character, len(pieces))
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                pieces[word[:end]] = len(pieces)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = tokenizers.Tokenizer(models.BPE(pieces, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in ("<unk>", "<s>", "</s>")])
    return tokenizer


def give(folder, tokenizer, end=END, **special):
    """Put a tokenizer into a checkpoint's folder, and the id of what ends its texts into its configuration.

    Embedding and head get as many rows as it has tokens.
    """
    import torch
    from safetensors.torch import load_file, save_file

    size, weights = tokenizer.get_vocab_size(), load_file(folder / "model.safetensors")
    rows = max(map(len, weights.values()))
    for name in [name for name, weight in weights.items() if len(weight) == rows]:
        weights[name] = torch.nn.functional.pad(weights[name], (0, 0, 0, size - rows))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers", "eos_token": end} | special
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    edit(folder, eos_token_id=tokenizer.token_to_id(end), bos_token_id=None, vocab_size=size)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def edit(folder, **fields):
    """Change a checkpoint's configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def with_tokenizer(draft, folder, tokenizer):
    """A tied draft of the reference pair with another byte-level tokenizer.

    Its embedding has the draft's own rows of the tokens that both have, and means of the draft's pieces of the others.
    """
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(draft, folder)
    weights = load_file(folder / "model.safetensors")
    old, name = tokenizers.Tokenizer.from_file(str(draft / "tokenizer.json")), "model.embed_tokens.weight"
    rows = weights[name].float()
    pieces = [
        [old.token_to_id("<|endoftext|>" if text == END else text)] if text == END or old.token_to_id(text) is not None
        else [each.id for each in old.model.tokenize(text)]
        for text, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    ]  # fmt: skip
    weights[name] = torch.stack([rows[each].mean(0) for each in pieces]).to(weights[name].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return give(folder, tokenizer)
