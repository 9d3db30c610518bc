"""Draft sources: the contract that all keep, and what each proposes."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest
import tiny
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

import autospec
from autospec.drafts import Assistant, Blend, DraftRequest, EarlyExit, NGram, Suffix, make_sources, registry
from autospec.errors import ConfigurationError, DraftError
from autospec.randomness import TorchRandomness

pytestmark = pytest.mark.compat


def request(
    do_sample: bool = False,
    is_paired: bool = True,
    vocab_size: int = tiny.VOCAB,
    processors: Any = (),
    segment: str = "default",
) -> DraftRequest:
    return DraftRequest(
        device=torch.device("cpu"),
        vocab_size=vocab_size,
        do_sample=do_sample,
        processors=LogitsProcessorList(processors),
        randomness=TorchRandomness(torch.device("cpu")),
        scores_dtype=torch.float32,
        is_paired=is_paired,
        segment=segment,
    )


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama()


SOURCES = [
    "ngram",
    "ngram-newest",
    "suffix",
    "assistant",
    "assistant-greedy",
    "assistant-stops",
    "early_exit",
    "blend",
]
RETRIEVAL = ("ngram", "suffix")


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, target: Any) -> Any:
    made = {
        "ngram": lambda: NGram(min_ngram=1),
        "ngram-newest": lambda: NGram(min_ngram=1, continuation="newest", tokens_per_match=3),
        "suffix": lambda: Suffix(min_match=1),
        "assistant": lambda: Assistant(tiny.near_copy(target)),
        "assistant-stops": lambda: Assistant(tiny.near_copy(target), max_entropy=3.9, min_margin=0.001),
        "assistant-greedy": lambda: Assistant(tiny.near_copy(target), greedy=True),
        "early_exit": lambda: EarlyExit(1),
        "blend": lambda: Blend(Assistant(tiny.near_copy(target)), [Suffix(min_match=1)]),
    }[request.param]()
    made.attach(target, None)
    return made


@pytest.mark.parametrize("do_sample", [False, True])
class TestContract:
    """Every source, greedy and sampled."""

    def test_proposes_at_most_what_is_asked(self, source: Any, do_sample: bool) -> None:
        session = source.start(request(do_sample))
        committed = tiny.prompt(20)[0].tolist()
        for block_length in (1, 3, 8):
            proposal = session.propose(committed, block_length)
            assert 0 < len(proposal.tokens) <= block_length
            assert all(0 <= token < tiny.VOCAB for token in proposal.tokens)

    def test_state_follows_the_committed_prefix(self, source: Any, do_sample: bool) -> None:
        """After any mixture of acceptance and rejection a session proposes what a fresh one would."""
        generator = torch.Generator().manual_seed(0)
        committed = tiny.prompt(12)[0].tolist()
        session = source.start(request(do_sample))
        for _ in range(12):
            torch.manual_seed(len(committed))
            proposal = session.propose(committed, 4)
            torch.manual_seed(len(committed))
            # a blend also goes by how its parts fared: each part follows the prefix, which of them drafts may differ
            parts = [*source.retrieval, source.model_draft] if source.name == "blend" else [source]
            fresh = [part.start(request(do_sample)).propose(committed, 4).tokens for part in parts]
            assert proposal.tokens in fresh
            kept = int(torch.randint(0, len(proposal.tokens) + 1, (), generator=generator))
            others = torch.randint(
                1, tiny.VOCAB, (int(torch.randint(1, 4, (), generator=generator)),), generator=generator
            )
            committed = [*committed, *proposal.tokens[:kept], *others.tolist()]

    def test_the_next_request_starts_empty(self, source: Any, do_sample: bool) -> None:
        first, second = [5, 6, 7, 8, 9] * 4, [20, 21, 22, 23, 20, 21]
        source.start(request(do_sample)).propose(first, 4)
        torch.manual_seed(0)
        after = source.start(request(do_sample)).propose(second, 4).tokens
        torch.manual_seed(0)
        alone = source.start(request(do_sample)).propose(second, 4).tokens
        assert after == alone
        if source.name in RETRIEVAL:
            assert set(after) <= set(second)

    def test_paired_drafts_do_not_use_up_the_targets_noise(self, source: Any, do_sample: bool) -> None:
        before = torch.get_rng_state()
        source.start(request(do_sample)).propose(tiny.prompt(20)[0].tolist(), 4)
        assert torch.equal(torch.get_rng_state(), before)

    def test_catching_up_is_told_from_drafting(self, source: Any, do_sample: bool) -> None:
        """What others committed meanwhile is no price of this block."""
        session = source.start(request(do_sample))
        committed = tiny.prompt(20)[0].tolist()
        first = session.propose(committed, 2)
        usual = session.propose([*committed, *first.tokens[:1], 5], 2)
        late = session.propose([*committed, *first.tokens[:1], 5, *range(1, 12)], 2)
        if source.name in RETRIEVAL:
            assert usual.catch_up_seconds == late.catch_up_seconds == 0.0
        elif source.name != "blend":  # where retrieval may have drafted before
            assert usual.catch_up_seconds == 0.0 < late.catch_up_seconds

    def test_q_is_what_was_drawn_from(self, source: Any, do_sample: bool) -> None:
        """One-hot, or rows that sum to one over the tokens the draft could draw."""
        proposal = source.start(
            request(do_sample, is_paired=False, processors=[TemperatureLogitsWarper(0.7), TopKLogitsWarper(4)])
        ).propose(tiny.prompt(20)[0].tolist(), 5)
        if proposal.draft_probs is None:
            assert not do_sample or source.name in (*RETRIEVAL, "blend") or source.greedy
            return
        assert proposal.draft_probs.shape == (5, tiny.VOCAB)
        torch.testing.assert_close(proposal.draft_probs.sum(dim=-1), torch.ones(5))
        assert ((proposal.draft_probs > 0).sum(dim=-1) <= 4).all()
        assert all(float(row[token]) > 0 for row, token in zip(proposal.draft_probs, proposal.tokens, strict=True))


def test_drawn_tokens_have_the_frequencies_of_q(target: Any) -> None:
    session = Assistant(target).start(request(do_sample=True, is_paired=False, processors=[TopKLogitsWarper(3)]))
    committed = tiny.prompt(20)[0].tolist()
    torch.manual_seed(0)
    proposals = [session.propose(committed, 1) for _ in range(400)]
    q = proposals[0].draft_probs
    assert q is not None
    counts = torch.bincount(torch.tensor([p.tokens[0] for p in proposals]), minlength=tiny.VOCAB) / 400
    assert float((counts - q[0]).abs().sum()) / 2 < 0.08


class TestNGram:
    @pytest.mark.parametrize(
        ("committed", "length", "expected"),
        [
            ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
            ([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 1, [3]),  # once each: the first match
            ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 2, [3, 9]),  # the most frequent, where it was first
            ([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], 1, [5]),  # the longest match, though older
            ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),  # a match that runs into the end goes on into its own draft
            ([4, 4], 3, [4, 4, 4]),  # one token is enough to match by default
            ([1, 2, 3], 4, []),
            ([5], 4, []),
        ],
    )
    def test_proposals(self, committed: list[int], length: int, expected: list[int]) -> None:
        assert NGram().start(request()).propose(committed, length).tokens == expected

    def test_short_matches_can_be_left_alone(self) -> None:
        assert NGram(min_ngram=2).start(request()).propose([4, 4], 3).tokens == []
        assert NGram(min_ngram=2).start(request()).propose([4, 5, 4, 5], 2).tokens == [4, 5]

    @pytest.mark.parametrize(
        ("committed", "newest", "frequent"),
        [
            ([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 4, 6, 1, 2], [4, 6], [3, 8]),  # 3 twice, its first place is copied
            ([1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [4, 9], [3, 8]),  # once each: the first
            ([1, 2, 3, 1, 2], [3, 1], [3, 1]),
            ([1, 2], [], []),
        ],
    )
    def test_the_newest_or_the_most_frequent(
        self, committed: list[int], newest: list[int], frequent: list[int]
    ) -> None:
        for continuation, expected in (("newest", newest), ("frequent", frequent)):
            session = NGram(continuation=continuation).start(request())
            grown = NGram(continuation=continuation).start(request())
            for end in range(1, len(committed)):
                grown.propose(committed[:end], 2)
            assert session.propose(committed, 2).tokens == expected
            assert grown.propose(committed, 2).tokens == expected

    def test_longer_matches_are_trusted_further(self) -> None:
        session = NGram(max_ngram=3, min_ngram=1, tokens_per_match=2).start(request())
        assert session.propose([9, 1, 2, 3, 4, 5, 6, 7, 8, 1], 8).tokens == [2, 3]
        text = [9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
        assert NGram(max_ngram=3, tokens_per_match=2).start(request()).propose(text, 8).tokens == [3, 4, 5, 6]
        assert NGram(max_ngram=3, tokens_per_match=2).start(request()).propose(text, 3).tokens == [3, 4, 5]

    def test_ids_without_logits_are_not_drafted(self) -> None:
        assert NGram().start(request(vocab_size=4)).propose([1, 2, 3, 7, 1, 2], 3).tokens == [3]

    def test_index_work_per_token_does_not_grow(self) -> None:
        """Counted in tokens read: a new token makes the session look at its own neighbourhood only."""

        class Watched(list[int]):
            reads = 0

            def __getitem__(self, key: Any) -> Any:
                Watched.reads += 1
                return super().__getitem__(key)

        work = []
        for length in (500, 5000):
            session = NGram().start(request())
            committed = Watched(tiny.prompt(length)[0].tolist())
            session.propose(committed, 4)
            committed.append(3)
            Watched.reads = 0
            session.propose(committed, 4)
            work.append(Watched.reads)
        assert work[0] == work[1] < 20

    @pytest.mark.parametrize(
        "options",
        [
            {"max_ngram": 0},
            {"min_ngram": 2.5},
            {"min_ngram": 4},
            {"max_ngram": True},
            {"tokens_per_match": 0},
            {"continuation": "oldest"},
        ],
        ids=str,
    )
    def test_bad_settings(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            NGram(**options)


class TestAssistant:
    def test_other_vocabulary_is_named(self, target: Any) -> None:
        """Case C12."""
        order = list(range(tiny.VOCAB))
        order[5], order[9] = 9, 5
        assistant = Assistant(tiny.llama(seed=2), tokenizer=tiny.tokenizer(order=order))
        with pytest.raises(DraftError, match=r"differs from the target's at ids 5 \('f' / 'j'\), 9 \('j' / 'f'\) "):
            autospec.wrap(target, tokenizer=tiny.tokenizer(), drafts=[assistant], policy="off")

    def test_blocks_end_before_a_position_the_draft_is_unsure_of(self, target: Any) -> None:
        committed = tiny.prompt(20)[0].tolist()
        draft = tiny.near_copy(target)
        whole = Assistant(draft).start(request()).propose(committed, 8).tokens
        ids, margins, entropies = committed, [], []
        for token in whole:
            with torch.no_grad():
                probs = draft(torch.tensor([ids])).logits[0, -1].float().softmax(-1)
            first, second = probs.topk(2).values.tolist()
            margins.append(first - second)
            entropies.append(float(-(probs * probs.clamp(min=1e-30).log()).sum()))
            ids = [*ids, token]
        for cut in range(8):
            margin = Assistant(draft, min_margin=min(margins[: cut + 1], default=1.0) + 1e-4)
            ends = next(i for i, m in enumerate(margins) if m < min(margins[: cut + 1]) + 1e-4)
            assert margin.start(request()).propose(committed, 8).tokens == whole[:ends]
            entropy = Assistant(draft, max_entropy=max(entropies[: cut + 1]) - 1e-4)
            ends = next(i for i, e in enumerate(entropies) if e > max(entropies[: cut + 1]) - 1e-4)
            assert entropy.start(request(do_sample=False)).propose(committed, 8).tokens == whole[:ends]
        assert len(set(margins)) == 8
        never = Assistant(draft, min_margin=1.0).start(request(do_sample=True, is_paired=False))
        assert never.propose(committed, 4).tokens == []

    @pytest.mark.parametrize(
        "options", [{"min_margin": 1.5}, {"min_margin": True}, {"max_entropy": -1}, {"max_entropy": "low"}], ids=str
    )
    def test_stop_rules_out_of_range(self, target: Any, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            Assistant(target, **options)

    def test_one_other_special_token_is_named(self, target: Any) -> None:
        mine, other = tiny.tokenizer(), tiny.tokenizer(tiny.VOCAB - 1)
        other.add_special_tokens({"eos_token": "<end>"})  # the same ids but for the last one
        assert len(mine) == len(other)
        with pytest.raises(DraftError, match=r"differs from the target's at ids 63 \('.' / '<end>'\)"):
            autospec.wrap(target, tokenizer=mine, drafts=[Assistant(tiny.llama(seed=2), tokenizer=other)], policy="off")

    @pytest.mark.parametrize(("target_size", "draft_size"), [(57, 60), (60, 57)])
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_padded_vocabulary(self, target_size: int, draft_size: int, do_sample: bool) -> None:
        tokenizer = tiny.tokenizer(57)
        target = tiny.llama(vocab_size=target_size)
        assistant = Assistant(tiny.llama(seed=3, vocab_size=draft_size), tokenizer=tokenizer)
        ids = tiny.prompt(12) % 57
        options = {"max_new_tokens": 20, "do_sample": do_sample, "suppress_tokens": list(range(57, target_size))}
        torch.manual_seed(1)
        plain = target.generate(ids, **options)
        for sampling in ("paired", "maximal"):
            with autospec.wrap(
                target, tokenizer=tokenizer, drafts=[assistant], policy="fixed:assistant:3", sampling=sampling
            ) as speculator:
                torch.manual_seed(1)
                found = target.generate(ids, **options)
                assert speculator.last_request is not None
                assert speculator.last_request.num_draft_tokens > 0
                assert speculator.last_request.fallback_reason is None
            if not do_sample or sampling == "paired":
                assert torch.equal(plain, found)

    def test_text_that_the_assistant_cannot_read_switches_it_off(self, target: Any) -> None:
        session = Assistant(tiny.llama(vocab_size=60)).start(request())
        session.propose([1, 2, 3], 2)
        with pytest.raises(DraftError, match="token id 61 of the text is unknown to the assistant"):
            session.propose([1, 2, 3, 61], 2)

    def test_sizes_that_differ_need_tokenizers(self, target: Any) -> None:
        with pytest.raises(DraftError, match="60 token ids, the target 64"):
            autospec.wrap(target, drafts=[Assistant(tiny.llama(vocab_size=60))], policy="off")

    def test_unknown_tokenizer_is_said_aloud(self, target: Any) -> None:
        assistant = Assistant(tiny.llama(seed=2))
        with pytest.warns(UserWarning, match="compared by size alone"):
            assistant.attach(target, tiny.tokenizer())

    def test_other_device_is_refused(self, target: Any) -> None:
        with torch.device("meta"):
            assistant = Assistant(tiny.LlamaForCausalLM(target.config))
        with pytest.raises(DraftError, match=r"the assistant is on meta, the target on cpu: move it first"):
            assistant.attach(target, None)

    def test_other_dtype_is_taken(self, target: Any) -> None:
        ids = tiny.prompt(20)
        plain = target.generate(ids, max_new_tokens=20, do_sample=False)
        half = tiny.near_copy(target).to(torch.bfloat16)
        with autospec.wrap(target, drafts=[Assistant(half)], policy="fixed:assistant:3") as speculator:
            assert torch.equal(target.generate(ids, max_new_tokens=20, do_sample=False), plain)
            assert speculator.last_request is not None
            assert speculator.last_request.num_accepted_tokens > 0

    def test_overflow_switches_it_off_with_the_reason(self, target: Any) -> None:
        """Case C11."""
        broken = tiny.near_copy(target)
        with torch.no_grad():
            broken.lm_head.weight.fill_(torch.inf)
        ids = tiny.prompt(20)
        plain = target.generate(ids, max_new_tokens=20, do_sample=False)
        with autospec.wrap(target, drafts=[Assistant(broken)], policy="fixed:assistant:3") as speculator:
            with pytest.warns(UserWarning, match="assistant switched off: the draft's logits are not finite"):
                assert torch.equal(target.generate(ids, max_new_tokens=20, do_sample=False), plain)
            record = speculator.last_request
        assert record is not None
        assert record.fallback_reason is None
        assert record.notes is not None
        assert "not finite" in record.notes
        assert record.num_draft_tokens == 0

    def test_no_model(self) -> None:
        with pytest.raises(ConfigurationError, match="a transformers causal language model is needed"):
            Assistant("small")  # type: ignore[arg-type]


def offered() -> NGram:
    source = NGram()
    source.name = "offered"
    return source


def misnamed() -> NGram:
    return NGram()


class TestPlugIns:
    @pytest.fixture(autouse=True)
    def entries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entries = [
            EntryPoint(name, f"test_drafts:{target}", "autospec.drafts")
            for name, target in (("offered", "offered"), ("misnamed", "misnamed"), ("broken", "nowhere"))
        ]
        monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == "autospec.drafts" else [])

    def test_a_source_of_another_package_goes_by_its_name(self, target: Any) -> None:
        plain = target.generate(tiny.prompt(20), max_new_tokens=12, do_sample=False)
        with autospec.wrap(target, drafts=["offered"], policy="fixed:offered:3") as speculator:
            assert torch.equal(target.generate(tiny.prompt(20), max_new_tokens=12, do_sample=False), plain)
            assert speculator.last_request is not None
            assert speculator.last_request.usual_action == "offered:3"

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("misnamed", "of another name"),
            ("broken", r"'broken' of test_drafts:nowhere cannot be made: AttributeError"),
            ("magic", r"known are none, ngram, suffix, broken, misnamed, offered, autospec\.drafts\.Assistant"),
        ],
    )
    def test_errors(self, name: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            make_sources([name])


class TestRegistry:
    def test_names_and_objects(self) -> None:
        assert list(make_sources(["none", "ngram"])) == ["ngram"]
        assert list(make_sources("ngram")) == ["ngram"]

    @pytest.mark.parametrize(
        ("drafts", "message"),
        [
            (
                ["magic"],
                r"unknown draft source 'magic': known are none, ngram, suffix, autospec\.drafts\.Assistant\(model\)",
            ),
            (["assistant"], "needs settings: pass autospec.drafts.Assistant"),
            (["early_exit"], "needs settings"),
            (["ngram", "ngram"], "two draft sources are called 'ngram'"),
            ([5], "5 is not a draft source"),
        ],
    )
    def test_errors(self, drafts: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            make_sources(drafts)
