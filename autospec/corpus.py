"""Texts from files into a pool that the `suffix` source drafts from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autospec.drafts.pool import SuffixPool
from autospec.errors import ConfigurationError

KEYS = ("text", "completion", "token_ids")


@dataclass(frozen=True, slots=True)
class Added:
    """What a file brought."""

    texts: int
    tokens: int


def add_file(pool: SuffixPool, path: Path, tokenizer: Any) -> Added:
    """Add the texts of a file to a pool; nothing is added when any of it is not as described.

    A `.jsonl` file holds one object a line, with `text` or `completion` (a string) or `token_ids` (whole numbers);
    other keys are ignored. Any other file is one text, in UTF-8.

    Args:
        pool: what is added to.
        path: the file.
        tokenizer: the target's.

    Raises:
        ConfigurationError: the file cannot be read, or a line is not as described: with the file and the line.
        DraftError: the pool was made with another tokenizer.
    """
    pool.belong_to(tokenizer)
    texts = list(_texts(path, tokenizer))
    if not texts:
        raise ConfigurationError(f"{path}: no text in it")
    for text in texts:
        pool.add(text)
    return Added(len(texts), sum(map(len, texts)))


def _texts(path: Path, tokenizer: Any) -> Iterator[list[int]]:
    content = _read(path)
    if path.suffix != ".jsonl":
        if content.strip():
            yield _encode(content, tokenizer)
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield _from_line(line, f"{path}, line {number}", tokenizer)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or type(error).__name__}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{path}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8; save the file in that encoding"
        ) from error


def _from_line(line: str, place: str, tokenizer: Any) -> list[int]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{place}: not JSON ({error})") from error
    key = next((key for key in KEYS if isinstance(entry, dict) and key in entry), None)
    if key is None:
        raise ConfigurationError(f"{place}: an object with one of {', '.join(KEYS)} is needed")
    value = entry[key]
    if key != "token_ids":
        if not isinstance(value, str):
            raise ConfigurationError(f"{place}: {key} is {value!r:.40}, a string is needed")
        return _encode(value, tokenizer)
    known = len(tokenizer)
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ConfigurationError(f"{place}: token_ids is {value!r:.40}, a list of whole numbers is needed")
    if unknown := [token for token in value if not 0 <= token < known]:
        raise ConfigurationError(f"{place}: token id {unknown[0]}, the tokenizer has ids 0 to {known - 1}")
    return list(value)


def _encode(text: str, tokenizer: Any) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens
