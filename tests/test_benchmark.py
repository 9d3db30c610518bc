"""experiments/23_benchmark: its summary on rows whose answer is known, its choice of prompts, its workers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny
import torch

EXPERIMENT = "23_benchmark"


@pytest.fixture(scope="module")
def bench(experiment: ModuleType) -> Iterator[ModuleType]:
    """The script; its helpers are imported from its folder, under names that others may have, too."""
    yield experiment
    folder = str(experiment.FOLDER)
    sys.path.remove(folder)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(folder) and module is not experiment:
            del sys.modules[name]


def rows(speeds: dict[str, dict[str, float]], prompts: int = 4) -> list[dict[str, Any]]:
    """`speeds`: arm -> segment -> tokens a second; prompts of a segment differ in length only."""
    return [
        {
            "arm": arm,
            "segment": segment,
            "prompt": f"{segment}{i}",
            "seconds": (10 + i) / speed,
            "output_tokens": 10 + i,
        }
        for arm, segments in speeds.items()
        for segment, speed in segments.items()
        for i in range(prompts)
    ]


class TestSummary:
    SPEEDS = {  # noqa: RUF012
        "generate": {"qa": 1.0, "write": 1.0, "code": 1.0},
        "peer, default": {"qa": 1.5, "write": 0.5, "code": 1.0},
        "peer, best": {"qa": 2.0, "write": 0.8, "code": 1.6},
        "other, default": {"qa": 1.0, "write": 0.9, "code": 1.2},
        "auto": {"qa": 1.8, "write": 1.0, "code": 2.0},
    }
    PEERS = {"peer": ("peer, default", "peer, best"), "other": ("other, default", "other, best")}  # noqa: RUF012

    def test_speed_ups_and_bars(self, bench: ModuleType) -> None:
        found = bench.summarise(rows(self.SPEEDS), "generate", ["auto"], self.PEERS)
        for arm, segments in self.SPEEDS.items():
            for segment, speed in segments.items():
                assert found["speed_up"][arm][segment] == pytest.approx([speed] * 3)  # all prompts alike: no interval
        assert found["speed_up"]["auto"]["all"][0] == pytest.approx(3 / (1 / 1.8 + 1 / 1.0 + 1 / 2.0), abs=1e-4)
        low, high = found["speed_up"]["auto"]["all"][1:]
        assert low < found["speed_up"]["auto"]["all"][0] < high  # segments of other speeds, prompts of other lengths
        assert found["best_of_peer"] == {"peer": "peer, best", "other": "other, default"}
        bar = found["bars"]["auto"]
        assert bar["segments"]["qa"] == {"fastest_peer": "peer", "over_it": pytest.approx([0.9] * 3)}
        assert bar["segments"]["write"]["fastest_peer"] == "other"
        assert bar["segments"]["write"]["over_it"] == pytest.approx([1 / 0.9] * 3, abs=1e-4)
        assert bar["segments_won"] == 2
        assert bar["is_met"]

    def test_a_bar_is_missed_on_the_mix_or_in_two_segments(self, bench: ModuleType) -> None:
        slower = {**self.SPEEDS, "auto": {"qa": 1.0, "write": 1.0, "code": 1.7}}
        bar = bench.summarise(rows(slower), "generate", ["auto"], self.PEERS)["bars"]["auto"]
        assert (bar["segments_won"], bar["is_met"]) == (2, False)
        assert bar["least_over_a_peer"] < 1.0
        spiky = {**self.SPEEDS, "auto": {"qa": 9.0, "write": 0.85, "code": 1.5}}
        bar = bench.summarise(rows(spiky), "generate", ["auto"], self.PEERS)["bars"]["auto"]
        assert bar["least_over_a_peer"] > 1.0
        assert (bar["segments_won"], bar["is_met"]) == (1, False)

    def test_an_arm_that_raised_is_named_and_left_out(self, bench: ModuleType) -> None:
        made = rows(self.SPEEDS)
        broken = [row for row in made if row["arm"] != "peer, best" or row["prompt"] != "qa0"]
        broken.append({"arm": "peer, best", "segment": "qa", "prompt": "qa0", "error": "ValueError: no"})
        found = bench.summarise(broken, "generate", ["auto"], self.PEERS)
        assert found["failed"] == {"peer, best": "ValueError: no"}
        assert "peer, best" not in found["speed_up"]
        assert found["best_of_peer"]["peer"] == "peer, default"

    def test_the_best_setting_is_the_fastest_over_all_prompts_that_did_not_raise(self, bench: ModuleType) -> None:
        def tried(setting: str, *seconds: float | None) -> list[dict[str, Any]]:
            done = [{"setting": setting, "seconds": s, "output_tokens": 10} for s in seconds if s is not None]
            return done + [{"setting": setting, "error": "RuntimeError: no"}] * (len(seconds) - len(done))

        found = bench.best_setting(tried("4", 1.0, 5.0) + tried("8", 2.0, 3.0) + tried("16", 0.1, None))
        assert found["best"] == "8"
        assert found["milliseconds_per_token"] == {"4": 300.0, "8": 250.0}
        assert found["failed"] == {"16": "RuntimeError: no"}
        with pytest.raises(ValueError, match="no setting works: RuntimeError: no"):
            bench.best_setting(tried("16", None))

    def test_tables_show_every_arm(self, bench: ModuleType) -> None:
        judged = [{**row, "verdict": "tie"} if row["arm"] == "auto" else row for row in rows(self.SPEEDS)]
        found = bench.summarise(judged, "generate", ["auto"], self.PEERS)
        found["settings"] = {"peer, best": "16"}
        text = bench.tables({"groups": {"bfloat16, greedy": found}, "memory": {"auto": {"held_bytes": 2_500_000}}})
        assert "| peer, best (16) |" in text
        assert "| 1.80 (1.80 to 1.80) |" in text
        assert "| 0 / 12 / 0 |" in text
        mine, theirs = 3 / (1 / 1.8 + 1 / 1.0 + 1 / 2.0), 3 / (1 / 2.0 + 1 / 0.8 + 1 / 1.6)
        assert f"| bfloat16, greedy | auto | peer {mine / theirs:.2f} (" in text
        assert "| auto |  | 2.5 |  |" in text


class TestPrompts:
    @staticmethod
    def of_lengths(bench: ModuleType, *lengths: int) -> list[Any]:
        return [bench.Prompt(str(n), "qa", (0,) * n) for n in lengths]

    def test_lengths_are_spread_over_the_range(self, bench: ModuleType) -> None:
        prompts = self.of_lengths(bench, 20, 64, 70, 80, 90, 360, 2000, 3000)
        measured, learned, others = bench.choose({"qa": prompts}, 3, 3, 2, 64, 2048)
        assert [len(p.tokens) for p in measured] == [64, 360, 2000]
        assert [len(p.tokens) for p in learned] == [70, 80, 90]
        assert [len(p.tokens) for p in others] == [70, 90]

    def test_what_is_nearest_to_the_range_where_too_few_are_in_it(self, bench: ModuleType) -> None:
        prompts = self.of_lengths(bench, 20, 50, 100, 5000)
        measured, *_ = bench.choose({"qa": prompts}, 2, 0, 0, 64, 2048)
        assert [len(p.tokens) for p in measured] == [100, 50]
        described = bench.available({"qa": prompts}, measured)["qa"]
        assert (described["shortest"], described["longest"], described["chosen"]) == (20, 5000, [50, 100])


@pytest.mark.model
def test_the_questions_are_tokenised_under_the_chat_template(bench: ModuleType, tmp_path: Path) -> None:
    segments, asked = ("qa", "rag", "write"), {n: " ".join(["word"] * 20 * n) for n in range(1, 9)}
    lines = [
        json.dumps({"question_id": f"{segment}{n}", "segment": segment, "turns": [text, "Shorter."]})
        for n, text in asked.items()
        for segment in segments
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = bench.AutoTokenizer.from_pretrained(bench.models.resolve(bench.TARGET))
    found = bench.read(tmp_path / "questions.jsonl", tokenizer)
    assert {segment: len(prompts) for segment, prompts in found.items()} == dict.fromkeys(segments, 8)
    first = found["qa"][0]
    assert (first.prompt_id, first.segment) == ("qa1", "qa")
    text = tokenizer.decode(first.tokens)
    assert f"user\n{asked[1]}<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")
    assert "Shorter." not in text
    measured, learned, others = bench.choose(found, 2, 5, 1, 64, 2048)
    assert (len(measured), len(learned), len(others)) == (6, 15, 3)
    assert not {p.prompt_id for p in measured} & {p.prompt_id for p in (*learned, *others)}
    assert all(len(p.tokens) >= 64 for p in measured)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny.llama(dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def client(bench: ModuleType, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    work = tmp_path_factory.mktemp("work")
    with bench.Client(Path(sys.executable), 1, work / "log", is_own=True, costs=work / "costs") as client:
        client.ask("load", folder=str(folder), assistant=str(folder), dtype="float32")
        yield client


class TestWorkers:
    @staticmethod
    def answer(client: Any, name: str) -> dict[str, Any]:
        prompt, options = tiny.prompt(20)[0].tolist(), {"do_sample": False}
        fields = {"prompt": prompt, "segment": "qa", "seed": 0, "options": options, "max_new_tokens": 12}
        found: dict[str, Any] = client.ask("answer", name=name, **fields)
        return found

    def test_the_plain_answer_is_the_models_own(self, client: Any) -> None:
        client.ask("arm", name="generate", kind="generate", settings={})
        found = self.answer(client, "generate")
        plain = tiny.llama(dtype=torch.float32).generate(tiny.prompt(20), max_new_tokens=12, do_sample=False)
        assert found["tokens"] == plain[0, 20:].tolist()
        assert found["seconds"] > 0
        assert (found["target_forwards"], found["draft_forwards"]) == (12, 0)
        assert client.ask("memory")["peak_resident_bytes"] > 50_000_000
        assert client.hello["threads"] == 1

    def test_prompt_lookup_gives_that_answer(self, client: Any) -> None:
        client.ask("arm", name="plain", kind="generate", settings={})
        plain = self.answer(client, "plain")["tokens"]
        lookup = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2}
        client.ask("arm", name="lookup", kind="lookup", settings=lookup)
        assert self.answer(client, "lookup")["tokens"] == plain
        client.ask("drop", names=["plain", "lookup"])

    def test_answers_are_judged(self, client: Any) -> None:
        client.ask("arm", name="judged", kind="generate", settings={})
        plain = self.answer(client, "judged")["tokens"]
        other = [*plain[:5], (plain[5] + 1) % tiny.VOCAB, *plain[6:]]
        prompt = tiny.prompt(20)[0].tolist()
        found = client.ask("judge", prompt=prompt, expected=plain, found=[plain, other, plain[:7]])["verdicts"]
        assert [(v["verdict"], v["position"]) for v in found] == [
            ("identical", None),
            ("different", 5),
            ("different", 7),
        ]

    def test_answers_go_on_past_the_end_where_that_is_wanted(self, client: Any, tmp_path: Path) -> None:
        client.ask("arm", name="plain", kind="generate", settings={})
        plain = self.answer(client, "plain")["tokens"]
        model = tiny.llama(dtype=torch.float32)
        model.generation_config.eos_token_id = plain[2]
        model.save_pretrained(tmp_path)
        client.ask("load", folder=str(tmp_path), assistant=str(tmp_path), dtype="float32")
        for are_ignored, expected in ((True, plain), (False, plain[: plain.index(plain[2]) + 1])):
            client.ask("ends", are_ignored=are_ignored)
            lookup = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2}
            for kind, settings in (("generate", {}), ("lookup", lookup), ("autospec", {"policy": "fixed:ngram:4"})):
                client.ask("arm", name=kind, kind=kind, settings=settings)
                assert self.answer(client, kind)["tokens"] == expected
                client.ask("drop", names=[kind])

    def test_an_exception_is_told_and_the_worker_goes_on(self, bench: ModuleType, client: Any) -> None:
        with pytest.raises(bench.ArmError, match="KeyError: 'nobody'"):
            self.answer(client, "nobody")
        assert client.ask("memory")

    def test_the_end_of_a_worker_is_told(self, bench: ModuleType, tmp_path: Path) -> None:
        client = bench.Client(Path(sys.executable), 1, tmp_path / "log", is_own=True, costs=tmp_path)
        client._process.kill()
        with pytest.raises(bench.ArmError, match="the worker ended with status -9 at 'memory'"):
            client.ask("memory")
        client.close()


def test_what_is_done_is_not_done_again(bench: ModuleType, tmp_path: Path) -> None:
    work = bench.Work(tmp_path / "work.jsonl", {"tokens": 40})
    work.add("measure", arm="generate", prompt="1", seconds=1.0)
    work.add("measure", arm="auto", prompt="1", error="no")
    with work.path.open("a") as file:
        file.write('{"phase": "measure", "arm": "au')  # cut short
    again = bench.Work(tmp_path / "work.jsonl", {"tokens": 40})
    again.add("measure", arm="auto", prompt="2", seconds=2.0)
    third = bench.Work(tmp_path / "work.jsonl", {"tokens": 40})
    assert [(row["arm"], row["prompt"]) for row in third.of("measure")] == [("generate", "1"), ("auto", "2")]
    assert [row["error"] for row in third.errors("measure")] == ["no"]
    with pytest.raises(SystemExit, match="rows with other tokens"):
        bench.Work(tmp_path / "work.jsonl", {"tokens": 41})
