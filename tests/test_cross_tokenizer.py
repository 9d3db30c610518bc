"""Assistants with another vocabulary: whatever the two tokenizers make of each other, the text is the target's."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import tiny
import tiny_tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_drafts import TestContract as Contract
from test_drafts import request
from test_spelling import SPELLINGS
from test_translation import permuted, shuffled
from tiny_tokenizers import ENGLISH, KINDS, OTHERS
from transformers import SuppressTokensLogitsProcessor, TopKLogitsWarper

import autospec
from autospec.certify.cases import Switching
from autospec.drafts import CrossTokenizer, Proposal, make_sources
from autospec.drafts.shared_tokens import match_specials
from autospec.drafts.spelling import Spelling
from autospec.drafts.text_session import TextReading, TextSession
from autospec.errors import ConfigurationError, DraftError
from autospec.types import OFF, Action

pytestmark = pytest.mark.compat

METHODS = ["text", "shared"]
ORDER = shuffled(64)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama()


def with_permuted_ids(model: Any, **options: Any) -> CrossTokenizer:
    return CrossTokenizer(permuted(model, ORDER), tiny.tokenizer(order=ORDER), **options)


@pytest.fixture(params=["text", "text-stops", "shared", "shared-greedy", "shared-stops"])
def source(request: pytest.FixtureRequest, target: Any) -> Any:
    method, _, kind = request.param.partition("-")
    options = {"": {}, "greedy": {"greedy": True}, "stops": {"max_entropy": 3.9, "min_margin": 0.001}}[kind]
    made = with_permuted_ids(tiny.near_copy(target), method=method, **options)
    made.attach(target, tiny.tokenizer())
    return made


class TestContract(Contract):
    """The same for both methods."""


@pytest.mark.parametrize("method", METHODS)
def test_the_target_itself_under_other_ids_is_always_accepted(target: Any, method: str) -> None:
    options = {"max_new_tokens": 30, "do_sample": False}
    for seed in range(3):
        prompt = tiny.prompt(15, seed=seed)
        plain = target.generate(prompt, **options)
        source = with_permuted_ids(target, method=method)
        with autospec.wrap(
            target, tokenizer=tiny.tokenizer(), drafts=[source], policy="fixed:cross_tokenizer:4"
        ) as speculator:
            assert torch.equal(target.generate(prompt, **options), plain)
            record = speculator.last_request
        assert record is not None
        assert record.notes is None
        assert record.num_accepted_tokens == record.num_judged_tokens == record.num_draft_tokens
        assert record.num_draft_tokens >= 23


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("sampling", ["paired", "maximal"])
def test_other_ids_draft_what_the_same_ids_draft(target: Any, do_sample: bool, sampling: str) -> None:
    """Over a subset too: q is renormalised over the tokens that both have."""
    ids, committed = sorted(shuffled(40, seed=2)), tiny.prompt(20)[0].tolist()
    letters = tiny.tokenizer().convert_ids_to_tokens(ids)
    some = tiny.tokenizer(64, order=[*ids, *(i for i in range(64) if i not in ids)])
    assert some.convert_ids_to_tokens(list(range(40))) == letters
    q_of = permuted(target, [*ids, *(i for i in range(64) if i not in ids)])
    with torch.no_grad():
        logits = target(torch.tensor([committed])).logits[0, -1].float()
    suppress = SuppressTokensLogitsProcessor([i for i in range(64) if i not in ids])
    processors = [suppress, TopKLogitsWarper(5)]
    made = CrossTokenizer(q_of, some, method="shared")
    made.attach(target, tiny.tokenizer())
    torch.manual_seed(3)
    proposal = made.start(request(do_sample, sampling == "paired", processors=processors)).propose(committed, 3)
    assert set(proposal.tokens) <= set(ids)
    if do_sample and sampling == "maximal":
        assert proposal.draft_probs is not None
        for processor in processors:
            logits = processor(torch.tensor([committed]), logits[None])[0]
        torch.testing.assert_close(proposal.draft_probs[0], logits.softmax(-1))
    else:
        assert proposal.draft_probs is None


def test_drawn_tokens_have_the_frequencies_of_q(target: Any) -> None:
    made = with_permuted_ids(target, method="shared")
    made.attach(target, tiny.tokenizer())
    session = made.start(request(do_sample=True, is_paired=False, processors=[TopKLogitsWarper(3)]))
    torch.manual_seed(0)
    proposals = [session.propose(tiny.prompt(20)[0].tolist(), 1) for _ in range(300)]
    q = proposals[0].draft_probs
    assert q is not None
    counts = torch.bincount(torch.tensor([p.tokens[0] for p in proposals]), minlength=tiny.VOCAB) / 300
    assert float((counts - q[0]).abs().sum()) / 2 < 0.09


PAIRS = [
    ("bytes", "more bytes"),
    ("sentencepiece", "bytes"),
    ("more bytes", "unigram"),
    ("word pieces", "sentencepiece"),
]


def models(target: str, draft: str) -> tuple[Any, Any, CrossTokenizer]:
    sizes = [SPELLINGS[name].num_ids for name in (target, draft)]
    model = tiny.llama(vocab_size=sizes[0], eos_token_id=SPELLINGS[target].roles["eos"])
    return model, KINDS[target](), tiny.llama(seed=2, vocab_size=sizes[1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_the_text_is_what_generate_says(target: str, draft: str, method: str) -> None:
    model, tokenizer, small = models(target, draft)
    source = CrossTokenizer(small, KINDS[draft](), method=method)
    drafted = 0
    for seed, (do_sample, sampling, policy) in enumerate(
        [
            (False, "paired", "fixed:cross_tokenizer:1"),
            (False, "maximal", "fixed:cross_tokenizer:5"),
            (True, "paired", "fixed:cross_tokenizer:3"),
            (
                True,
                "paired",
                Switching(Action("cross_tokenizer", 2), OFF, Action("ngram", 3), Action("cross_tokenizer", 6)),
            ),
        ]
    ):
        prompt = tokenizer(["The fox 😀 jumps", "天气 and the dog"][seed % 2], return_tensors="pt")["input_ids"]
        options = {"max_new_tokens": 14, "do_sample": do_sample, "temperature": 0.7 if do_sample else None}
        torch.manual_seed(seed)
        plain = model.generate(prompt, **options)
        with autospec.wrap(
            model, tokenizer=tokenizer, drafts=[source, "ngram"], policy=policy, sampling=sampling
        ) as speculator:
            torch.manual_seed(seed)
            assert torch.equal(model.generate(prompt, **options), plain)
            assert speculator.last_request is not None
            assert speculator.last_request.notes is None
            drafted += speculator.last_request.num_draft_tokens
    assert drafted > 0


def test_a_family_with_other_ids_is_accepted_as_the_same_ids() -> None:
    """Token by token, whatever the text and however it was cut into tokens."""
    size = SPELLINGS["bytes"].num_ids
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1)).tolist()
    tokenizer = KINDS["bytes"]()
    other = tiny_tokenizers.in_another_order(tokenizer, order)
    assert other.convert_ids_to_tokens(3) == tokenizer.convert_ids_to_tokens(order[3])
    model = tiny.llama(vocab_size=size)
    source = CrossTokenizer(permuted(model, order), other, method="shared")
    prompt = tokenizer("The fox 😀", return_tensors="pt")["input_ids"]
    with autospec.wrap(
        model, tokenizer=tokenizer, drafts=[source], policy="fixed:cross_tokenizer:5", sampling="paired"
    ) as speculator:
        for do_sample in (False, True):
            model.generate(prompt, max_new_tokens=30, do_sample=do_sample)
            record = speculator.last_request
            assert record is not None
            assert record.num_accepted_tokens == record.num_draft_tokens == 24


class Knows:
    """A draft that knows how the text goes on: `text`, in its own tokens."""

    def __init__(self, reading: TextReading, ids: list[int]) -> None:
        self._reading = reading
        self._ids = ids

    def propose(self, committed: Any, block_length: int) -> Proposal:
        read = list(self._reading.read(committed))
        if self._ids[: len(read)] != read:
            return Proposal()
        return Proposal(self._ids[len(read) : len(read) + block_length])


def text_session(target: Spelling, draft: Spelling, ids: list[int]) -> TextSession:
    specials = match_specials(target, draft)
    reading = TextReading(target, draft, specials)
    return TextSession(Knows(reading, ids), reading, target, draft, specials, target.num_ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["bytes", "more bytes", "sentencepiece"])
@pytest.mark.parametrize("draft", ["bytes", "more bytes", "sentencepiece"])
@pytest.mark.parametrize(("text", "least"), [(ENGLISH * 2, 0.9), (OTHERS * 2, 0.9)], ids=["english", "others"])
def test_a_draft_that_is_right_is_accepted(target: str, draft: str, text: str, least: float) -> None:
    """Spaces, bytes of characters and merges cost little: at most what a draft's end cuts off."""
    theirs, ours = SPELLINGS[target], SPELLINGS[draft]
    answer = [*theirs.start, *theirs.encode(text), theirs.roles["eos"]]
    ids = [*TextReading(theirs, ours, match_specials(theirs, ours)).read(answer)]
    session = text_session(theirs, ours, ids)
    end, proposed, accepted = max(1, len(theirs.start)), 0, 0
    while end < len(answer):
        tokens = session.propose(answer[:end], 5).tokens
        right = 0
        while right < len(tokens) and end + right < len(answer) and tokens[right] == answer[end + right]:
            right += 1
        proposed += len(tokens)
        accepted += right
        end += right + 1
    assert proposed > len(answer) / 3
    assert accepted / proposed > least


