"""What tokens stand for, and how a text goes on in tokens."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import ENGLISH, KINDS, OTHERS
from tokenizers import pre_tokenizers

from autospec.drafts.shared_tokens import match_specials, shared_tokens
from autospec.drafts.spelling import _BYTE_OF_LETTER, Spelling
from autospec.drafts.text_session import TextReading
from autospec.errors import ConfigurationError

SPELLINGS = {name: Spelling(make()) for name, make in KINDS.items()}
FAITHFUL = ["bytes", "more bytes", "sentencepiece"]


def test_letters_of_bytes() -> None:
    assert set(_BYTE_OF_LETTER) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(_BYTE_OF_LETTER.values()) == list(range(256))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_put_together_are_the_text(kind: str) -> None:
    spelling = SPELLINGS[kind]
    text = ENGLISH if kind in FAITHFUL else "the fox jumps over the lazy dog"
    found = b"".join(spelling.pieces[index] for index in spelling.encode(text))
    assert found.removeprefix(b" ") == text.encode()
    assert found.startswith(b" ") == spelling.adds_space == (kind in ("sentencepiece", "unigram", "word pieces"))


@pytest.mark.parametrize("kind", FAITHFUL)
@pytest.mark.parametrize(
    "text", ["ing there", " over the fox", "\n\nIn", "好的", "😀 x", "  two", "<|end|></s>", " ", "'t"]
)
def test_going_on_spells_just_that(kind: str, text: str) -> None:
    spelling = SPELLINGS[kind]
    ids = spelling.going_on(text)
    assert ids is not None
    assert b"".join(spelling.pieces[index] for index in ids) == text.encode()
    assert not set(ids) & set(spelling.specials)


@pytest.mark.parametrize("kind", FAITHFUL)
def test_a_text_goes_on_as_it_is_encoded_whole(kind: str) -> None:
    spelling = SPELLINGS[kind]
    whole = spelling.encode(ENGLISH)
    for border in (place for place, letter in enumerate(ENGLISH) if letter == " "):
        tail = spelling.going_on(ENGLISH[border:])
        assert tail == whole[len(whole) - len(tail or []) :]


def test_what_cannot_be_spelled() -> None:
    assert SPELLINGS["unigram"].going_on("好") is None
    assert SPELLINGS["word pieces"].going_on("The") is None
    assert SPELLINGS["word pieces"].going_on("ing") is not None
    assert SPELLINGS["unigram"].read("fox 好".encode())[-1] == SPELLINGS["unigram"].roles["unk"]
    assert SPELLINGS["word pieces"].read(b"The fox") == SPELLINGS["word pieces"].encode("the fox")


def test_no_tokenizer() -> None:
    with pytest.raises(ConfigurationError, match="'gpt2' is not a tokenizer"):
        Spelling("gpt2")


def test_the_tokenizer_is_left_as_it_is() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    Spelling(tokenizer).encode("<|end|>")
    assert tokenizer("<|end|>")["input_ids"] == [tokenizer.eos_token_id]


def test_special_tokens_are_matched_by_role_and_then_by_name() -> None:
    target = Spelling(tiny_tokenizers.byte_level(300, ("<|im_end|>", "<|im_start|>", "<|tool|>")))
    draft = Spelling(tiny_tokenizers.byte_level(300, ("<|end|>", "<|pad|>", "<|im_start|>")))
    specials = match_specials(target, draft)
    assert specials.writes == {0: 0, 2: 1}
    assert specials.reads == {0: (0,), 1: (2,)}
    assert specials.start == ()


@pytest.mark.parametrize("draft", ["bytes", "unigram"])
def test_bos(draft: str) -> None:
    """A BOS that the target's tokenizer puts there is read as what the draft's puts there."""
    with_bos, without = SPELLINGS["sentencepiece"], SPELLINGS[draft]
    assert with_bos.start == (1,)
    assert match_specials(with_bos, without).reads[1] == ()
    assert 1 not in match_specials(with_bos, without).writes.values()
    assert match_specials(without, with_bos).start == (1,)
    assert match_specials(with_bos, with_bos).reads[1] == (1,)
    assert match_specials(with_bos, with_bos).start == ()


def test_shared_tokens_stand_for_the_same_bytes() -> None:
    for target in SPELLINGS.values():
        for draft in SPELLINGS.values():
            shared = shared_tokens(target, draft, target.num_ids - 3, draft.num_ids)
            written = [(ours, theirs) for ours, theirs in enumerate(shared.writes.tolist()) if theirs >= 0]
            assert len({theirs for _, theirs in written}) == len(written) > 20
            assert max(theirs for _, theirs in written) < target.num_ids - 3
            for ours, theirs in written:
                assert shared.reads(theirs) == (ours,)
                assert target.pieces.get(theirs) == draft.pieces.get(ours)
    assert len(written) == SPELLINGS["word pieces"].num_ids - 3


def test_bytes_of_one_are_bytes_of_the_other() -> None:
    target, draft = SPELLINGS["bytes"], SPELLINGS["sentencepiece"]
    shared = shared_tokens(target, draft, target.num_ids, draft.num_ids)
    for byte in b"\xe4\xbd\xa0\n":
        (ours,) = shared.reads(target.id_of(bytes([byte])))  # type: ignore[arg-type]
        assert draft.pieces[ours] == bytes([byte])
    others = [theirs for theirs in target.pieces if theirs not in shared.writes.tolist()]
    assert others
    for theirs in others:
        assert b"".join(draft.pieces[ours] for ours in shared.reads(theirs)) == target.pieces[theirs]
    assert shared.reads(10**6) == ()


def reading(target: Spelling, draft: Spelling) -> TextReading:
    return TextReading(target, draft, match_specials(target, draft))


@pytest.mark.parametrize("target", FAITHFUL)
@pytest.mark.parametrize("draft", FAITHFUL)
def test_text_is_read_as_the_draft_would_encode_it(target: str, draft: str) -> None:
    theirs, ours = SPELLINGS[target], SPELLINGS[draft]
    text = reading(theirs, ours)
    found = text.read([*theirs.start, *theirs.encode(ENGLISH * 3)])
    start = ours.start if not theirs.start or theirs is ours else match_specials(theirs, ours).reads[theirs.start[0]]
    assert found == [*start, *ours.encode(ENGLISH * 3)]
    assert text.num_settled > len(found) - 256
    assert not text.is_at_start


def test_work_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = SPELLINGS["bytes"], Spelling(tiny_tokenizers.sentencepiece())
    for text in (ENGLISH, "天" * 300):
        lengths: list[int] = []
        encode = ours.encode
        monkeypatch.setattr(ours, "encode", lambda text: (lengths.append(len(text)), encode(text))[1])  # noqa: B023
        committed = theirs.encode(text * 20)
        session = reading(theirs, ours)
        session.read(committed[:-3])
        lengths.clear()
        session.read(committed)
        assert sum(lengths) < 2000
        monkeypatch.undo()


def test_a_character_cut_in_the_middle_is_not_there_yet() -> None:
    theirs, ours = SPELLINGS["bytes"], SPELLINGS["sentencepiece"]
    committed = [theirs.id_of(bytes([byte])) for byte in "x😀y".encode()]
    lengths = []
    session = reading(theirs, ours)
    for end in range(1, len(committed) + 1):
        ids = session.read(committed[:end])  # type: ignore[arg-type]
        lengths.append(len(session.unfinished))
        assert b"".join(ours.pieces.get(i, b"") for i in ids).decode().strip() == (
            "x" if end < 5 else "x😀y"[: end - 3]
        )
    assert lengths == [0, 1, 2, 3, 0, 0]


def test_special_tokens_part_texts() -> None:
    theirs = Spelling(tiny_tokenizers.byte_level(300, ("<|end|>", "<|mark|>")))
    ours = SPELLINGS["bytes"]
    session = reading(theirs, ours)
    hello, bye = theirs.encode("the fox"), theirs.encode("\nand the dog")
    found = list(session.read([1, *hello, 0]))
    assert session.is_at_start
    assert found == [*ours.encode("the fox"), ours.roles["eos"]]  # the mark has no counterpart
    assert session.read([1, *hello, 0, *bye]) == [*found, *ours.encode("\nand the dog")]


SCRIPTS = st.text(st.sampled_from(ENGLISH + OTHERS * 2 + "  \n\n\u00ad\u200d\x00~"), max_size=60)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    texts=st.lists(SCRIPTS, min_size=1, max_size=4),
    noise=st.lists(st.integers(0, 500), max_size=6),
    target=st.sampled_from(list(KINDS)),
    draft=st.sampled_from(list(KINDS)),
)
def test_what_is_read_does_not_depend_on_the_steps(texts: list[str], noise: list[int], target: str, draft: str) -> None:
    theirs, ours = SPELLINGS[target], SPELLINGS[draft]
    grown, committed = reading(theirs, ours), [0]
    for text in texts:
        committed = [*committed, *theirs.encode(text), *noise]
        found, settled = list(grown.read(committed)), grown.num_settled
        assert found == reading(theirs, ours).read(committed)
        assert all(0 <= index < ours.num_ids for index in found)
        committed.append(5)
        assert list(grown.read(committed))[:settled] == found[:settled]


def test_one_character_a_token() -> None:
    order = list(range(tiny.VOCAB))[::-1]
    theirs, ours = Spelling(tiny.tokenizer()), Spelling(tiny.tokenizer(order=order))
    text: list[Any] = [3, 9, 0, 63]
    assert reading(theirs, ours).read(text) == [60, 54, 63, 0]
    assert shared_tokens(theirs, ours, 64, 64).writes.tolist() == order
