"""The assistant that comes with autospec, and the script that made it."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file

import autospec
from autospec import models
from autospec.drafts import Assistant
from autospec.errors import DraftError

EXPERIMENT = "08_small_assistant"


@pytest.fixture
def small(experiment: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script at a size of seconds, on a target of 64 tokens."""
    for name, value in {
        "ROWS": 4,
        "NEW_TOKENS": 40,
        "SAMPLED_FROM": 20,
        "KEPT": 8,
        "VOCABULARY": 40,
        "SEQUENCE": 16,
        "BATCH": 2,
        "HELD_OUT": 1,
        "LAYOUT": {**experiment.LAYOUT, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8},
    }.items():
        monkeypatch.setattr(experiment, name, value)
    return experiment


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama(dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = tiny.tokenizer()
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


@pytest.fixture
def texts(small: Any, target: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[Any]:
    monkeypatch.setattr(small, "STARTERS", ("ab", "c"))
    monkeypatch.setattr(small.models, "load", lambda *_, **__: (target, tokenizer))
    return small.written(tmp_path, 3)


def test_text_is_drawn_from_what_the_target_thinks(small: Any, target: Any, texts: list[Any]) -> None:
    assert len(texts) == 12
    for text in texts:
        with torch.no_grad():
            logprobs = target(text.tokens[None]).logits[0].log_softmax(-1)
        asked = text.top_logprobs[:, 0].isfinite()
        assert int(asked.sum()) == 40
        assert not asked[-1]
        for position in asked.nonzero().flatten().tolist():
            expected = logprobs[position].topk(8)
            assert torch.equal(text.top_ids[position], expected.indices)
            torch.testing.assert_close(text.top_logprobs[position], expected.values, atol=0.02, rtol=0.01)


def test_written_text_is_not_written_again(small: Any, texts: list[Any], tmp_path: Any) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = small.written(tmp_path, 3)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(texts, again, strict=True))


def test_lessons_hold_the_targets_distribution_over_the_own_tokens(small: Any, texts: list[Any]) -> None:
    ids = small.frequent_ids(texts, 0, [1])
    assert len(ids) == 40
    assert {0, 1} <= set(ids)
    found = small.lessons(texts, ids, 0, seed=3)
    sums = found.probs.sum(-1)
    is_taught = sums > 0
    torch.testing.assert_close(sums[is_taught], torch.ones(int(is_taught.sum())))
    tokens = torch.tensor(ids)[found.inputs]
    whole = torch.cat([texts[i].tokens for i in torch.randperm(12, generator=torch.Generator().manual_seed(3))])
    same = tokens.flatten() == whole[: tokens.numel()]
    assert bool((same | ~torch.isin(whole[: tokens.numel()], torch.tensor(ids))).all())


def test_it_learns(small: Any, target: Any, tokenizer: Any, texts: list[Any]) -> None:
    ids = small.frequent_ids(texts, 0, [1])
    target.config.eos_token_id = ids[0]
    try:
        assistant = small.new_assistant(target, tokenizer, ids, 0)
    finally:
        target.config.eos_token_id = None
    held_out = small.lessons(texts[-4:], ids, assistant.config.unknown_id, 0)
    before, _ = small.judged(assistant, held_out)
    curve = small.taught(assistant, texts[:-4], held_out, steps=30)
    assert curve[-1]["held_out_loss"] < before - 0.3
    # and it drafts for the target it was made for
    assistant.eval()
    with autospec.wrap(target, tokenizer=tokenizer, drafts=[Assistant(assistant)], policy="fixed:assistant:3") as s:
        plain = tiny.prompt(20)
        target.generate(plain, max_new_tokens=20, do_sample=False)
        assert s.last_request is not None
        assert s.last_request.notes is None
        assert s.last_request.num_judged_tokens > 0


@pytest.mark.model
class TestPackaged:
    """The weights that were committed."""

    def test_small_enough_and_half_precision(self) -> None:
        (folder,) = {models.resolve(name) for name in models.PACKAGED}
        import pathlib

        files = list(pathlib.Path(folder).iterdir())
        assert {path.name for path in files} == {"config.json", "model.safetensors"}
        assert sum(path.stat().st_size for path in files) <= 12_000_000
        weights = load_file(pathlib.Path(folder) / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {torch.float16}

    @pytest.mark.parametrize("do_sample", [False, True])
    def test_it_drafts_for_the_demonstration_model(self, do_sample: bool) -> None:
        model, tokenizer = models.load("smollm2-135m", dtype="float32")
        assistant = Assistant(models.load_model("smollm2-135m-assistant", dtype="float32"))
        messages = [{"role": "user", "content": "What is the capital of France, and what is it known for?"}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        options = {"max_new_tokens": 24, "do_sample": do_sample, "temperature": 0.8} if do_sample else {}
        options = {"max_new_tokens": 24, "do_sample": do_sample, **options}
        torch.manual_seed(0)
        plain = model.generate(**inputs, **options)
        with autospec.wrap(model, tokenizer=tokenizer, drafts=[assistant], policy="fixed:assistant:3") as speculator:
            torch.manual_seed(0)
            assert torch.equal(model.generate(**inputs, **options), plain)
            assert speculator.last_request is not None
            assert speculator.last_request.num_accepted_tokens > 0

    def test_another_tokenizer_is_refused(self) -> None:
        assistant = Assistant(models.load_model("smollm2-135m-assistant", dtype="float32"))
        with pytest.raises(DraftError, match="was made for"):
            autospec.wrap(tiny.llama(vocab_size=60_000), tokenizer=tiny.tokenizer(), drafts=[assistant], policy="off")