def test_the_end_is_drafted_as_the_targets_own() -> None:
    theirs, ours = SPELLINGS["more bytes"], SPELLINGS["sentencepiece"]
    committed = theirs.encode("The fox")
    draft = [*ours.start, *ours.encode("The fox jumps"), ours.roles["eos"], *ours.encode("over")]
    found = text_session(theirs, ours, draft).propose(committed, 9).tokens
    end = [*theirs.going_on(" jumps"), theirs.roles["eos"]]  # type: ignore[misc]
    assert found == [*end, *theirs.encode("over")][: len(found)]
    assert len(found) >= len(end)
    unknown = [*ours.start, *ours.encode("The fox jumps"), ours.roles["bos"], *ours.encode("over")]
    assert text_session(theirs, ours, unknown).propose(committed, 9).tokens == end[:-1]


def test_the_text_of_a_special_token_is_text() -> None:
    theirs, ours = SPELLINGS["bytes"], SPELLINGS["more bytes"]
    session = text_session(theirs, ours, ours.encode("The<|end|> fox<|stop|>"))
    tokens = session.propose(theirs.encode("The"), 60).tokens
    assert b"".join(theirs.pieces[token] for token in tokens) == b"<|end|> fox<|stop|>"


def test_another_character_than_the_one_begun_is_not_drafted() -> None:
    theirs, ours = SPELLINGS["bytes"], SPELLINGS["sentencepiece"]
    begun = [theirs.id_of(bytes([byte])) for byte in "x😀".encode()[:3]]
    right = [*ours.start, *ours.encode("x😀 fox")]
    wrong = [*ours.start, *ours.encode("x fox")]
    tokens = text_session(theirs, ours, right).propose(begun, 40).tokens  # type: ignore[arg-type]
    assert b"".join(theirs.pieces[token] for token in tokens) == "😀 fox".encode()[2:]
    assert text_session(theirs, ours, wrong).propose(begun, 40).tokens == []  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["dogs", "category", "don't", "\n\nThe", "😀👍🏽"])
