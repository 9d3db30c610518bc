"""experiments/04_spec_bench on 24 short prompts, and how it goes on after an interruption."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from autospec import models
from autospec.data import DemoPrompt, load_prompts
from autospec.errors import ConfigurationError
from autospec.types import NONE, OFF, BlockContext, RequestContext
from autospec.verify import PlainAnswer

EXPERIMENT = "04_spec_bench"
PROMPTS_PER_SEGMENT = 4
NEW_TOKENS = 8


def short_prompts() -> list[DemoPrompt]:
    """The shortest of each segment of the demonstration."""
    segments: dict[str, list[DemoPrompt]] = defaultdict(list)
    for prompt in sorted(load_prompts(), key=lambda p: sum(len(m["content"]) for m in p.messages)):
        segments[prompt.segment].append(prompt)
    return [prompt for segment in segments.values() for prompt in segment[:PROMPTS_PER_SEGMENT]]


@pytest.mark.model
def test_no_answer_differs_however_blocks_are_switched(experiment: ModuleType) -> None:
    # bfloat16, where ties are common, unless this machine takes minutes for it
    model, tokenizer = models.load("smollm2-135m", dtype=models.faster_dtype())
    sources = experiment.make_drafts(model, tokenizer, 25)
    prompts = short_prompts()
    assert len(prompts) == 24
    rows: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts):
        plain = PlainAnswer(model, tokenizer, prompt, max_new_tokens=NEW_TOKENS)
        rows += [experiment.judge(plain, sources, prompt, arm, number) for arm in experiment.ARMS]
    faults = [row for row in rows if row["kind"] == "different" or row["notes"]]
    assert not faults
    for arm in experiment.ARMS:
        totals: Counter[str] = Counter()
        for row in (row for row in rows if row["arm"] == arm):
            totals.update(judged=row["judged"], accepted=row["accepted"], identical=row["kind"] == "identical")
        assert 0 < totals["accepted"] < totals["judged"], arm
        assert totals["identical"] > len(prompts) / 2, arm


def some_row(arm: str, kind: str = "identical") -> dict[str, Any]:
    counts = {"output_tokens": 5, "blocks": 3, "judged": 4, "accepted": 2}
    row = {
        "dtype": "float32",
        "device": "cpu",
        "prompt": "81",
        "segment": "qa",
        "arm": arm,
        "kind": kind,
        "notes": None,
    }
    return {**row, **counts, **({"position": 1, "logit_gap": 0.0, "tolerance": 0.1} if kind == "tie" else {})}


def test_an_interrupted_run_goes_on(experiment: ModuleType, tmp_path: Path) -> None:
    work, settings = tmp_path / "work.jsonl", {"seed": 0}
    assert experiment.read_rows(work, settings) == []
    experiment.add_row(work, settings, some_row("ngram"))
    with work.open("a") as file:
        file.write('{"dtype": "float32", "arm": "assi')  # cut short
    experiment.add_row(work, settings, some_row("mixed", "tie"))
    rows = experiment.read_rows(work, settings)
    assert rows == [some_row("ngram"), some_row("mixed", "tie")]
    with pytest.raises(ConfigurationError, match="other settings"):
        experiment.read_rows(work, {"seed": 1})
    results = experiment.summary(rows)
    assert [row["segment"] for row in results["counts"]] == ["qa", "qa", "all", "all"]
    assert results["counts"][1] | {"tie": 1, "accepted": 2, "judged": 4} == results["counts"][1]
    assert [row["arm"] for row in results["differences"]] == ["mixed"]


def test_questions_are_read_or_refused_in_one_line(experiment: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    with pytest.raises(ConfigurationError, match=r"No such file or directory; pass the Spec-Bench questions"):
        experiment.read_spec_bench(path)
    path.write_text(json.dumps({"question_id": 81, "segment": "qa", "turns": ["One?", "Two?"]}) + "\n")
    (prompt,) = experiment.read_spec_bench(path)
    assert (prompt.prompt_id, prompt.segment, prompt.messages[0]["content"]) == ("81", "qa", "One?")
    path.write_text('{"question_id": 81}\n')
    with pytest.raises(ConfigurationError, match="not Spec-Bench questions"):
        experiment.read_spec_bench(path)


def test_actions_are_random_and_follow_the_seed(experiment: ModuleType) -> None:
    request = RequestContext("qa", 3, 9, False, ("ngram", "assistant"))
    context = BlockContext(request, 3, 0, ("ngram",))

    def chosen(seed: str) -> list[str]:
        policy = experiment.RandomActions(experiment.ARMS["mixed"], seed)
        return [policy.choose(context).label for _ in range(200)]

    assert chosen("a") == chosen("a") != chosen("b")
    assert set(chosen("a")) == {OFF.label, *(f"ngram:{k}" for k in range(1, 9))}  # the assistant is not usable
    assert OFF.source == NONE
