"""Logs that people have: every format, what is ignored, what is broken, and that nothing is half done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from autospec.errors import AutospecError, ConfigurationError
from autospec.traffic import FollowUp, TrafficReader, TrafficRequest
from autospec.traffic.importers import (
    IMPORTERS,
    BrokenEntryError,
    ImportedRequest,
    Importer,
    detect,
    importer_named,
)
from autospec.traffic.importing import import_file
from autospec.types import PhaseSeconds
from tests import tiny
from tests.tiny_tokenizers import byte_level

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
QUESTION = [{"role": "user", "content": "Why?"}]
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "Because."}, "finish_reason": "stop"}
COUNTS = {"acceptance_histogram": [39, 1, 0, 3], "num_draft_tokens": 129, "mean_acceptance_length": 1.23}
TIMES = {"time_to_first_token_ms": 85.0, "generation_time_ms": 1240.0, "queue_time_ms": 12.0}

EXAMPLES: dict[str, dict[str, Any]] = {
    "openai": {"messages": QUESTION, "choices": [CHOICE], "created": 1769860800, "model": "m"},
    "sharegpt": {
        "id": "s1",
        "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}],
    },
    "plain": {"prompt": "Why?", "completion": "Because."},
    "spec_bench": {"question_id": 81, "category": "writing", "turns": ["Why?", "Shorter."]},
    "vllm": {"messages": QUESTION, "choices": [CHOICE], "metrics": {"speculative_decoding": COUNTS, **TIMES}},
}
BROKEN: dict[str, list[dict[str, Any]]] = {
    "openai": [
        {"messages": []},
        {"messages": "Why?"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": QUESTION, "choices": []},
        {"messages": QUESTION, "choices": [{"message": {"content": None, "tool_calls": [{}]}}]},
        {"messages": [{"role": "assistant", "content": "Because."}]},
    ],
    "sharegpt": [
        {"conversations": []},
        {"conversations": [{"from": "robot", "value": "a"}]},
        {"conversations": [{"from": "gpt", "value": "alone"}]},
        {"conversations": [{"from": "human"}]},
    ],
    "plain": [{"prompt": ""}, {"prompt": 3}, {"prompt": "a", "completion": 3}],
    "spec_bench": [{"turns": []}, {"turns": ["a", ""]}, {"turns": "a"}],
    "vllm": [
        {"metrics": {"speculative_decoding": COUNTS}},
        {"messages": QUESTION, "choices": [CHOICE, CHOICE], "metrics": {"speculative_decoding": COUNTS}},
        {"messages": QUESTION, "metrics": {"speculative_decoding": {"acceptance_histogram": [-1]}}},
    ],
}


def tokenizer() -> Any:
    found = byte_level()
    found.chat_template = CHAT
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "traffic"


def file_of(folder: Path, *entries: Any, name: str = "log.jsonl") -> Path:
    path = folder.parent / name
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries), encoding="utf-8")
    return path


def imported(folder: Path, *entries: Any, **options: Any) -> list[TrafficRequest]:
    import_file(file_of(folder, *entries), folder, tokenizer(), **options)
    return list(TrafficReader(folder))


def text(ids: tuple[int, ...]) -> str:
    return str(tokenizer().decode(ids))


@pytest.mark.parametrize("importer", IMPORTERS, ids=lambda each: each.name)
class TestEveryImporter:
    """The contract."""

    def test_its_example_is_recognised_and_read(self, importer: Importer) -> None:
        entry = EXAMPLES[importer.name]
        assert detect([entry]).name == importer.name
        (found,) = importer.read(entry)
        assert isinstance(found, ImportedRequest)
        assert found.messages or found.prompt
        assert (found.completion == "Because.") is (importer.name != "spec_bench")

    def test_unknown_fields_are_ignored(self, importer: Importer) -> None:
        entry = EXAMPLES[importer.name]
        more = {**entry, "mood": {"good": [1, None]}, "usage": 3, "request_ip": "x"}
        assert importer.read(more) == importer.read(entry)
        assert detect([more]).name == importer.name

    def test_what_is_broken_says_why(self, importer: Importer) -> None:
        for entry in BROKEN[importer.name]:
            with pytest.raises(BrokenEntryError) as caught:
                importer.read(entry)
            assert 10 < len(str(caught.value)) < 200

    def test_nothing_else_is_raised_whatever_a_field_holds(self, importer: Importer) -> None:
        for entry in mutants(EXAMPLES[importer.name]):
            importer.matches(entry)
            with suppress(BrokenEntryError):
                importer.read(entry)

    def test_a_segment_is_taken(self, importer: Importer) -> None:
        assert importer.read({**EXAMPLES[importer.name], "segment": "mine"})[0].segment == "mine"


def mutants(value: Any) -> Iterator[Any]:
    """The value with each part of it replaced by something else."""
    for other in (None, 3, -1.5, "text", [], {}, [[]], [{}], True):
        yield from ([] if isinstance(value, dict) and not isinstance(other, dict) else [other])
    if isinstance(value, dict):
        for key, part in value.items():
            yield {each: value[each] for each in value if each != key}
            yield from ({**value, key: changed} for changed in mutants_of_part(part))


def mutants_of_part(value: Any) -> Iterator[Any]:
    yield from (None, 3, -1.5, float("nan"), "text", "", [], {}, [[]], [{}], [None], True)
    if isinstance(value, dict):
        for key, part in value.items():
            yield {each: value[each] for each in value if each != key}
            yield from ({**value, key: changed} for changed in mutants_of_part(part))
    if isinstance(value, list):
        for index, part in enumerate(value):
            yield from ([*value[:index], changed, *value[index + 1 :]] for changed in mutants_of_part(part))


class TestOpenAI:
    def test_template_eos_time_and_options(self, folder: Path) -> None:
        entry = {**EXAMPLES["openai"], "temperature": 0.7, "top_p": 0.9, "max_tokens": 50, "conversation_id": "c7"}
        cut = {**entry, "choices": [{**CHOICE, "finish_reason": "length"}], "temperature": 0}
        first, second = imported(folder, entry, cut)
        assert text(first.prompt) == "<user>Why?<a>"
        assert text(first.output) == "Because.<|end|>"
        assert text(second.output) == "Because."
        assert first.started_at == datetime(2026, 1, 31, 12, tzinfo=UTC)
        assert first.options == {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 50}
        assert second.options == {"do_sample": False, "top_p": 0.9, "max_new_tokens": 50}
        assert (first.conversation, first.origin, first.is_arrival_known) == ("c7", "import:openai", True)

    def test_request_and_response_apart(self, folder: Path) -> None:
        apart = {
            "custom_id": "7",
            "request": {"body": {"messages": QUESTION, "temperature": 0}},
            "response": {"status_code": 200, "body": {"choices": [CHOICE], "created": 1769860800}},
        }
        (found,) = imported(folder, apart)
        assert (text(found.prompt), text(found.output)) == ("<user>Why?<a>", "Because.<|end|>")
        assert found.options == {"do_sample": False}

    def test_without_choices_several_and_parts(self, folder: Path) -> None:
        answered = [*QUESTION, {"role": "assistant", "content": "Because."}]
        parts = [{"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]}]
        found = imported(
            folder, {"messages": answered}, {"messages": parts}, {"messages": QUESTION, "choices": [CHOICE, CHOICE]}
        )
        assert [text(each.prompt) for each in found] == ["<user>Why?<a>"] * 4
        assert [text(each.output) for each in found] == ["Because.", "", "Because.<|end|>", "Because.<|end|>"]
        assert [each.is_pending for each in found] == [False, True, False, False]
        assert not found[0].is_arrival_known
        assert [each.started_at for each in found] == sorted(each.started_at for each in found)

    def test_text_completions(self, folder: Path) -> None:
        (found,) = imported(folder, {"prompt": "Why?", "choices": [{"text": " Because.", "finish_reason": "stop"}]})
        assert (text(found.prompt), text(found.output)) == ("Why?", " Because.<|end|>")
        assert found.origin == "import:openai"


class TestOtherFormats:
    def test_sharegpt_every_answer_is_a_request(self, folder: Path) -> None:
        turns = [("system", "Be."), ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"), ("human", "e")]
        first, second, third = imported(
            folder, {"id": "s", "conversations": [{"from": who, "value": said} for who, said in turns]}
        )
        assert text(first.prompt) == "<system>Be.<user>a<a>"
        assert text(second.prompt) == "<system>Be.<user>a<assistant>b<user>c<a>"
        assert [text(each.output) for each in (first, second, third)] == ["b", "d", ""]
        assert {each.conversation for each in (first, second, third)} == {"s"}

    def test_one_json_array(self, folder: Path) -> None:
        file = folder.parent / "all.json"
        file.write_text("\n" + json.dumps([EXAMPLES["sharegpt"], EXAMPLES["sharegpt"], 3], indent=1), encoding="utf-8")
        done = import_file(file, folder, tokenizer(), tolerate=0.5)
        assert (done.format, done.entries, done.requests) == ("sharegpt", 3, 2)
        assert [(each.number, each.reason) for each in done.broken] == [(3, "not an object")]
        file.write_text("[{]")
        with pytest.raises(ConfigurationError, match=r"all\.json: not JSON"):
            import_file(file, folder, tokenizer())

    def test_plain_goes_to_the_model_as_it_is(self, folder: Path) -> None:
        first, second = imported(folder, EXAMPLES["plain"], {"prompt": "And?"}, segment="s")
        assert (text(first.prompt), text(first.output)) == ("Why?", "Because.")
        assert (text(second.prompt), second.is_pending) == ("And?", True)
        assert first.segment == "s"

    def test_spec_bench_keeps_later_turns(self, folder: Path) -> None:
        (found,) = imported(folder, EXAMPLES["spec_bench"])
        assert found.is_pending
        assert (found.segment, found.conversation) == ("writing", "81")
        assert found.follow_up == FollowUp(({"role": "user", "content": "Why?"},), ("Shorter.",))

    def test_vllm_counts_and_times(self, folder: Path) -> None:
        (found,) = imported(folder, EXAMPLES["vllm"])
        assert found.acceptance_lengths == {1: 39, 2: 1, 4: 3}
        assert found.num_draft_tokens == 129
        assert found.seconds == PhaseSeconds(prefill=0.085, other=1.24)
        assert found.total_seconds == pytest.approx(1.325)
        assert text(found.output) == "Because.<|end|>"

    def test_vllm_token_ids_go_before_text(self, folder: Path) -> None:
        answer = tokenizer()("Because.")["input_ids"]
        entry = {
            **EXAMPLES["vllm"],
            "prompt_token_ids": [5, 6, 7],
            "choices": [{**CHOICE, "token_ids": [*answer, 0]}],
        }
        (found,) = imported(folder, entry)
        assert (found.prompt, found.output) == ((5, 6, 7), (*answer, 0))

    def test_vllm_chat_with_token_ids_and_nothing_beside_it(self, folder: Path) -> None:
        """`return_token_ids`, as a batch file has it: the response alone tells what was asked."""
        answer = [*tokenizer()("Because.")["input_ids"], 0]
        body = {
            "id": "chatcmpl-8f2",
            "object": "chat.completion",
            "created": 1769860800,
            "model": "m",
            "choices": [{**CHOICE, "logprobs": None, "stop_reason": None, "token_ids": answer}],
            "usage": {"prompt_tokens": 3, "completion_tokens": len(answer), "total_tokens": 3 + len(answer)},
            "prompt_token_ids": [5, 6, 7],
            "metrics": None,
        }
        line = {"id": "vllm-1", "custom_id": "7", "response": {"status_code": 200, "body": body}, "error": None}
        (found,) = imported(folder, line)
        assert (found.prompt, found.output, found.origin) == ((5, 6, 7), tuple(answer), "import:vllm")
        assert found.started_at == datetime(2026, 1, 31, 12, tzinfo=UTC)
        assert found.seconds is None
        assert found.acceptance_lengths == {}

    def test_vllm_completions_have_the_prompt_in_each_choice(self, folder: Path) -> None:
        because, why = (tokenizer()(each)["input_ids"] for each in ("Because.", "Why?"))
        choice = {"index": 0, "text": "Because.", "finish_reason": "length", "stop_reason": None, "token_ids": because}
        first, second = imported(
            folder,
            {
                "request": {"prompt": ["x", "y"], "temperature": 0.5, "return_token_ids": True},
                "response": {
                    "object": "text_completion",
                    "choices": [{**choice, "prompt_token_ids": [5, 6]}, {**choice, "prompt_token_ids": [7]}],
                },
            },
        )
        assert (first.prompt, second.prompt) == ((5, 6), (7,))
        assert first.output == second.output == tuple(because)
        assert first.options == {"do_sample": True, "temperature": 0.5}
        without = {**choice, "token_ids": None, "finish_reason": "stop"}
        for prompt in (why, [why], "Why?", ["Why?"]):
            (found,) = imported(folder.parent / "t", {"prompt": prompt, "choices": [without]})
            assert (text(found.prompt), text(found.output)) == ("Why?", "Because.<|end|>")
            shutil.rmtree(folder.parent / "t")
        with pytest.raises(ConfigurationError, match="whose answer is which is not said"):
            imported(folder, {"prompt": ["Why?", "And?"], "choices": [without, without]})

    @pytest.mark.parametrize(
        ("stop_reason", "spelled"), [(None, "Because.<|end|>"), ("\n", "Because."), (7, "Because.")]
    )
    def test_vllm_eos_is_told_from_other_stops(self, folder: Path, stop_reason: object, spelled: str) -> None:
        entry = {"messages": QUESTION, "choices": [{**CHOICE, "stop_reason": stop_reason, "token_ids": None}]}
        (found,) = imported(folder, entry)
        assert text(found.output) == spelled

    @pytest.mark.parametrize("change", [{"stop_reason": "!"}, {"message": {**CHOICE["message"], "reasoning": "Hm. "}}])
    def test_vllm_ids_say_more_than_the_text(self, folder: Path, change: dict[str, Any]) -> None:
        """The stop string is cut off the text, reasoning stands apart from it; the ids hold both."""
        ids = tokenizer()("Hm. Because.!")["input_ids"]
        (found,) = imported(folder, {"messages": QUESTION, "choices": [{**CHOICE, "token_ids": ids, **change}]})
        assert found.output == tuple(ids)

    def test_vllm_reasoning_without_ids_is_no_answer(self, folder: Path) -> None:
        message = {**CHOICE["message"], "reasoning": "Hm."}
        entry = {"messages": QUESTION, "choices": [{**CHOICE, "message": message, "stop_reason": None}]}
        with pytest.raises(ConfigurationError, match="reasoning apart from its text, token_ids are needed"):
            imported(folder, entry)

    def test_vllm_times_alone(self, folder: Path) -> None:
        entry = {"messages": QUESTION, "choices": [CHOICE]}
        times = {**TIMES, "mean_itl_ms": 9.1, "tokens_per_second": 103.2}
        timed, untimed = imported(folder, {**entry, "metrics": times}, {**entry, "metrics": dict.fromkeys(times)})
        assert timed.origin == untimed.origin == "import:vllm"
        assert (timed.seconds, untimed.seconds) == (PhaseSeconds(prefill=0.085, other=1.24), None)

    def test_vllm_request_outputs(self, folder: Path) -> None:
        """The attributes of what `LLM.generate` returns, dumped as JSON."""
        ids = [*tokenizer()("Because.")["input_ids"], 0]
        output = {"index": 0, "text": "Because.", "token_ids": ids, "finish_reason": "stop", "stop_reason": None}
        counts = {"spec_decode_metrics": {**COUNTS, "num_spec_steps": 43, "num_spec_tokens": 3}}
        metrics = {
            "num_generation_tokens": len(ids),
            "arrival_time": 1769860800.0,
            "queued_ts": 99.0,
            "scheduled_ts": 100.0,
            "first_token_ts": 100.25,
            "last_token_ts": 101.75,
        }
        entry = {"request_id": "0", "prompt": "Why?", "prompt_token_ids": [5, 6], "finished": True, "metrics": metrics}
        found, *both = imported(
            folder, {**entry, "outputs": [{**output, **counts}]}, {**entry, "outputs": [output, {**output, "index": 1}]}
        )
        assert (found.prompt, found.output) == ((5, 6), tuple(ids))
        assert found.started_at == datetime(2026, 1, 31, 12, tzinfo=UTC)
        assert found.seconds == PhaseSeconds(prefill=0.25, other=1.5)
        assert found.acceptance_lengths == {1: 39, 2: 1, 4: 3}
        assert found.num_draft_tokens == 129
        assert [(each.prompt, each.output, each.seconds) for each in both] == [((5, 6), tuple(ids), None)] * 2
        (found,) = imported(folder.parent / "t", {"prompt": "Why?", "outputs": [output]})
        assert text(found.prompt) == "Why?"
        with pytest.raises(ConfigurationError, match="outputs without a prompt"):
            imported(folder, {"outputs": [output]})

    def test_vllm_shapes_raise_nothing_else_whatever_a_field_holds(self) -> None:
        choice = {"text": "a", "token_ids": [5], "prompt_token_ids": [6], "stop_reason": None, "finish_reason": "stop"}
        offline = {"prompt": "Why?", "prompt_token_ids": [5], "metrics": {"arrival_time": 1.0, "scheduled_ts": 1.0}}
        for shape in ({"prompt": [5, 6], "choices": [choice]}, {**offline, "outputs": [choice]}):
            for entry in mutants(shape):
                importer = importer_named("vllm")
                importer.matches(entry)
                with suppress(BrokenEntryError):
                    importer.read(entry)

    def test_vllm_benchmarks_hold_no_prompt(self, folder: Path) -> None:
        result = {
            "date": "20260131-120000",
            "backend": "vllm",
            "num_prompts": 2,
            "input_lens": [3, 4],
            "output_lens": [2, 2],
            "ttfts": [0.1, 0.1],
            "itls": [[0.02], [0.02]],
            "generated_texts": ["a", "b"],
            "errors": ["", ""],
        }
        with pytest.raises(ConfigurationError, match="has answers and times, but no prompts to replay"):
            imported(folder, result)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"choices": [{**CHOICE, "token_ids": [5, 6]}]}, "do not spell its text: they are of another tokenizer"),
            ({"prompt_token_ids": [99999]}, r"prompt_token_ids has 99999, the tokenizer has ids 0 to \d+"),
        ],
    )
    def test_token_ids_of_another_tokenizer(self, folder: Path, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            imported(folder, {**EXAMPLES["vllm"], **change})

    def test_counts_without_tokens_say_what_is_missing(self, folder: Path) -> None:
        with pytest.raises(ConfigurationError, match="no messages, prompt or prompt_token_ids: nothing of it can be"):
            imported(folder, {"id": "cmpl-1", "choices": [CHOICE], "metrics": {"speculative_decoding": COUNTS}})


class TestBroken:
    def test_a_tolerated_share_is_counted_and_shown_by_line(self, folder: Path) -> None:
        good = [EXAMPLES["plain"]] * 30
        file = file_of(folder, *good[:10], "{", "", *good[:10], {"prompt": ""}, *good[:10])
        done = import_file(file, folder, tokenizer(), tolerate=0.1)
        assert (done.entries, done.requests, done.num_broken) == (32, 30, 2)
        assert [each.number for each in done.broken] == [11, 23]
        assert done.broken[0].reason.startswith("not JSON")
        assert len(list(TrafficReader(folder))) == 30

    @pytest.mark.parametrize("is_there", [False, True])
    def test_more_is_refused_and_nothing_written(self, folder: Path, is_there: bool) -> None:
        if is_there:
            imported(folder, EXAMPLES["plain"])
        before = sorted(folder.glob("*")) if is_there else []
        lines = [EXAMPLES["plain"]] * 50 + ["{"] * 12
        with pytest.raises(ConfigurationError, match=r"12 of 62 lines are broken.*0\.01.*nothing is written") as caught:
            import_file(file_of(folder, *lines), folder, tokenizer())
        assert str(caught.value).count("; line ") == 10
        assert "line 51: not JSON" in str(caught.value)
        assert str(caught.value).endswith("and 2 more")
        assert folder.exists() is is_there
        assert sorted(folder.glob("*")) == before

    def test_bytes_and_half_an_emoji(self, folder: Path) -> None:
        file = folder.parent / "log.jsonl"
        good = json.dumps(EXAMPLES["plain"]).encode()
        half = rb'{"prompt": "\ud83d"}'
        file.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([good, b'{"prompt": "caf\xe9"}', half, good]))
        done = import_file(file, folder, tokenizer(), tolerate=0.5)
        assert [each.number for each in done.broken] == [2, 3]
        assert done.broken[0].reason == "byte 0xe9 is not UTF-8"
        assert done.requests == 2

    @pytest.mark.parametrize(
        ("content", "message"),
        [("", "not recognised"), ("\n \n", "not recognised"), ('{"a": 1, "b": 2}', "have a, b;")],
    )
    def test_no_known_format(self, folder: Path, content: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            import_file(file_of(folder, content), folder, tokenizer())
        assert not folder.exists()

    def test_a_file_that_is_not_there_and_an_unknown_format(self, folder: Path) -> None:
        with pytest.raises(ConfigurationError, match="No such file"):
            import_file(folder / "nowhere.jsonl", folder, tokenizer())
        with pytest.raises(ConfigurationError, match="format 'xml': known are auto, vllm"):
            import_file(file_of(folder, "{}"), folder, tokenizer(), format="xml")

    def test_messages_need_a_chat_template(self, folder: Path) -> None:
        with pytest.raises(ConfigurationError, match="no chat template"):
            import_file(file_of(folder, EXAMPLES["openai"]), folder, tiny.tokenizer())
        assert not folder.exists()

    def test_a_template_that_refuses_breaks_its_line_alone(self, folder: Path) -> None:
        strict = byte_level(321)
        strict.chat_template = "{% if messages[0]['content'] == 'no' %}{{ raise_exception('never') }}{% endif %}" + CHAT
        bad = {"messages": [{"role": "user", "content": "no"}]}
        done = import_file(file_of(folder, EXAMPLES["openai"], bad), folder, strict, tolerate=0.5)
        assert done.requests == 1
        assert "the chat template does not take it" in done.broken[0].reason

    def test_another_tokenizer_is_refused(self, folder: Path) -> None:
        imported(folder, EXAMPLES["plain"])
        before = sorted(folder.iterdir())
        with pytest.raises(ConfigurationError, match="holds traffic of tokenizer"):
            import_file(file_of(folder, EXAMPLES["plain"]), folder, tiny.tokenizer())
        assert sorted(folder.iterdir()) == before

    def test_the_bound(self, folder: Path) -> None:
        with pytest.raises(AutospecError, match="reached its bound"):
            import_file(file_of(folder, *[EXAMPLES["plain"]] * 20), folder, tokenizer(), max_bytes=1000)
        assert not folder.exists()

    def test_the_same_file_again_changes_nothing(self, folder: Path) -> None:
        first = imported(folder, *[EXAMPLES["plain"]] * 3)
        second = imported(folder, *[EXAMPLES["plain"]] * 3)
        assert [each.request_id for each in first] == [each.request_id for each in second]
        assert len({each.request_id for each in first}) == 3