def test_merges_over_the_border(word: str) -> None:
    """The target would have put the last letters and the first drafted ones together; here it did not."""
    theirs, ours = SPELLINGS["more bytes"], SPELLINGS["sentencepiece"]
    for cut in range(1, len(word)):
        committed = theirs.encode(f"The {word[:cut]}")
        ids = list(TextReading(theirs, ours, match_specials(theirs, ours)).read(committed))
        session = text_session(theirs, ours, [*ids, *(ours.going_on(word[cut:]) or [])])
        tokens = session.propose(committed, 40).tokens
        assert b"".join(theirs.pieces[token] for token in tokens) == word[cut:].encode()


SCRIPTS = st.text(st.sampled_from(ENGLISH + OTHERS * 2 + "  \n\n\u00ad\u200d\x00~"), max_size=30)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    texts=st.lists(SCRIPTS, min_size=1, max_size=3),
    noise=st.lists(st.integers(0, 700), max_size=4),
    pair=st.sampled_from([*PAIRS, ("bytes", "sentencepiece"), ("unigram", "word pieces")]),
    method=st.sampled_from(METHODS),
)
def test_a_session_says_what_a_fresh_one_says(
    texts: list[str], noise: list[int], pair: tuple[str, str], method: str
) -> None:
    model, tokenizer, small = models(*pair)
    source = CrossTokenizer(small, KINDS[pair[1]](), method=method)
    source.attach(model, tokenizer)
    sizes = request(vocab_size=SPELLINGS[pair[0]].num_ids)
    session, committed = source.start(sizes), [0]
    for text in texts:
        committed = [*committed, *SPELLINGS[pair[0]].encode(text), *noise]
        found = session.propose(committed, 3)
        assert found.tokens == source.start(sizes).propose(committed, 3).tokens
        assert found.draft_probs is None
        committed = [*committed, *found.tokens[:2]]


