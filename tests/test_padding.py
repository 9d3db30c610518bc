"""Blocks that are padded to a cheaper width: the same text, the same counts, the same cache; plain steps never are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_heads
import torch
from test_certify import a_case, violates
from test_decoder import Alternating, Counting, LastTokensEqual, Oracle, Seen
from test_families import FAMILIES, make
from test_probe import LONGROPE
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList

import autospec
from autospec.caches import CACHE_KEYWORD, find_cache
from autospec.certify import Case, certify, quick_cases
from autospec.controller import Controller
from autospec.costs import CostModel, CostTable, Curve
from autospec.costs.upkeep import _Watched
from autospec.decoding.target import TargetSession
from autospec.decoding.verification import Verification
from autospec.drafts import Assistant, Heads, NGram, Proposal
from autospec.policies import Fixed, Goodput, Guard
from autospec.policies.prices import Prices
from autospec.policies.tuned import Tuned
from autospec.types import OFF, Action, BlockOutcome

WIDTH = 9

CASES = list(quick_cases())

WIDTHS = (1, 2, 3, 5, 9, 17)
TABLE = CostTable(
    (1, 2, 4, 8, 16),
    Curve((64, 1024), WIDTHS, ((0.056, 0.092, 0.090, 0.086, 0.060, 0.095), (0.08, 0.12, 0.12, 0.11, 0.1, 0.105))),
    {"oracle": Curve((64,), (1, 16), ((1e-5, 2e-5),))},
)
"""A device on which 9 tokens cost less than 2 to 5."""


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block that has room is verified in a forward over at least `WIDTH` tokens."""
    monkeypatch.setattr(Controller, "verify_width", lambda self, num_tokens, context_tokens: max(num_tokens, WIDTH))


@contextmanager
def forwards(model: Any) -> Iterator[list[tuple[int, int]]]:
    """Tokens that the cache held before each forward of the model, and tokens that were run in it."""
    seen: list[tuple[int, int]] = []

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = find_cache(kwargs)
        seen.append((0 if cache is None else cache.get_seq_length(), kwargs["input_ids"].shape[1]))

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


COUNTS = (
    "num_draft_tokens",
    "num_judged_tokens",
    "num_accepted_tokens",
    "acceptance_lengths",
    "at_risk",
    "accepted",
    "actions",
    "blocks",
    "output_tokens",
)


def counts(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in COUNTS}


def padded(
    model: Any,
    ids: torch.Tensor,
    drafts: Callable[[], list[Any]],
    policy: Any,
    *,
    seed: int = 0,
    sampling: str = "paired",
    is_plain: bool = True,
    **kwargs: Any,
) -> tuple[torch.Tensor, list[int]]:
    """Text and record with padding are those without, and where it can be asked for the text is `generate`'s.

    Args:
        model: the target.
        ids: [1, n], the prompt.
        drafts: makes the draft sources.
        policy: a policy's name, or makes one.
        seed: of torch's generator.
        sampling: as `wrap` takes it.
        is_plain: the text is to be plain decoding's, too.
        kwargs: of `generate`.

    Returns:
        The text, [1, n + answer], and the widths of the forwards after prefill.
    """

    def decode() -> tuple[torch.Tensor, Any, list[int]]:
        made = policy if isinstance(policy, str) else policy()
        with autospec.wrap(model, drafts=drafts(), policy=made, sampling=sampling) as speculator:
            torch.manual_seed(seed)
            with forwards(model) as seen:
                found: torch.Tensor = model.generate(ids, **copy.deepcopy(kwargs))
            record = speculator.last_request
        assert record is not None
        assert record.fallback_reason is None, record.fallback_reason
        assert record.notes is None, record.notes
        return found, record, [width for _, width in seen[1:]]

    found, record, widths = decode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Controller, "verify_width", lambda self, num_tokens, context_tokens: num_tokens)
        narrow, narrow_record, narrow_widths = decode()
    assert torch.equal(found, narrow)
    assert counts(record) == counts(narrow_record)
    assert [width == 1 for width in widths] == [width == 1 for width in narrow_widths]  # plain steps stay plain steps
    if is_plain:
        torch.manual_seed(seed)
        assert torch.equal(found, model.generate(ids, **copy.deepcopy(kwargs)))
    return found, widths


