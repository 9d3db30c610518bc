"""Recorded tokens as text on the page of a request: only where they were recorded, and never more than text."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from autospec import models
from autospec.errors import ModelError
from autospec.telemetry import traces
from autospec.telemetry.dashboard import create_app, tokens
from autospec.telemetry.store import Store
from autospec.types import Action, BlockOutcome, RecordedTokens
from tests.dashboard_stores import HOSTILE, file_url, record
from tests.tiny_tokenizers import byte_level

HERE = "http://127.0.0.1"
PROMPT = "Say <b>this</b> again:"
ANSWER = f"the fox\n{HOSTILE[0]}{HOSTILE[1]}<!--<script>\u2028\u202egnp.exe\u2066 \u05d0 the dog"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokenizer")
    byte_level().save_pretrained(place)
    return place


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A request whose blocks and tokens were kept, and one of whose neither was."""
    prompt, answer = (tuple(byte_level()(text)["input_ids"]) for text in (PROMPT, ANSWER))
    action = Action("ngram", 3, "best")
    blocks = [BlockOutcome("kept", action, len(prompt) + place, 3, 3, 3, 4, 0.001, 0.05) for place in (1, 5)]
    kept = record(1, "kept", trace=traces.pack(blocks), tokens=RecordedTokens(prompt, answer, {}))
    kept = replace(kept, prompt_tokens=len(prompt), output_tokens=len(answer))
    url = file_url(tmp_path)
    with Store(url) as store:
        store.add([kept, record(3, "not kept", trace=traces.pack(blocks))])
    return url


def page(app: Any, number: int = 1) -> str:
    answer = TestClient(app, base_url=HERE).get(f"/request?id={number:032x}")
    assert answer.status_code == 200
    return answer.text


def texts(shown: str) -> list[str]:
    """What stands in the page as text of tokens: of each block, then the prompt and the answer."""
    return [unescape(text) for text in re.findall(r'<(?:q|pre) class="said">(.*?)</(?:q|pre)>', shown, re.DOTALL)]


def test_without_a_tokenizer_there_are_ids_and_a_word_how_to_get_text(url: str) -> None:
    shown = page(create_app(url))
    assert "autospec dashboard --tokenizer FOLDER" in shown
    assert "token ids of the answer" in shown
    assert texts(shown) == []


def test_text_of_prompt_answer_and_blocks(url: str, folder: Path) -> None:
    shown = page(create_app(url, tokenizer=str(folder)))
    first, second, prompt, answer = texts(shown)
    assert prompt == PROMPT
    assert answer.startswith("the fox\n<img src=x onerror=alert(1)>")
    assert answer.endswith(" the dog")
    ids = byte_level()(ANSWER)["input_ids"]
    assert [first, second] == [byte_level().decode(ids[start : start + 4]).replace("\n", "\\n") for start in (1, 5)]


def test_text_is_shown_and_does_nothing(url: str, folder: Path) -> None:
    shown = page(create_app(url, tokenizer=str(folder)))
    assert "<img" not in shown
    assert "<b>this" not in shown
    assert shown.count("<script") == 1
    assert not set("\u2028\u202e\u2066") & set(shown)
    assert r"\u2028\u202egnp.exe\u2066" in shown
    assert shown.rstrip().endswith("</html>")


def test_what_was_not_recorded_has_no_text(url: str, folder: Path) -> None:
    shown = page(create_app(url, tokenizer=str(folder)), 3)
    assert "Prompt and answer were not recorded" in shown
    assert texts(shown) == []


def test_it_is_loaded_once_and_only_when_it_is_needed(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load(place: str) -> Any:
        asked.append(place)
        return models.load_tokenizer(place)

    monkeypatch.setattr(tokens, "load_tokenizer", load)
    app = create_app(url, tokenizer=str(folder))
    page(app, 3)
    assert asked == []
    page(app)
    page(app)
    assert asked == [str(folder)]


def test_a_tokenizer_of_another_model_is_told_by_its_ids(url: str, folder: Path, tmp_path: Path) -> None:
    with Store(url) as store:
        store.add([record(5, "other", tokens=RecordedTokens((1, 2), (3, 999_999), {}))])
    shown = page(create_app(url, tokenizer=str(folder)), 5)
    assert "no 999999: it is of another model" in shown
    assert "3 999999" in shown


def test_one_that_cannot_be_used(url: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        create_app(url, tokenizer="./nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    shown = page(create_app(url, tokenizer=str(empty)))
    assert str(empty) not in shown
    assert "They cannot be shown as text: cannot load the tokenizer" in shown
    assert "token ids of the answer" in shown


def test_one_that_could_not_be_loaded_is_tried_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the hub did not answer; it is not asked by every page, since it may take long to fail."""
    now, asked = 0.0, 0

    def load(place: str) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise ModelError(f"cannot load the tokenizer of {place!r}: no network")
        return byte_level()

    monkeypatch.setattr(tokens, "load_tokenizer", load)
    decoder = tokens.Decoder("owner/name", clock=lambda: now)
    for later in (0.0, tokens.RETRY_SECONDS - 1):
        now = later
        with pytest.raises(ModelError, match="owner/name'; the server's log says why"):
            decoder([5])
    assert asked == 1
    assert caplog.text.count("no network") == 1
    now = tokens.RETRY_SECONDS
    assert decoder(byte_level()("again")["input_ids"]) == "again"
    assert asked == 2


def test_a_page_names_the_folder_and_not_where_it_is(url: str, folder: Path) -> None:
    shown = page(create_app(url, tokenizer=str(folder)))
    assert f"<code>{folder.name}</code>" in shown
    assert str(folder.parent) not in shown.partition("<footer>")[0]
    assert tokens.Decoder("owner/name").name == "owner/name"


def test_code_that_comes_with_a_tokenizer_is_not_run(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "with code"
    folder.mkdir()
    (folder / "code.py").write_text(f"open({str(tmp_path / 'was run')!r}, 'w')\nclass Mine: ...\n", encoding="utf-8")
    settings = '{"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Mine", null]}}'
    (folder / "tokenizer_config.json").write_text(settings, encoding="utf-8")
    assert "They cannot be shown as text" in page(create_app(url, tokenizer=str(folder)))
    assert not (tmp_path / "was run").exists()