class TestAttach:
    @pytest.mark.parametrize("method", METHODS)
    def test_no_tokenizer_of_the_target(self, target: Any, method: str) -> None:
        with pytest.raises(DraftError, match=r"the target's tokenizer is unknown: pass wrap\(model, tokenizer=...\)"):
            autospec.wrap(target, drafts=[with_permuted_ids(target, method=method)], policy="off")

    def test_a_tokenizer_of_another_model(self, target: Any) -> None:
        source = CrossTokenizer(tiny.llama(vocab_size=60), tiny.tokenizer())
        with pytest.raises(DraftError, match="the assistant's tokenizer has token ids up to 63, its model knows 60"):
            source.attach(target, tiny.tokenizer())
        with pytest.raises(DraftError, match="the target's tokenizer has token ids up to 63, its model knows 60"):
            with_permuted_ids(target).attach(tiny.llama(vocab_size=60), tiny.tokenizer())

    def test_hardly_a_token_is_shared(self, target: Any) -> None:
        inner = json.loads(tiny.tokenizer().backend_tokenizer.to_str())
        inner["model"]["vocab"] = {
            f"{text}!" if index else text: index for text, index in inner["model"]["vocab"].items()
        }
        other = type(tiny.tokenizer())(tokenizer_object=tiny.Tokenizer.from_str(json.dumps(inner)), unk_token="a")
        small = copy.deepcopy(target)
        with pytest.raises(DraftError, match=r'share 1 tokens, the smaller has 64: too few .* method="text"'):
            CrossTokenizer(small, other, method="shared").attach(target, tiny.tokenizer())
        CrossTokenizer(small, other).attach(target, tiny.tokenizer())

    @pytest.mark.parametrize("method", METHODS)
    def test_the_same_vocabulary_works_with_a_hint(self, target: Any, method: str) -> None:
        source = CrossTokenizer(tiny.near_copy(target), tiny.tokenizer(), method=method)
        with pytest.warns(UserWarning, match=r"Assistant\(model, tokenizer=...\) does the same for less"):
            source.attach(target, tiny.tokenizer())
        assert source.start(request()).propose(tiny.prompt(9)[0].tolist(), 3).tokens

    def test_before_it(self, target: Any) -> None:
        with pytest.raises(DraftError, match="has no target yet"):
            with_permuted_ids(target).start(request())

    def test_another_device_and_training_mode(self, target: Any) -> None:
        with torch.device("meta"):
            source = CrossTokenizer(tiny.LlamaForCausalLM(target.config), tiny.tokenizer())
        with pytest.raises(DraftError, match="on meta, the target on cpu"):
            source.attach(target, tiny.tokenizer())
        with pytest.raises(DraftError, match="in training mode"):
            CrossTokenizer(tiny.near_copy(target).train(), tiny.tokenizer()).attach(target, tiny.tokenizer())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "words"}, "method='words'.*: known are text, shared"),
        ({"greedy": 1}, r"CrossTokenizer\(greedy=1\)"),
        ({"min_margin": 2}, r"CrossTokenizer\(min_margin=2\): a number from 0 to 1"),
        ({"tokenizer": "gpt2"}, "'gpt2' is not a tokenizer"),
        ({"model": "gpt2"}, r"CrossTokenizer\(str\): a transformers causal language model"),
    ],
    ids=str,
)
def test_bad_settings(target: Any, options: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"model": target, "tokenizer": tiny.tokenizer(), **options}
    with pytest.raises(ConfigurationError, match=message):
        CrossTokenizer(settings.pop("model"), settings.pop("tokenizer"), **settings)


def test_by_name_it_needs_an_object() -> None:
    with pytest.raises(ConfigurationError, match=r"pass autospec\.drafts\.CrossTokenizer\(model, tokenizer\)"):
        make_sources(["cross_tokenizer"])


def test_context_window_of_the_draft(target: Any) -> None:
    small = tiny.llama(max_position_embeddings=16)
    for method in METHODS:
        source = CrossTokenizer(small, tiny.tokenizer(order=ORDER), method=method)
        source.attach(target, tiny.tokenizer())
        session = source.start(request())
        session.propose(tiny.prompt(10)[0].tolist(), 4)
        with pytest.raises(DraftError, match="no longer fits the assistant's context window of 16 tokens"):
            session.propose([*tiny.prompt(10)[0].tolist(), *tiny.prompt(10)[0].tolist()], 4)