def oracle(model: Any, ids: torch.Tensor, num_tokens: int, spoil_every: int = 0) -> Callable[[], list[Any]]:
    answer = model.generate(ids, max_new_tokens=num_tokens, do_sample=False)[0].tolist()
    return lambda: [Oracle(answer, spoil_every)]


MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny.llama,
    "mistral, window of 8": lambda: tiny.mistral(window=8),
    "mistral, window of 4": lambda: tiny.mistral(window=4, attn_implementation="eager"),
    "gemma3_text": lambda: make("gemma3_text", FAMILIES["gemma3_text"]),
    "gpt2": lambda: make("gpt2", FAMILIES["gpt2"]),
    "bloom": lambda: make("bloom", FAMILIES["bloom"]),
    "mixtral": lambda: make("mixtral", FAMILIES["mixtral"], dtype=torch.float32),
    "qwen2_moe": lambda: make("qwen2_moe", FAMILIES["qwen2_moe"], dtype=torch.float32),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama()


@pytest.mark.compat
@pytest.mark.usefixtures("wide")
class TestText:
    @pytest.mark.parametrize("block_length", [1, 3, 12])
    @pytest.mark.parametrize("source", ["ngram", "assistant", "oracle"])
    def test_greedy(self, model: Any, source: str, block_length: int) -> None:
        ids = tiny.prompt(24)
        drafts = {
            "ngram": lambda: [NGram(min_ngram=1)],
            "assistant": lambda: [Assistant(tiny.near_copy(model, noise=0.05))],
            "oracle": oracle(model, ids, 40, spoil_every=5),
        }[source]
        _, widths = padded(
            model,
            ids,
            drafts,
            lambda: Fixed(source, block_length=block_length),
            max_new_tokens=40,
            do_sample=False,
        )
        assert sum(width >= WIDTH for width in widths) > (0 if source == "ngram" else len(widths) / 2)
        assert not {*range(2, WIDTH)} & {*widths}

    @pytest.mark.parametrize("sampling", ["paired", "maximal"])
    @pytest.mark.parametrize("options", [{"temperature": 0.5}, {"top_k": 8, "repetition_penalty": 1.2}], ids=str)
    def test_sampled(self, model: Any, sampling: str, options: dict[str, Any]) -> None:
        """Padding takes no noise: also drawn drafts under the rejection rule say what they say without it."""
        drafts = lambda: [Assistant(tiny.near_copy(model, noise=0.05)), NGram(min_ngram=1)]  # noqa: E731
        for seed in range(2):
            _, widths = padded(
                model,
                tiny.prompt(20, seed),
                drafts,
                lambda: Alternating(("assistant", 3), ("none", 0), ("ngram", 4)),
                seed=seed,
                sampling=sampling,
                is_plain=sampling == "paired",
                max_new_tokens=24,
                do_sample=True,
                **options,
            )
            assert WIDTH in widths
            assert 1 in widths

    @pytest.mark.parametrize("do_sample", [False, True])
    def test_short_convolutions(self, do_sample: bool) -> None:
        """Their state is rolled back, too."""
        options = {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}
        model = make("lfm2", options, dtype=torch.float32)
        ids = tiny.prompt(24)
        torch.manual_seed(0)
        answer = model.generate(ids, max_new_tokens=40, do_sample=do_sample)[0].tolist()
        _, widths = padded(
            model,
            ids,
            lambda: [Oracle(answer, spoil_every=4)],
            lambda: Fixed("oracle", block_length=3),
            max_new_tokens=40,
            do_sample=do_sample,
        )
        assert widths.count(WIDTH) > len(widths) / 2

    @pytest.mark.parametrize("where", [1, 2, 3, 5, 9])
    def test_eos_inside_a_block(self, target: Any, where: int) -> None:
        ids = tiny.prompt(20)
        drafts = oracle(target, ids, 30)
        eos = drafts()[0]._answer[20 + where]
        found, widths = padded(
            target,
            ids,
            drafts,
            lambda: Fixed("oracle", block_length=4),
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=eos,
        )
        assert set(widths) <= {1, WIDTH}
        assert int(found[0, -1]) == eos
        assert found.shape[1] <= 21 + where

    @pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4, 7])
    def test_length_reached_inside_a_block(self, target: Any, max_new_tokens: int) -> None:
        ids = tiny.prompt(20)
        found, widths = padded(
            target,
            ids,
            oracle(target, ids, 30),
            lambda: Fixed("oracle", block_length=4),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        assert found.shape[1] == 20 + max_new_tokens
        assert set(widths) <= {1, WIDTH}
        assert max_new_tokens < 3 or WIDTH in widths  # beyond the end of the answer, where the model has positions

    def test_criteria_processors_and_streamers_see_no_padding(self, target: Any) -> None:
        ids = tiny.prompt(20)
        seen = []
        for is_wrapped in (False, True):
            counting, streamer = Counting(), Seen()
            answer = target.generate(
                ids, max_new_tokens=30, do_sample=False, logits_processor=LogitsProcessorList([Counting()])
            )[0].tolist()
            stop = LastTokensEqual(answer[38:41])
            options = {
                "max_new_tokens": 30,
                "do_sample": False,
                "logits_processor": LogitsProcessorList([counting]),
                "stopping_criteria": StoppingCriteriaList([stop]),
                "streamer": streamer,
                "return_dict_in_generate": True,
                "output_scores": True,
                "output_logits": True,
            }
            if is_wrapped:
                source = Oracle(answer, spoil_every=7)
                with autospec.wrap(target, drafts=[source], policy="fixed:oracle:3"), forwards(target) as widths:
                    output = target.generate(ids, **options)
                assert WIDTH in [width for _, width in widths[1:]]
            else:
                output = target.generate(ids, **options)
            seen.append((output, counting.prefixes, streamer.events))
        (plain, *plainly), (found, *padded_so) = seen
        assert padded_so == plainly
        assert torch.equal(found.sequences, plain.sequences)
        assert found.sequences.shape[1] < 50
        for name in ("scores", "logits"):
            assert len(found[name]) == len(plain[name])
            for a, b in zip(found[name], plain[name], strict=True):
                torch.testing.assert_close(a, b)

    def test_left_padding_and_positions_of_the_users_own(self, target: Any) -> None:
        ids = tiny.prompt(20)
        mask = torch.tensor([[0] * 7 + [1] * 20])
        rows = torch.cat([torch.zeros(1, 7, dtype=torch.long), ids], dim=-1)
        for given, options in ((rows, {"attention_mask": mask}), (ids, {"position_ids": 2 * torch.arange(20)[None]})):
            answer = target.generate(given, max_new_tokens=30, do_sample=False, **options)[0].tolist()
            text = answer[7:] if given is rows else answer
            _, widths = padded(
                target,
                given,
                lambda text=text: [Oracle(text, spoil_every=6)],  # type: ignore[misc]
                lambda: Fixed("oracle", block_length=3),
                max_new_tokens=30,
                do_sample=False,
                **options,
            )
            assert WIDTH in widths


class TestHiddenStates:
    """Sources that see the target's hidden states: their proposals hang on them, so their counts show what they saw."""

    @pytest.mark.parametrize("kind", ["mtp", "dflash", "mellum"])
    @pytest.mark.parametrize("do_sample", [False, True])
    @pytest.mark.usefixtures("wide")
    def test_heads(self, kind: str, do_sample: bool, tmp_path: Path) -> None:
        model = {
            "mtp": lambda: tiny_heads.llama(tmp_path),
            "dflash": lambda: tiny.llama(vocab_size=8),
            "mellum": lambda: tiny_heads.mellum(tmp_path),  # experts and a short window
        }[kind]()
        drafter = tiny_heads.dflash(model) if kind == "dflash" else None
        _, widths = padded(
            model,
            tiny.prompt(20) % model.config.vocab_size,
            lambda: [Heads(drafter), NGram(min_ngram=1)],
            lambda: Alternating(("heads", 2), ("ngram", 3), ("none", 0), ("heads", 3)),
            max_new_tokens=30,
            do_sample=do_sample,
        )
        assert WIDTH in widths

    @pytest.mark.compat
    @pytest.mark.parametrize("num_committed", [1, 2, 4])
    def test_those_of_committed_tokens_alone(
        self, target: Any, num_committed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Asked after a commit, whatever was accepted, they are those of a forward over the text."""
        ids = tiny.prompt(20)
        committed: list[torch.Tensor] = []
        commit = TargetSession.commit

        def keeping(self: TargetSession, num_tokens: int) -> None:
            commit(self, num_tokens)
            committed.append(self.committed_states([1])[0])

        answer = target.generate(ids, max_new_tokens=20, do_sample=False)[0].tolist()
        source = Oracle(answer, spoil_every=num_committed) if num_committed < 4 else Oracle(answer)
        monkeypatch.setattr(source, "hidden_layers", (1,), raising=False)
        monkeypatch.setattr(source, "see", lambda states: None, raising=False)
        monkeypatch.setattr(Controller, "verify_width", lambda self, n, c: max(n, WIDTH))
        monkeypatch.setattr(TargetSession, "commit", keeping)
        with autospec.wrap(target, drafts=[source], policy="fixed:oracle:3"), forwards(target) as seen:
            target.generate(ids, max_new_tokens=20, do_sample=False)
        assert WIDTH in [width for _, width in seen[1:]]
        (whole,) = tiny_heads.states_of(target, [1], answer[:-1])
        found = torch.cat(committed)
        torch.testing.assert_close(found, whole[: len(found)])


@pytest.mark.compat
@pytest.mark.usefixtures("wide")
class TestWhereItIsNotPadded:
    def test_misses_and_plain_steps(self, target: Any) -> None:
        class Seldom(Oracle):
            def propose(self, committed: Any, block_length: int) -> Proposal:
                return super().propose(committed, block_length) if len(committed) % 3 == 0 else Proposal()

        ids = tiny.prompt(20)
        answer = target.generate(ids, max_new_tokens=40, do_sample=False)[0].tolist()
        with autospec.wrap(
            target, drafts=[Seldom(answer, spoil_every=4)], policy=Alternating(("oracle", 3), ("none", 0))
        ) as speculator:
            speculator_blocks: list[BlockOutcome] = []
            observe = speculator._controller.observe
            with pytest.MonkeyPatch.context() as patch, forwards(target) as seen:
                patch.setattr(
                    speculator._controller, "observe", lambda block: (speculator_blocks.append(block), observe(block))
                )
                target.generate(ids, max_new_tokens=40, do_sample=False)
        assert len(speculator_blocks) == len(seen) - 1
        assert {block.num_draft_tokens for block in speculator_blocks} >= {0, 3}
        for block, (_, width) in zip(speculator_blocks, seen[1:], strict=True):
            assert width == 1 + block.num_draft_tokens + block.num_padding_tokens
            assert width == (WIDTH if block.num_draft_tokens else 1)

    def test_controls(self, target: Any) -> None:
        with (
            autospec.wrap(target, drafts=["ngram"], policy="fixed:ngram:4", control_share=1.0),
            forwards(target) as seen,
        ):
            target.generate(tiny.prompt(20), max_new_tokens=20, do_sample=False)
        assert {width for _, width in seen[1:]} == {1}

    @pytest.mark.parametrize("prompt_tokens", [20, 40, 55, 60])
    def test_near_the_window_s_end(self, prompt_tokens: int) -> None:
        """Learned positions: there is nothing beyond them."""
        model = make("gpt2", {"max_position_embeddings": 64, "n_embd": 32, "n_layer": 2, "n_head": 4})
        ids = tiny.prompt(prompt_tokens)
        num_new = 64 - prompt_tokens
        answer = model.generate(ids, max_new_tokens=num_new, do_sample=False)[0].tolist()
        with (
            autospec.wrap(model, drafts=[Oracle(answer, spoil_every=5)], policy="fixed:oracle:3") as speculator,
            forwards(model) as seen,
        ):
            found = model.generate(ids, max_new_tokens=num_new, do_sample=False)
            record = speculator.last_request
        assert found[0].tolist() == answer
        assert record is not None
        assert record.notes is None
        assert all(before + width <= 64 for before, width in seen)
        for before, width in seen[1:]:
            assert width in (1, WIDTH) if before + WIDTH <= 64 else width <= 4
        assert any(width == WIDTH for _, width in seen[1:]) == (prompt_tokens + WIDTH <= 64)

    def test_where_only_the_length_of_the_answer_is_known(self) -> None:
        model = make("bloom", FAMILIES["bloom"])
        del model.config.max_position_embeddings  # of which this kind needs none
        ids = tiny.prompt(20)
        drafts = oracle(model, ids, 30)
        with autospec.wrap(model, drafts=drafts(), policy="fixed:oracle:3"), forwards(model) as seen:
            model.generate(ids, max_new_tokens=30, do_sample=False)
        assert any(width == WIDTH for _, width in seen[1:])
        assert all(before + width < 20 + 30 for before, width in seen)

    def test_where_positions_would_stretch(self) -> None:
        """A padding token beyond the original length would turn the rotary positions of the whole forward."""
        model = make("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32})
        ids = tiny.prompt(5)
        drafts = oracle(model, ids, 27, spoil_every=6)
        plain = model.generate(ids, max_new_tokens=27, do_sample=False)
        with autospec.wrap(model, drafts=drafts(), policy="fixed:oracle:3"), forwards(model) as seen:
            found = model.generate(ids, max_new_tokens=27, do_sample=False)
        assert torch.equal(found, plain)
        assert any(width == WIDTH for _, width in seen[1:])
        assert all(before + width <= 32 for before, width in seen)
        assert any(before + WIDTH > 32 and 1 < width < WIDTH for before, width in seen)


def handed_back(model: Any, *, is_wrapped: bool) -> tuple[torch.Tensor, Any]:
    """Text of two turns with one cache, and the cache as it is after them."""
    ids, cache = tiny.prompt(20), DynamicCache(config=model.config)
    for turn in range(2):
        answer = model.generate(ids, max_new_tokens=13, do_sample=False)[0].tolist()
        options = {"max_new_tokens": 13, "do_sample": False, CACHE_KEYWORD: cache}
        if is_wrapped:
            with autospec.wrap(model, drafts=[Oracle(answer, 4)], policy="fixed:oracle:3"), forwards(model) as seen:
                ids = model.generate(ids, **options)
            assert WIDTH in [width for _, width in seen[1:]]
        else:
            ids = model.generate(ids, **options)
        if turn == 0:
            ids = torch.cat([ids, tiny.prompt(5, seed=9)], dim=-1)
    return ids, cache


def assert_same_cache(found: Any, plain: Any) -> None:
    assert found.get_seq_length() == plain.get_seq_length()
    for a, b in zip(found.layers, plain.layers, strict=True):
        assert getattr(a, "record_past", False) is False
        for name in ("keys", "values"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-4, atol=1e-4)


@pytest.mark.compat
@pytest.mark.usefixtures("wide")
class TestCaches:
    @pytest.mark.parametrize("name", ["llama", "mistral, window of 8", "mixtral", "gemma3_text"])
    def test_handed_back_as_generate_leaves_it(self, name: str) -> None:
        model = MODELS[name]()
        plain_text, plain = handed_back(model, is_wrapped=False)
        text, found = handed_back(model, is_wrapped=True)
        assert torch.equal(text, plain_text)
        assert_same_cache(found, plain)

    @pytest.mark.parametrize("name", ["llama", "mistral, window of 8"])
    @pytest.mark.parametrize("num_said", [1, 2, 3, 4, 5, 6])
    def test_after_an_interruption(self, name: str, num_said: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also when all tokens of a block were said: the forward that plain decoding runs next was not run here."""
        model = MODELS[name]()
        ids = tiny.prompt(20)
        answer = model.generate(ids, max_new_tokens=20, do_sample=False)[0].tolist()
        cache = DynamicCache(config=model.config)
        run = Verification.run

        def interrupted(self: Verification, *args: Any) -> Any:
            committed = run(self, *args)
            if self._answer.num_tokens >= num_said:
                raise KeyboardInterrupt
            return committed

        monkeypatch.setattr(Verification, "run", interrupted)
        with (
            autospec.wrap(model, drafts=[Oracle(answer)], policy="fixed:oracle:3"),
            forwards(model) as seen,
            pytest.raises(KeyboardInterrupt),
        ):
            model.generate(ids, max_new_tokens=20, do_sample=False, **{CACHE_KEYWORD: cache})
        num_committed = 1 + 4 * (len(seen) - 1)  # all drafts are accepted
        assert cache.get_seq_length() == 20 + num_committed - 1
        plain = DynamicCache(config=model.config)
        monkeypatch.undo()
        model.generate(ids, max_new_tokens=num_committed, do_sample=False, **{CACHE_KEYWORD: plain})
        assert_same_cache(cache, plain)

    def test_after_a_forward_that_failed(self, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        ids = tiny.prompt(20)
        answer = target.generate(ids, max_new_tokens=20, do_sample=False)[0].tolist()
        cache = DynamicCache(config=target.config)
        layer = target.model.layers[1].mlp

        def fails(module: Any, args: Any) -> None:
            if args[0].shape[1] == WIDTH:
                raise RuntimeError("no memory")

        handle = layer.register_forward_pre_hook(fails)
        try:
            with (
                autospec.wrap(target, drafts=[Oracle(answer)], policy="fixed:oracle:3"),
                pytest.raises(RuntimeError, match="no memory"),
            ):
                target.generate(ids, max_new_tokens=20, do_sample=False, **{CACHE_KEYWORD: cache})
        finally:
            handle.remove()
        assert [each.get_seq_length() for each in cache.layers] == [21, 21]


class TestCosts:
    def test_a_policy_that_reckons_with_padding_has_it(self) -> None:
        costs = CostModel(TABLE)
        plain, watched = Controller(Fixed()), _Watched(Controller(Guard(Goodput(costs), costs)), costs)
        assert [plain.verify_width(n, 100) for n in (1, 2, 4, 9)] == [1, 2, 4, 9]
        assert [watched.verify_width(n, 100) for n in (2, 3, 4, 5, 8, 9, 17)] == [9, 9, 9, 9, 9, 9, 17]
        tuned = Tuned(Fixed(), {"s": Goodput(costs)}, {})
        assert [Controller(tuned).verify_width(n, 100) for n in (2, 9, 17)] == [9, 9, 17]
        assert Controller(Tuned(Fixed(), {}, {})).verify_width(2, 100) == 2

    @pytest.mark.compat
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_a_request_under_measured_costs(
        self, target: Any, do_sample: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is forced here but the table that calibration would have measured."""
        monkeypatch.setattr("autospec.costs.upkeep.cost_model", lambda *given: CostModel(TABLE))
        blocks: list[BlockOutcome] = []
        observe = CostModel.observe
        monkeypatch.setattr(CostModel, "observe", lambda self, block: (blocks.append(block), observe(self, block)))
        ids = tiny.prompt(20)
        options = {"max_new_tokens": 60, "do_sample": do_sample, "temperature": 0.6 if do_sample else None}
        torch.manual_seed(3)
        plain = target.generate(ids, **options)
        source = Oracle(plain[0].tolist(), spoil_every=4)
        with autospec.wrap(target, drafts=[source], policy="auto", control_share=0.0), forwards(target) as seen:
            torch.manual_seed(3)
            found = target.generate(ids, **options)
        assert torch.equal(found, plain)
        widths = [width for _, width in seen[1:]]
        assert set(widths) <= {1, 9, *range(10, 18)}
        assert widths.count(9) > 5
        assert [1 + block.num_draft_tokens + block.num_padding_tokens for block in blocks] == widths

    def test_it_learns_the_width_that_was_run(self) -> None:
        model = CostModel(TABLE)
        padded_block = BlockOutcome(
            "s",
            Action("oracle", 3),
            context_tokens=100,
            num_draft_tokens=3,
            num_judged_tokens=3,
            num_accepted_tokens=3,
            num_committed_tokens=4,
            verify_seconds=1.3 * TABLE.verify_seconds(9, 100),
            num_padding_tokens=5,
        )
        plain = BlockOutcome("s", OFF, 100, 0, 0, 0, 1, verify_seconds=TABLE.verify_seconds(1, 100))
        for _ in range(64):
            model.observe(padded_block)
            model.observe(plain)
        ratio = {width: model.verify_seconds(width, 100) / TABLE.verify_seconds(width, 100) for width in (1, 4, 9)}
        assert ratio[9] == pytest.approx(1.3, abs=0.08)
        assert ratio[1] == pytest.approx(1.0, abs=0.05)
        assert ratio[1] < ratio[4] < ratio[9]  # never seen: it follows all widths together

    def test_a_width_is_given_up_when_it_has_become_dear(self) -> None:
        model = CostModel(TABLE)
        assert model.cheapest_width(4, 100) == model.cheapest_width(4, 90) == 9
        slow = BlockOutcome(
            "s", Action("oracle", 3), 100, 3, 3, 3, 4, verify_seconds=0.2, num_padding_tokens=5
        )  # 0.060 calibrated
        plain = BlockOutcome("s", OFF, 100, 0, 0, 0, 1, verify_seconds=TABLE.verify_seconds(1, 100))
        for _ in range(100):
            model.observe(slow)
            model.observe(plain)
            model.observe(plain)
        assert model.cheapest_width(4, 100) != 9
        model.recalibrate(TABLE, is_asynchronous=False)
        assert model.cheapest_width(4, 100) == 9

    def test_remembered_widths_are_few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("autospec.costs.model._MOST_WIDTHS", 3)
        model = CostModel(TABLE)
        for context in range(0, 64 * 40, 64):
            assert model.cheapest_width(4, context) == TABLE.cheapest_width(4, context + 32)
            assert len(model._cheapest) <= 3

    def test_prices_are_those_of_what_is_run(self) -> None:
        for costs in (CostModel(TABLE), TABLE):
            prices = Prices(costs).at(100)
            assert prices.step == costs.verify_seconds(1, prices.context_tokens)
            least = costs.verify_seconds(9, prices.context_tokens)
            assert prices.verify[1:9] == pytest.approx([least] * 8)
            assert prices.verify[16] == costs.verify_seconds(17, prices.context_tokens)

    def test_a_plain_step_has_its_own_price(self) -> None:
        """Also where nine tokens would cost less than one."""
        curve = Curve((64,), (1, 2, 9), ((0.09, 0.08, 0.05),))
        costs = CostTable((1, 8), curve, {})
        assert costs.cheapest_width(1, 100) == 9
        assert Prices(costs).at(100).verify[:2] == pytest.approx([0.09, 0.05])

    def test_estimates_that_know_of_no_padding(self) -> None:
        class Costs:
            block_lengths = (1, 4)
            version = 0

            def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
                return False

            def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
                return 1.0 + num_tokens

            def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
                return 0.1

        assert Prices(Costs()).at(100).verify == [2.0, 3.0, 4.0, 5.0, 6.0]


@pytest.fixture
def certified(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Padding by one to three tokens in the certifier, for which its models are given room. How often it was asked."""
    padding: list[int] = []

    def verify_width(self: Controller, num_tokens: int, context_tokens: int) -> int:
        padding.append(1 + context_tokens % 3)
        return num_tokens + padding[-1]

    monkeypatch.setattr("autospec.decoding.decoder.context_window", lambda model: 64)
    monkeypatch.setattr(Controller, "verify_width", verify_width)
    return padding


@pytest.mark.compat
class TestCertified:
    @pytest.mark.parametrize("case", CASES[::6] + CASES[1::30], ids=lambda case: case.name)
    def test_exact(self, case: Case, certified: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        widths: list[tuple[int, int]] = []
        forward = TargetSession.forward

        def seeing(self: TargetSession, ids: Any, num_draft_tokens: int, num_padding: int = 0) -> Any:
            widths.append((num_draft_tokens, num_padding))
            return forward(self, ids, num_draft_tokens, num_padding)

        monkeypatch.setattr(TargetSession, "forward", seeing)
        certificate = next(certify([case]))
        assert certificate.is_exact, certificate
        assert [padding for _, padding in widths if padding] == certified  # each time it was asked for it was done
        assert all(padding == 0 for num_draft, padding in widths if num_draft == 0)
        assert bool(certified) == any(num_draft for num_draft, _ in widths)

    @pytest.mark.parametrize("sampling", ["maximal", "paired"])
    @pytest.mark.usefixtures("certified")
    def test_padding_that_is_not_rolled_back_is_found(self, sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
        commit = TargetSession.commit

        def forgetful(self: TargetSession, num_tokens: int) -> None:
            self._width -= self._num_padding
            commit(self, num_tokens)

        case = a_case(sampling=sampling)
        assert not violates(case)
        monkeypatch.setattr(TargetSession, "commit", forgetful)
        assert violates(case)

    @pytest.mark.parametrize("sampling", ["maximal", "paired"])
    @pytest.mark.usefixtures("certified")
    def test_logits_of_the_padding_are_found(self, sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
        keep = TargetSession._keep

        def at_the_end(self: TargetSession, outputs: Any, width: int, num_padding: int = 0) -> Any:
            return keep(self, outputs, width, num_padding)[num_padding:]

        monkeypatch.setattr(TargetSession, "_keep", at_the_end)
        assert violates(a_case(sampling=sampling))

    @pytest.mark.parametrize("sampling", ["maximal", "paired"])
    @pytest.mark.usefixtures("certified")
    def test_padding_that_takes_the_place_of_a_draft_token_is_found(
        self, sampling: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        forward = TargetSession.forward

        def in_front(self: TargetSession, ids: Any, num_draft_tokens: int, num_padding: int = 0) -> Any:
            if num_padding:
                end = ids.shape[1]
                ids = torch.cat(
                    [ids[:, : end - num_draft_tokens - num_padding], ids.flip(1)[:, : num_draft_tokens + num_padding]],
                    1,
                )
            return forward(self, ids, num_draft_tokens, num_padding)

        monkeypatch.setattr(TargetSession, "forward", in_front)
        assert violates(a_case(sampling=sampling))


@pytest.mark.compat
@pytest.mark.usefixtures("wide")
class TestFaultsInRealModels:
    """The tests above see what they are there to see."""

    def differs(self, model: Any) -> bool:
        plain_text, plain = handed_back(model, is_wrapped=False)
        try:
            text, found = handed_back(model, is_wrapped=True)
            assert torch.equal(text, plain_text)
            assert_same_cache(found, plain)
        except (AssertionError, RuntimeError, IndexError):
            return True
        return False

    @pytest.mark.parametrize("name", ["llama", "mistral, window of 8"])
    def test_padding_that_is_not_rolled_back(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        commit = TargetSession.commit

        def forgetful(self: TargetSession, num_tokens: int) -> None:
            self._width -= self._num_padding
            commit(self, num_tokens)

        model = MODELS[name]()
        assert not self.differs(model)
        monkeypatch.setattr(TargetSession, "commit", forgetful)
        assert self.differs(model)

    def test_an_interruption_that_keeps_padding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        abort = TargetSession.abort

        def forgetful(self: TargetSession, num_tokens: int) -> None:
            self._num_padding = 0
            abort(self, num_tokens)

        monkeypatch.setattr(TargetSession, "abort", forgetful)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
            TestCaches().test_after_an_interruption("llama", 5, patch)
