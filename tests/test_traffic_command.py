"""`autospec record` and `autospec traffic`: what they write, print and refuse."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from autospec.answering import complete
from autospec.cli.main import group
from autospec.cli.traffic import FORMATS
from autospec.traffic import TrafficReader
from autospec.traffic.importers import IMPORTERS
from tests import tiny

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny-target"
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    tiny.llama(dtype=torch.float32).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "traffic"


def run(*args: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(group, [str(each) for each in args], prog_name="autospec", auto_envvar_prefix="AUTOSPEC")
    return done.exit_code, done.stdout, done.stderr


def lines(path: Path, *entries: Any) -> Path:
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries), encoding="utf-8")
    return path


def plain(target: Any, prompt: tuple[int, ...], **options: Any) -> tuple[int, ...]:
    """What the model's own `generate` says."""
    ids = torch.tensor([prompt])
    return tuple(target.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0].tolist())


def imported(out: Path, model: str, *entries: Any) -> None:
    file = lines(out.with_name("log.jsonl"), *entries)
    code, _, err = run("traffic", "import", file, "--model", model, "--out", out)
    assert code == 0, err


PROMPTS = [{"prompt": "abcabc" * n, "segment": "s", "max_new_tokens": 5} for n in (2, 3)]


class TestRecord:
    @pytest.mark.parametrize("sampled", [[], ["--temperature", "0.8", "--top-p", "0.9", "--seed", "3"]], ids=len)
    def test_the_plain_targets_answers(self, out: Path, model: str, sampled: list[str]) -> None:
        prompts = lines(out.with_name("p.jsonl"), *PROMPTS)
        arguments = ["record", "--model", model, "--prompts", prompts, "--out", out, "--dtype", "float32", *sampled]
        code, stdout, err = run(*arguments, "--json")
        assert code == 0, err
        assert json.loads(stdout) == {"out": str(out), "requests": 2}
        found = list(TrafficReader(out))
        target = tiny.llama(dtype=torch.float32)
        for number, each in enumerate(found):
            torch.manual_seed(3 + number)
            options = {"do_sample": True, "temperature": 0.8, "top_p": 0.9} if sampled else {"do_sample": False}
            assert each.prompt + each.output == plain(target, each.prompt, max_new_tokens=5, **options)
        assert {(each.segment, each.is_control, each.policy) for each in found} == {("s", True, "off")}
        assert all(each.seconds is not None and each.seconds.prefill > 0 for each in found)
        assert TrafficReader(out).manifest.target == "tiny-target"

    def test_a_folder_that_is_full(self, out: Path, model: str) -> None:
        prompts = lines(out.with_name("p.jsonl"), *PROMPTS)
        with pytest.warns(UserWarning, match="reached its bound"):
            code, _, err = run("record", "--model", model, "--prompts", prompts, "--out", out, "--max-bytes", 10)
        assert code == 1
        assert "could not be recorded" in err


class TestImport:
    def test_counts_and_broken_lines(self, out: Path, model: str) -> None:
        file = lines(out.with_name("a.jsonl"), {"prompt": "abc", "completion": "de"}, "{", {"prompt": "abd"})
        arguments = ["traffic", "import", file, "--tokenizer", model, "--out", out]
        code, stdout, err = run(*arguments)
        assert code == 2
        assert stdout == ""
        assert "1 of 3 lines are broken" in err
        assert not out.exists()
        code, stdout, err = run(*arguments, "--tolerate", 0.5, "--json")
        assert code == 0
        counts = {"requests": 2, "pending": 1, "lines": 3, "broken": 1}
        assert json.loads(stdout) == {"out": str(out), "format": "plain", **counts}
        assert "line 2: not JSON" in err
        code, stdout, _ = run(*arguments, "--tolerate", 0.5)
        assert "2 requests of 3 lines (plain), 1 without an answer, 1 lines broken" in stdout
        assert len(list(TrafficReader(out))) == 2

    @pytest.mark.parametrize("given", [[], ["--model", "a", "--tokenizer", "b"]])
    def test_one_of_model_and_tokenizer(self, out: Path, given: list[str]) -> None:
        code, _, err = run("traffic", "import", lines(out.with_name("a.jsonl"), "{}"), "--out", out, *given)
        assert code == 2
        assert "give --model or --tokenizer" in err

    def test_every_format_can_be_chosen(self) -> None:
        assert set(FORMATS) == {"auto", *(each.name for each in IMPORTERS)}


