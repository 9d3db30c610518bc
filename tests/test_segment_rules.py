"""Rules: what fits, what a file may say, and that no pattern can hold a request up."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from autospec.errors import ConfigurationError
from autospec.segments import Prompt, Rule, Segmenter
from autospec.segments.rules import Rules
from autospec.segments.settings import load_settings


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "segments.toml"
    path.write_text(text, encoding="utf-8")
    return path


def first(rules: list[Rule], prompt: Prompt) -> str | None:
    hit = Rules(rules).first(prompt)
    return hit[1].name if hit is not None else None


class TestFits:
    @pytest.mark.parametrize(
        ("conditions", "fits"),
        [
            ({"text": "sorted"}, True),
            ({"text": "^sorted"}, False),
            ({"text": "(?i)SORTED"}, True),
            ({"min_prompt_tokens": 30}, True),
            ({"min_prompt_tokens": 31}, False),
            ({"max_prompt_tokens": 30}, True),
            ({"max_prompt_tokens": 29}, False),
            ({"do_sample": True}, True),
            ({"do_sample": False}, False),
            ({"decoding": r"temperature=0\.8"}, True),
            ({"decoding": "greedy"}, False),
            ({"tenant": "^acme$"}, True),
            ({"tenant": "^acm$"}, False),
            ({"tenant": "acme", "text": "sorted", "do_sample": True, "max_prompt_tokens": 99}, True),
            ({"tenant": "acme", "text": "nothing"}, False),
        ],
    )
    def test_all_conditions_must_hold(self, conditions: dict[str, Any], fits: bool) -> None:
        prompt = Prompt.of_text(
            "a list, sorted", prompt_tokens=30, do_sample=True, decoding="sample temperature=0.8", tenant="acme"
        )
        assert first([Rule("x", **conditions)], prompt) == ("x" if fits else None)

    def test_the_first_that_fits(self) -> None:
        rules = [Rule("a", text="one"), Rule("b", text="two"), Rule("c", min_prompt_tokens=0)]
        assert [first(rules, Prompt.of_text(text)) for text in ("two one", "two", "three")] == ["a", "b", "c"]

    def test_without_a_tenant_no_tenant_rule(self) -> None:
        assert first([Rule("x", tenant=".*")], Prompt.of_text("a")) is None

    def test_text_is_decoded_only_when_a_rule_needs_it(self) -> None:
        def read() -> str:
            raise AssertionError("the text was asked for")

        prompt = Prompt(read, 50, tenant="acme")
        assert first([Rule("long", min_prompt_tokens=100, text="a"), Rule("b", tenant="b", text="a")], prompt) is None

    def test_a_rule_says_what_it_asks_for(self) -> None:
        assert str(Rule("x", text="a.b", max_prompt_tokens=3)) == "text = 'a.b', max_prompt_tokens = 3"


class TestPatternsThatDoNotEnd:
    @pytest.mark.parametrize("pattern", ["(a|aa)+$", "(a+)+$(?<=b)", "(.*)(.*)(.*)(.*)[0-9]"])
    def test_they_are_stopped_passed_over_and_named_once(self, pattern: str, caplog: pytest.LogCaptureFixture) -> None:
        rules = Rules([Rule("bad", text=pattern), Rule("worse", text=pattern), Rule("good", text="aaa")])
        with caplog.at_level(logging.WARNING, logger="autospec"):
            started = time.perf_counter()
            for _ in range(3):
                hit = rules.first(Prompt.of_text("a" * 5000 + "!"))
                assert hit is not None
                assert hit[1].name == "good"
            seconds = time.perf_counter() - started
        assert seconds < 3.0  # 0.1 on an idle machine
        assert [record.message.split(" did")[0] for record in caplog.records] == ["segments: rule 1 (bad)"]


class TestFiles:
    def test_everything_a_file_may_say(self, tmp_path: Path) -> None:
        path = written(
            tmp_path,
            """
            [other]
            x = 1
            [segments]
            builtin = true
            clusters = "c.npz"
            max_segments = 5
            [[segments.rules]]
            name = "sql"
            text = '(?i)\\bselect\\b'
            do_sample = false
            [[segments.rules]]
            name = "acme"
            tenant = "^acme$"
            min_prompt_tokens = 1
            max_prompt_tokens = 9
            decoding = "greedy"
            """,
        )
        settings = load_settings(path)
        assert settings.rules == (
            Rule("sql", text=r"(?i)\bselect\b", do_sample=False),
            Rule("acme", tenant="^acme$", min_prompt_tokens=1, max_prompt_tokens=9, decoding="greedy"),
        )
        assert (settings.builtin, settings.clusters, settings.max_segments) == (True, tmp_path / "c.npz", 5)

    def test_little_is_enough(self, tmp_path: Path) -> None:
        assert Segmenter.from_file(written(tmp_path, "[segments]")).assign(Prompt.of_text("a")).segment == "default"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[segments", "not a TOML file"),
            ("", r"no table \[segments\]"),
            ("segments = 3", r"no table \[segments\]"),
            ("[segments]\nrule = 1", r"unknown 'rule'; known are builtin, clusters, max_segments, rules"),
            ("[segments]\nbuiltin = 1", "builtin = 1; true or false"),
            ("[segments]\nclusters = 1", "clusters = 1; the path"),
            ("[segments]\nmax_segments = 0", "max_segments = 0; a whole number"),
            ("[segments]\nrules = 3", r"begin each with \[\[segments.rules\]\]"),
            ("[[segments.rules]]\ntext = 'a'", "rule 1: no name"),
            ("[[segments.rules]]\nname = 'a'", r"rule 1 \('a'\): it takes every prompt"),
            ("[[segments.rules]]\nname = ''\ntext = 'a'", "at least one visible character"),
            ("[[segments.rules]]\nname = 3\ntext = 'a'", "a text is needed"),
            ("[[segments.rules]]\nname = 'a'\ntext = '('", r"rule 1 \('a'\): text = '\(' is no regular expression"),
            ("[[segments.rules]]\nname = 'a'\ntext = 3", "a regular expression is needed"),
            ("[[segments.rules]]\nname = 'a'\ntenant = '['", "tenant = '\\['"),
            ("[[segments.rules]]\nname = 'a'\nmin_prompt_tokens = -1", "min_prompt_tokens=-1"),
            ("[[segments.rules]]\nname = 'a'\nmax_prompt_tokens = true", "max_prompt_tokens=True"),
            ("[[segments.rules]]\nname = 'a'\ndo_sample = 'yes'", "do_sample='yes'"),
            ("[[segments.rules]]\nname = 'a'\ntext = 'a'\nlength = 3", "unknown 'length'; known are name, text"),
            ("[segments]\nclusters = 'none.npz'", "none.npz: cannot read the clusters"),
        ],
    )
    def test_errors_name_file_rule_and_fix(self, tmp_path: Path, text: str, message: str) -> None:
        path = written(tmp_path, text)
        with pytest.raises(ConfigurationError, match=message) as caught:
            Segmenter.from_file(path)
        assert str(tmp_path) in str(caught.value)

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"none\.toml: cannot read the rules"):
            load_settings(tmp_path / "none.toml")
        with pytest.raises(ConfigurationError, match="cannot read the rules"):
            load_settings(tmp_path)
        path = tmp_path / "latin.toml"
        path.write_bytes(b"[segments]\n# caf\xe9")
        with pytest.raises(ConfigurationError, match=r"latin\.toml: not a TOML file in UTF-8"):
            load_settings(path)
        path.write_bytes(b"\xef\xbb\xbf[segments]\r\nbuiltin = true\r\n")
        assert load_settings(path).builtin is True

    def test_names_are_cleaned(self) -> None:
        assert Rule(" a\x00b\n" + "c" * 200, text="x").name == "a b " + "c" * 76
