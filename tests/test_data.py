"""The packaged demonstration prompts, and what the reader refuses."""

import re
from collections import Counter
from pathlib import Path

import pytest

from autospec.data import DemoPrompt, load_prompts
from autospec.errors import ConfigurationError

SEGMENTS = ("summarise", "code_edit", "json", "translate", "passage_qa", "write")


def content(prompt: DemoPrompt) -> str:
    return "\n".join(message["content"] for message in prompt.messages)


def test_packaged_prompts_are_five_in_each_segment() -> None:
    prompts = load_prompts()
    assert Counter(prompt.segment for prompt in prompts) == dict.fromkeys(SEGMENTS, 5)
    assert [prompt.prompt_id for prompt in prompts] == [f"{name}-{i}" for name in SEGMENTS for i in range(1, 6)]


def test_packaged_prompts_are_different_single_user_messages_with_a_short_answer() -> None:
    prompts = load_prompts()
    assert len({content(prompt) for prompt in prompts}) == 30
    for prompt in prompts:
        assert [message["role"] for message in prompt.messages] == ["user"]
        assert content(prompt).strip()
        assert 48 <= prompt.max_new_tokens <= 96


def test_six_packaged_prompts_are_long() -> None:
    # 650 words are about 850 tokens or more of SmolLM2: long enough that the cost of the context shows.
    assert sum(len(content(prompt).split()) >= 650 for prompt in load_prompts()) >= 6


def test_accents_survive() -> None:
    translate = " ".join(content(prompt) for prompt in load_prompts() if prompt.segment == "translate")
    assert all(letter in translate for letter in "éàîüñ¿")


def test_a_users_file_and_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [
        '{"prompt": "Grüße\u2028aus"}',
        "",
        '{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],'
        ' "segment": "chat", "prompt_id": "a", "max_new_tokens": 7}',
    ]
    path.write_bytes("\ufeff".encode() + "\r\n".join(lines).encode())
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    assert load_prompts(str(path)) == [
        DemoPrompt("1", "default", ({"role": "user", "content": "Grüße\u2028aus"},), 64),
        DemoPrompt("a", "chat", (system, user), 7),
    ]


@pytest.mark.parametrize(
    ("line", "what", "expected"),
    [
        ('{"prompt": "x"', "not valid JSON", "one JSON object"),
        ('{"prompt": "x", "prompt": "y"}', "same key twice", "one JSON object"),
        ('["x"]', '["x"] is not an object', "`messages` or `prompt`"),
        ("{}", "neither `messages` nor `prompt`", "exactly one"),
        ('{"prompt": "x", "messages": []}', "both `messages` and `prompt`", "exactly one"),
        ('{"prompt": "x", "max_tokens": 5}', "unknown key 'max_tokens'", "max_new_tokens"),
        ('{"prompt": " "}', '`prompt` is " "', "not empty"),
        ('{"prompt": "\\ud83d"}', "half a surrogate pair", "complete Unicode"),
        ('{"messages": []}', "`messages` is []", "a list of objects"),
        ('{"messages": "x"}', '`messages` is "x"', "a list of objects"),
        ('{"messages": [{"role": "user"}]}', "`messages[0]` is", "`role` and `content`"),
        ('{"messages": [{"role": "user", "content": 3}]}', "`messages[0].content` is 3", "a string"),
        ('{"prompt": "x", "segment": null}', "`segment` is null", "a string"),
        ('{"prompt": "x", "prompt_id": 4}', "`prompt_id` is 4", "a string"),
        ('{"prompt": "x", "prompt_id": "1"}', "`prompt_id` '1' is taken by line 1", "another id"),
        ('{"prompt": "x", "max_new_tokens": 0}', "`max_new_tokens` is 0", "from 1 up"),
        ('{"prompt": "x", "max_new_tokens": true}', "`max_new_tokens` is true", "from 1 up"),
        ('{"prompt": "x", "max_new_tokens": "9"}', '`max_new_tokens` is "9"', "from 1 up"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, what: str, expected: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        load_prompts(path)
    message = str(caught.value)
    assert re.fullmatch(rf"{re.escape(str(path))}, line 2: .*{re.escape(what)}.*; expected .*", message)
    assert expected in message


def test_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"prompt": "fine"}\n{"prompt": "café"}\n'.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"prompts\.jsonl, line 2: byte 0xe9 is not UTF-8; expected"):
        load_prompts(path)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"prompts\.jsonl: no prompt in the file; expected"):
        load_prompts(path)


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(ConfigurationError, match=r"cannot read the prompt file .*; expected"):
            load_prompts(path)