class TestShow:
    def test_table_and_json_say_the_same(self, out: Path, model: str) -> None:
        imported(
            out,
            model,
            {"prompt": "abc", "completion": "de", "segment": "one", "created": 1769860800},
            {"prompt": "abcd", "segment": "two", "created": 1769947200},
        )
        shard = next(out.glob("*.zst"))
        shard.write_bytes(shard.read_bytes() + b"torn")
        code, stdout, _ = run("traffic", "show", out, "--json")
        assert code == 0
        content = json.loads(stdout)
        assert content["all"] == {"requests": 2, "pending": 1, "prompt_tokens": 7, "output_tokens": 2}
        assert [row["segment"] for row in content["segments"]] == ["one", "two"]
        assert (content["first"][:10], content["last"][:10]) == ("2026-01-31", "2026-02-01")
        assert content["target"] == content["tokenizer"] == "tiny-target"
        assert [each["reason"] for each in content["damaged"]] == ["cut off"]
        code, stdout, _ = run("traffic", "show", out)
        assert code == 0
        for shown in ("one", "two", "tiny-target", "2026-01-31", "2026-02-01", "damaged:   1 parts", shard.name):
            assert shown in stdout

    def test_no_traffic_is_one_line(self, out: Path) -> None:
        code, stdout, err = run("traffic", "show", out)
        assert (code, stdout, err.count("\n")) == (2, "", 1)
        assert "holds no traffic" in err


class TestComplete:
    def test_each_waiting_prompt_once_as_its_log_says(self, out: Path, model: str) -> None:
        imported(
            out,
            model,
            {"prompt": "abcabc", "completion": "de"},
            {"prompt": "abdabd", "max_tokens": 4},
            {"prompt": "abdabd", "max_tokens": 4, "temperature": 0.8},
        )
        before = list(TrafficReader(out))
        arguments = ["traffic", "complete", out, "--model", model, "--dtype", "float32", "--new-tokens", 6, "--json"]
        code, stdout, err = run(*arguments)
        assert code == 0, err
        assert json.loads(stdout) == {"answered": 2, "follow_ups": 0, "failed": 0}
        found = list(TrafficReader(out))
        assert found[0] == before[0]
        assert [each.request_id for each in found] == [each.request_id for each in before]
        target = tiny.llama(dtype=torch.float32)
        assert found[1].prompt + found[1].output == plain(target, found[1].prompt, max_new_tokens=4, do_sample=False)
        assert (found[1].origin, found[1].decoding, found[1].is_control) == ("complete", "greedy", True)
        assert found[2].decoding.startswith("sample temperature=0.8")
        assert len(found[2].output) == 4
        code, stdout, _ = run(*arguments)
        assert json.loads(stdout) == {"answered": 0, "follow_ups": 0, "failed": 0}
        assert list(TrafficReader(out)) == found

    def test_later_turns_and_a_run_that_is_cut_short(self, out: Path, model: str) -> None:
        from autospec import models

        imported(
            out,
            model,
            {"question_id": 1, "category": "c", "turns": ["abc", "bcd", "cde"]},
            {"question_id": 2, "category": "c", "turns": ["abd"]},
        )
        target, tokenizer = models.load(model)
        first_run = complete(target, tokenizer, out, max_new_tokens=3)
        next(first_run)
        first_run.close()
        waiting = [each for each in TrafficReader(out) if each.is_pending]
        assert len(waiting) == 2
        rest = list(complete(target, tokenizer, out, max_new_tokens=3))
        assert [each.error for each in rest] == [None] * 3
        found = list(TrafficReader(out))
        assert len(found) == 4
        assert not any(each.is_pending or each.follow_up for each in found)
        turns = [each for each in found if each.conversation == "1"]
        assert [len(each.prompt) for each in turns] == [4, 10, 16]
        for earlier, later in pairwise(turns):
            assert later.prompt[: len(earlier.prompt) - 1] == earlier.prompt[:-1]  # but for the template's last letter
            assert later.prompt[len(earlier.prompt) - 1 :][:3] == earlier.output

    def test_one_that_cannot_be_answered_keeps_none_waiting(
        self, out: Path, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from autospec import models

        imported(out, model, {"prompt": "abc"}, {"prompt": "abcd"})
        target, tokenizer = models.load(model)
        real = target.forward

        def forward(input_ids: torch.Tensor, **options: Any) -> Any:
            if input_ids.shape[1] == 3:
                raise ValueError("too long")
            return real(input_ids, **options)

        monkeypatch.setattr(target, "forward", forward)
        errors = [each.error for each in complete(target, tokenizer, out, max_new_tokens=2)]
        assert errors == ["ValueError: too long", None]
        assert [each.is_pending for each in TrafficReader(out)] == [True, False]

    def test_another_tokenizer(self, out: Path, model: str, tmp_path: Path) -> None:
        imported(out, model, {"prompt": "abc"})
        other = tmp_path / "other-target"
        tiny.tokenizer(order=[1, 0, *range(2, tiny.VOCAB)]).save_pretrained(other)
        tiny.llama(dtype=torch.float32).save_pretrained(other)
        code, _, err = run("traffic", "complete", out, "--model", other)
        assert code == 2
        assert "of tokenizer 'tiny-target'" in err
        assert "not of 'other-target'" in err


@pytest.mark.parametrize("args", [["record"], ["traffic"], ["traffic", "import"], ["traffic", "show"]], ids=" ".join)
def test_help(args: list[str]) -> None:
    code, stdout, _ = run(*args, "--help")
    assert code == 0
    assert stdout.startswith("Usage: autospec " + " ".join(args))
    if args == ["traffic", "import"]:
        assert "AUTOSPEC_TRAFFIC_IMPORT_TOLERATE" in stdout
