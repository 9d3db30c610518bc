"""Small tokenizers of several kinds, trained on a few sentences: no downloads."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

ENGLISH = (
    "The quick brown fox jumps over the lazy dog. The dog sleeps, and the fox jumps again; nothing else happens.\n\n"
    "In 1984 it cost 12.50 a piece, don't you think? Speculative decoding drafts tokens and then verifies the drafts.\n"
)
OTHERS = "你好,世界。今天的天气很好。 Привет, мир! naïve café 😀👍🏽 ยินดี मित्र\n"
_TRAINING = [
    ENGLISH,
    "over and over the fox thinks of the drafts, then the dog verifies nothing",
    "你好 世界 Привет café",
]


@cache
def byte_level(size: int = 320, specials: tuple[str, ...] = ("<|end|>",)) -> Any:
    """As GPT-2's: letters for bytes, spaces before words. The first special token is EOS."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator(
        _TRAINING,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=specials[0])


@cache
def sentencepiece(size: int = 360, adds_bos: bool = True) -> Any:
    """As Llama 2's: a space is put before every text, spaces are written as a letter, unknown characters as bytes."""
    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # in training alone: no token over a border
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=specials, show_progress=False)
    inner.train_from_iterator([text for text in _TRAINING if text.isascii()], trainer)
    state = json.loads(inner.to_str())
    state["pre_tokenizer"] = None
    state["added_tokens"] = state["added_tokens"][:3]
    inner = Tokenizer.from_str(json.dumps(state))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@cache
def unigram(size: int = 110) -> Any:
    """As T5's: the likeliest pieces; what is unknown has no token."""
    inner = Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    inner.train_from_iterator([text for text in _TRAINING if text.isascii()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")


@cache
def word_piece(size: int = 160) -> Any:
    """As BERT's, with its lower case: text does not come back as it was."""
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    inner.train_from_iterator(_TRAINING, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", eos_token="[SEP]")


KINDS = {
    "bytes": byte_level,
    "more bytes": lambda: byte_level(400, ("<|stop|>", "<|mark|>")),
    "sentencepiece": sentencepiece,
    "unigram": unigram,
    "word pieces": word_piece,
}


def in_another_order(tokenizer: Any, order: list[int]) -> Any:
    """The same tokens, where id i means what id `order[i]` meant."""
    new_id = {old: new for new, old in enumerate(order)}
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"] = {text: new_id[index] for text, index in state["model"]["vocab"].items()}
    state["added_tokens"] = sorted(
        ({**token, "id": new_id[token["id"]]} for token in state["added_tokens"]), key=lambda token: token["id"]
    )
    roles = {role: text for role, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **roles)
