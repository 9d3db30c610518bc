"""What each token of a tokenizer stands for, in bytes, and which tokens a text is in the middle of another text.

Bytes rather than characters: a token may end inside a character, and only bytes of several tokens can be put together.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from autospec.errors import ConfigurationError

_ROLES = ("eos", "bos", "unk", "pad")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BEFORE = ("\n", ":", "a")  # to see how a text goes on; mostly no token reaches over the end of one of these


class Spelling:
    """A tokenizer seen from outside: bytes of tokens, and tokens of bytes.

    Special tokens stand for no text. Tokens that were added to a vocabulary without being special stand for their own.

    Args:
        tokenizer: of transformers. It is copied as far as encoding goes, so that no setting of it is ever changed.

    Raises:
        ConfigurationError: it is no tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not all(callable(getattr(tokenizer, name, None)) for name in ("get_vocab", "encode")):
            raise ConfigurationError(f"{tokenizer!r:.60} is not a tokenizer of transformers")
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        self._encode = _encoder_of(tokenizer)
        spell = _speller_of(tokenizer)
        byte_tokens = {index for text, index in vocabulary.items() if _byte(text) is not None and len(spell(text)) == 1}
        special = {index for index, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        special -= byte_tokens  # some that were trained by hand call them special
        self.num_ids = max(vocabulary.values(), default=-1) + 1
        self.specials = {index: text for text, index in vocabulary.items() if index in special}
        self.roles: dict[str, int] = {}
        for role in _ROLES:
            if type(index := getattr(tokenizer, f"{role}_token_id", None)) is int:
                self.roles[role] = index
        self.pieces: dict[int, bytes] = {}  # by id, of every token that stands for text
        self._ids: dict[bytes, int] = {}
        of_bytes: dict[bytes, int] = {}  # come second: mostly there is a usual token of the same byte
        for text, index in sorted(vocabulary.items(), key=lambda item: item[1]):
            if index in special:
                continue
            piece = text.encode() if index in added and index not in byte_tokens else spell(text)
            self.pieces[index] = piece
            (of_bytes if index in byte_tokens else self._ids).setdefault(piece, index)
        self._ids = {**of_bytes, **self._ids}
        self._ids.pop(b"", None)
        self._longest = max(map(len, self._ids), default=0)
        self.start = self._start(tokenizer)
        self.adds_space = (self._spelled(self.encode("a")) or b"").startswith(b" ")

    def id_of(self, piece: bytes) -> int | None:
        """The token that stands for just these bytes."""
        return self._ids.get(piece)

    def encode(self, text: str) -> list[int]:
        """As the tokenizer does at the start of a text, without special tokens, and never seeing one in the text."""
        return self._encode(text)

    def read(self, data: bytes, *, is_start: bool = False) -> list[int]:
        """The tokens as which a model of this tokenizer would best read these bytes.

        Bytes that are no whole character are left out, unless nothing else is there.
        """
        text = data.decode(errors="ignore")
        if not text:
            return self.of_bytes(data)
        if is_start:
            return self.encode(text)
        ids = self.going_on(text)
        return self.encode(text) if ids is None else ids

    def going_on(self, text: str) -> list[int] | None:
        """The tokens of a text that goes on another one. None: the tokenizer cannot spell it, or not unchanged."""
        wanted = text.encode()
        for candidate in (text, text[1:]) if text.startswith(" ") else (text,):  # some put a space before every text
            if self._spelled(ids := self.encode(candidate)) == wanted:
                return ids
        for before in _BEFORE:
            if (tail := self._tail(self.encode(before + text), wanted)) is not None:
                return tail
        ids = self.of_bytes(wanted)
        return ids if self._spelled(ids) == wanted else None

    def of_bytes(self, data: bytes) -> list[int]:
        """Always the longest token that fits, up to where none does."""
        ids: list[int] = []
        begin = 0
        while begin < len(data):
            ends = range(min(len(data), begin + self._longest), begin, -1)
            end = next((end for end in ends if data[begin:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[begin:end]])
            begin = end
        return ids

    def _spelled(self, ids: Sequence[int]) -> bytes | None:
        """None when one of them stands for no text."""
        pieces = [self.pieces.get(index) for index in ids]
        return b"".join(piece for piece in pieces if piece is not None) if None not in pieces else None

    def _tail(self, ids: list[int], wanted: bytes) -> list[int] | None:
        """The last of the tokens, if they stand for just these bytes."""
        length = 0
        for position in range(len(ids) - 1, -1, -1):
            length += len(self.pieces.get(ids[position], b""))
            if length >= len(wanted):
                return ids[position:] if self._spelled(ids[position:]) == wanted else None
        return None

    def _start(self, tokenizer: Any) -> tuple[int, ...]:
        """What the tokenizer puts before a text by itself: mostly its BOS, or nothing."""
        plain, whole = self.encode("a"), list(tokenizer("a")["input_ids"])
        starts = (begin for begin in range(len(whole)) if whole[begin : begin + len(plain)] == plain)
        begin = next(starts, 0) if plain else 0
        return tuple(whole[:begin])


def _encoder_of(tokenizer: Any) -> Callable[[str], list[int]]:
    try:
        own: Any = copy.deepcopy(tokenizer.backend_tokenizer)
        own.no_truncation()
        own.no_padding()
        own.encode_special_tokens = True  # text that looks like a special token is text
    except Exception:  # noqa: BLE001  # none there, or parts written in Python, which cannot be copied
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    return lambda text: list(own.encode(text, add_special_tokens=False).ids)


def _speller_of(tokenizer: Any) -> Callable[[str], bytes]:
    """From the text of a token in the vocabulary to what it stands for, read off the tokenizer's own decoder."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if not hasattr(tokenizer, "backend_tokenizer"):
        return lambda text: _byte(text) or text.replace("▁", " ").encode()  # sentencepiece's own way
    steps = _steps(json.loads(decoder.__getstate__())) if decoder is not None else []
    kinds = {step["type"]: step for step in steps}
    if "ByteLevel" in kinds:
        return _of_byte_letters
    spaces = [step["pattern"]["String"] for step in steps if step["type"] == "Replace" and step["content"] == " "]
    for kind, key in (("Metaspace", "replacement"), ("BPEDecoder", "suffix")):
        spaces += [kinds[kind][key]] if kind in kinds else []
    prefix = kinds["WordPiece"]["prefix"] if "WordPiece" in kinds else None
    joins_by_space = prefix is not None or not steps
    has_byte_tokens = "ByteFallback" in kinds

    def spell(text: str) -> bytes:
        if has_byte_tokens and (byte := _byte(text)):
            return byte
        if joins_by_space:
            text = text[len(prefix) :] if prefix and text.startswith(prefix) else f" {text}"
        for space in spaces:
            text = text.replace(space, " ")
        return text.encode(errors="ignore")

    return spell


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    if decoder["type"] == "Replace" and "String" not in decoder["pattern"]:
        return []
    return [decoder]


def _byte(text: str) -> bytes | None:
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else None


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level vocabularies write for a byte: itself where it can be seen, else one from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF_LETTER = _byte_letters()


def _of_byte_letters(text: str) -> bytes:
    if all(letter in _BYTE_OF_LETTER for letter in text):
        return bytes(_BYTE_OF_LETTER[letter] for letter in text)
    return text.encode(errors="ignore")
