"""The demonstration prompts, and the reader of prompt files in the same format: JSON Lines in UTF-8."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autospec.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

PACKAGED_FILE = "demo_prompts.jsonl"
DEFAULT_SEGMENT = "default"
DEFAULT_MAX_NEW_TOKENS = 64
KEYS = ("messages", "prompt", "segment", "prompt_id", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One request: the chat messages, and the segment that the policy learns about separately."""

    prompt_id: str
    segment: str
    messages: tuple[Mapping[str, str], ...]
    max_new_tokens: int


def load_prompts(path: str | Path | None = None) -> list[DemoPrompt]:
    """Read a prompt file, or the 30 packaged demonstration prompts.

    Each line is one JSON object with either `messages` (a list of objects with `role` and `content`) or `prompt`
    (a string, sent as one user message), and optionally `segment` (default "default"), `prompt_id` (default: the
    line number) and `max_new_tokens` (default 64). Blank lines are skipped.

    Args:
        path: The JSON Lines file, in UTF-8; None reads the packaged one.

    Returns:
        The prompts, in the order of the file.

    Raises:
        ConfigurationError: The file cannot be read, is not UTF-8 or has no prompt, or a line is not as described.
            Unknown keys and repeated ids are errors too. The message names the file and the line.
    """
    source = files(__name__).joinpath(PACKAGED_FILE) if path is None else Path(path)
    try:
        content = source.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigurationError(
            f"{source}: cannot read the prompt file ({reason}); expected the path of a JSON Lines file"
        ) from error
    return _parse_file(content, str(source))


def encode(tokenizer: Any, prompt: DemoPrompt, model: PreTrainedModel) -> dict[str, Tensor]:
    """A prompt as the model's chat template wants it: `input_ids` and `attention_mask`, [1, n]."""
    messages = [dict(message) for message in prompt.messages]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def interleaved(prompts: Sequence[DemoPrompt]) -> Iterator[DemoPrompt]:
    """One of each segment in turn, so that a run cut short has seen them all."""
    by_segment: dict[str, list[DemoPrompt]] = {}
    for prompt in prompts:
        by_segment.setdefault(prompt.segment, []).append(prompt)
    for turn in zip_longest(*by_segment.values()):
        yield from (prompt for prompt in turn if prompt is not None)


def _parse_file(content: bytes, name: str) -> list[DemoPrompt]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{name}, line {number}: byte 0x{error.object[error.start]:02x} is not UTF-8; "
            "expected a file saved with the UTF-8 encoding"
        ) from error

    prompts: list[DemoPrompt] = []
    line_of_id: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() would also cut inside JSON strings
        if not line.strip():
            continue
        try:
            prompt = _parse_line(line, number)
            if prompt.prompt_id in line_of_id:
                first = line_of_id[prompt.prompt_id]
                raise ConfigurationError(
                    f"`prompt_id` {prompt.prompt_id!r} is taken by line {first}; expected another id on each line"
                )
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}, line {number}: {error}") from error.__cause__
        line_of_id[prompt.prompt_id] = number
        prompts.append(prompt)
    if not prompts:
        raise ConfigurationError(f"{name}: no prompt in the file; expected one JSON object a line")
    return prompts


def _parse_line(line: str, number: int) -> DemoPrompt:
    try:
        record = json.loads(line, object_pairs_hook=_object_without_repeated_keys)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"not valid JSON ({error}); expected one JSON object a line") from error
    if not isinstance(record, dict):
        raise ConfigurationError(
            f"{_shown(record)} is not an object; expected a JSON object with `messages` or `prompt`"
        )
    if unknown := sorted(set(record) - set(KEYS)):
        raise ConfigurationError(f"unknown key {', '.join(map(repr, unknown))}; expected only {', '.join(KEYS)}")
    if ("messages" in record) == ("prompt" in record):
        found = "both `messages` and `prompt`" if "prompt" in record else "neither `messages` nor `prompt`"
        raise ConfigurationError(f"{found}; expected exactly one of them")

    if "prompt" in record:
        messages: tuple[Mapping[str, str], ...] = ({"role": "user", "content": _text(record["prompt"], "prompt")},)
    else:
        messages = _messages(record["messages"])
    max_new_tokens = record.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    if type(max_new_tokens) is not int or max_new_tokens < 1:  # bool is an int, and true is no length
        raise ConfigurationError(f"`max_new_tokens` is {_shown(max_new_tokens)}; expected a whole number from 1 up")
    return DemoPrompt(
        prompt_id=_text(record.get("prompt_id", str(number)), "prompt_id"),
        segment=_text(record.get("segment", DEFAULT_SEGMENT), "segment"),
        messages=messages,
        max_new_tokens=max_new_tokens,
    )


def _messages(value: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ConfigurationError(f"`messages` is {_shown(value)}; expected a list of objects with `role` and `content`")
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ConfigurationError(f"`{where}` is {_shown(message)}; expected an object with `role` and `content`")
        for key, text in message.items():
            _text(text, f"{where}.{key}")
    return tuple(value)


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(f"`{key}` is {_shown(value)}; expected a string that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half an emoji, cut by whoever wrote the file: no tokenizer takes it
        raise ConfigurationError(f"`{key}` has half a surrogate pair; expected complete Unicode text") from error
    return value


def _object_without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("an object has the same key twice")
    return record


def _shown(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
