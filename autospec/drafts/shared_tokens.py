"""Which tokens of two vocabularies are the same, by the bytes they stand for; special tokens by their role."""

from __future__ import annotations

from typing import NamedTuple

import torch

from autospec.drafts.spelling import Spelling
from autospec.drafts.translation import OtherIds


class Specials(NamedTuple):
    """How special tokens of a target are read and drafted."""

    reads: dict[int, tuple[int, ...]]  # by id of the target; those missing are left out
    writes: dict[int, int]  # by id of the draft
    start: tuple[int, ...]  # ids of the draft before the text


def match_specials(target: Spelling, draft: Spelling) -> Specials:
    """By role first, EOS to EOS; the rest by name among special tokens, since those of a family share their markers."""
    writes: dict[int, int] = {}
    pairs = [(target.roles[role], index) for role, index in draft.roles.items() if role in target.roles]
    by_name = {name: index for index, name in draft.specials.items()}
    pairs += [(index, by_name[name]) for index, name in target.specials.items() if name in by_name]
    taken: set[int] = set()
    for theirs, ours in pairs:
        if theirs not in taken and ours not in writes:
            writes[ours] = theirs
            taken.add(theirs)
    reads: dict[int, tuple[int, ...]] = {theirs: (ours,) for ours, theirs in writes.items()}
    if (bos := target.roles.get("bos")) is not None and bos in target.start and reads.get(bos) != draft.start:
        # both tokenizers say how a text begins: the target's way is in the text, and is read as the draft's
        reads[bos] = draft.start
        writes = {ours: theirs for ours, theirs in writes.items() if theirs != bos}
    return Specials(reads, writes, () if target.start else draft.start)


def shared_tokens(target: Spelling, draft: Spelling, target_size: int, draft_size: int) -> OtherIds:
    """A translation that drafts the tokens that both have.

    Tokens that only the target has are read as the draft's tokens of their text.

    Args:
        target, draft: the two tokenizers.
        target_size, draft_size: ids that the models have logits for.
    """
    specials = match_specials(target, draft)
    reads = dict(specials.reads)
    writes = torch.full((draft_size,), -1)
    for theirs, piece in target.pieces.items():
        ours = draft.id_of(piece)
        if ours is None:
            continue
        reads[theirs] = (ours,)
        if ours < draft_size and theirs < target_size and target.id_of(piece) == theirs:
            writes[ours] = theirs
    for ours, theirs in specials.writes.items():
        if ours < draft_size and theirs < target_size:
            writes[ours] = theirs

    def read(token: int) -> tuple[int, ...]:
        if token not in reads:  # found out when needed: there may be a hundred thousand
            reads[token] = tuple(draft.read(target.pieces[token])) if token in target.pieces else ()
        return reads[token]

    return OtherIds(read, writes, specials.start)
