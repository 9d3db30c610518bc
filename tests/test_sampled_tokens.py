"""experiments/05_sampled_tokens: what is remembered is what would be computed, and the test can fail."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import autospec
from autospec.drafts import Assistant

EXPERIMENT = "05_sampled_tokens"


@pytest.mark.parametrize("sampling", ["paired", "maximal"])
def test_remembering_changes_no_answer(experiment: Any, sampling: str) -> None:
    model = tiny.llama()
    draft = tiny.near_copy(model)
    memos = [experiment.Memo(model), experiment.Memo(draft)]
    with autospec.wrap(model, drafts=[Assistant(draft)], policy="fixed:assistant:3", sampling=sampling) as speculator:
        answers: dict[bool, list[list[int]]] = {}
        for is_on in (True, False, True):
            for memo in memos:
                memo.is_on, memo.hits, memo.misses = is_on, 0, 0
            torch.manual_seed(0)
            outputs = [
                model.generate(tiny.prompt(), do_sample=True, temperature=0.4, max_new_tokens=8) for _ in range(12)
            ]
            found = [output[0].tolist() for output in outputs]
            assert answers.setdefault(is_on, found) == found
        assert answers[True] == answers[False]
        assert all(memo.hits > 0 and memo.misses == 0 for memo in memos)
        assert speculator.last_request.fallback_reason is None


def test_only_tokens_may_tell_forwards_apart(experiment: Any) -> None:
    model = tiny.llama()
    experiment.Memo(model)
    ids = tiny.prompt()
    with pytest.raises(RuntimeError, match="not told by its tokens alone"):
        model.generate(ids.repeat(2, 1), max_new_tokens=2)
    with pytest.raises(RuntimeError, match="not told by its tokens alone"):
        model.generate(ids, attention_mask=(torch.arange(ids.shape[1]) > 1).long()[None], max_new_tokens=2)


def drawn(probs: list[float], samples: int, seed: int) -> Counter[str]:
    counts = np.random.default_rng(seed).multinomial(samples, probs)
    return Counter({str(index): int(count) for index, count in enumerate(counts)})


def test_the_test_tells_other_distributions_apart_and_not_the_same(experiment: Any) -> None:
    probs = [0.5, 0.3, 0.15, 0.0498, 0.0001, 0.0001]
    same = experiment.two_sample(drawn(probs, 20_000, 0), drawn(probs, 20_000, 1))
    assert same["p_value"] > experiment.LEVEL
    assert same["classes"] == 5  # the last two are rare
    assert same["tv"] < 2 * same["tv_of_random_halves"]
    other = experiment.two_sample(drawn(probs, 20_000, 0), drawn([0.48, 0.32, *probs[2:]], 20_000, 1))
    assert other["p_value"] < experiment.LEVEL
    assert other["tv"] > 2 * other["tv_of_random_halves"]
    assert experiment.two_sample(Counter({"0": 9}), Counter({"0": 5}))["p_value"] == 1.0
