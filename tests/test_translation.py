"""Drafts with ids of their own: what the target's ids are read as, and what the draft's ids stand for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from test_drafts import TestContract as Contract
from test_drafts import request
from transformers import SuppressTokensLogitsProcessor, TopKLogitsWarper

import autospec
from autospec.certify.cases import Switching
from autospec.drafts import Assistant
from autospec.drafts.translation import OtherIds
from autospec.drafts.vocabulary import fingerprint
from autospec.errors import ConfigurationError, DraftError
from autospec.types import OFF, Action

pytestmark = pytest.mark.compat


def permuted(model: Any, ids: list[int], unknown_id: int = 0, extra_rows: int = 0, **config: Any) -> Any:
    """A copy that calls `ids[i]` its own id i."""
    draft = copy.deepcopy(model)
    draft.resize_token_embeddings(len(ids) + extra_rows)
    with torch.no_grad():
        for ours, theirs in (
            (draft.get_input_embeddings(), model.get_input_embeddings()),
            (draft.get_output_embeddings(), model.get_output_embeddings()),
        ):
            ours.weight[: len(ids)] = theirs.weight[ids]
    draft.config.target_token_ids = ids
    draft.config.unknown_id = unknown_id
    for name, value in config.items():
        setattr(draft.config, name, value)
    return draft


def shuffled(count: int, seed: int = 0) -> list[int]:
    return torch.randperm(tiny.VOCAB, generator=torch.Generator().manual_seed(seed))[:count].tolist()


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama()


@pytest.fixture(params=["whole", "subset", "subset-greedy"])
def source(request: pytest.FixtureRequest, target: Any) -> Any:
    count, options = {"whole": (64, {}), "subset": (40, {}), "subset-greedy": (40, {"greedy": True})}[request.param]
    made = Assistant(permuted(tiny.near_copy(target), shuffled(count), extra_rows=1, unknown_id=count), **options)
    made.attach(target, None)
    return made


class TestContract(Contract):
    """The same for a draft with its own ids."""


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("sampling", ["paired", "maximal"])
def test_all_ids_in_another_order_draft_what_the_same_ids_draft(target: Any, do_sample: bool, sampling: str) -> None:
    near = tiny.near_copy(target)
    committed = tiny.prompt(20)[0].tolist()
    for seed in range(5):
        proposals = []
        for draft in (near, permuted(near, shuffled(64))):
            torch.manual_seed(seed)
            session = Assistant(draft).start(request(do_sample, is_paired=sampling == "paired"))
            first = session.propose(committed, 4)
            proposals.append((first, session.propose([*committed, *first.tokens[:2], 7], 5)))
        for one, other in zip(*proposals, strict=True):
            assert one.tokens == other.tokens
            if one.draft_probs is not None:
                torch.testing.assert_close(one.draft_probs, other.draft_probs)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_blocks_say_what_generate_says(target: Any, do_sample: bool, ordered: bool) -> None:
    ids = sorted(shuffled(40)) if ordered else shuffled(40)
    draft = permuted(tiny.near_copy(target, noise=0.05), ids, unknown_id=3)
    options = {"max_new_tokens": 24, "do_sample": do_sample}
    policies: list[Any] = [f"fixed:assistant:{k}" for k in (1, 3, 6)]
    policies.append(Switching(Action("assistant", 2), OFF, Action("ngram", 3), Action("assistant", 5)))
    accepted = 0
    for seed, policy in enumerate(policies):
        prompt = tiny.prompt(15, seed=seed)
        torch.manual_seed(seed)
        plain = target.generate(prompt, **options)
        with autospec.wrap(target, drafts=[Assistant(draft), "ngram"], policy=policy) as speculator:
            torch.manual_seed(seed)
            assert torch.equal(target.generate(prompt, **options), plain)
            assert speculator.last_request is not None
            assert speculator.last_request.notes is None
            accepted += speculator.last_request.num_accepted_tokens
    assert accepted > 0


def test_q_is_renormalised_over_the_ids_that_the_draft_has(target: Any) -> None:
    ids = shuffled(40)
    session = Assistant(permuted(target, ids)).start(
        request(do_sample=True, is_paired=False, processors=[TopKLogitsWarper(5)])
    )
    committed = [ids[i % 40] for i in range(20)]
    torch.manual_seed(0)
    proposals = [session.propose(committed, 1) for _ in range(400)]
    q = proposals[0].draft_probs
    assert q is not None
    with torch.no_grad():
        logits = target(torch.tensor([committed])).logits[0, -1].float()
    outside = torch.ones(tiny.VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(ids), False)
    expected = TopKLogitsWarper(5)(None, logits.masked_fill(outside, -torch.inf)[None]).softmax(-1)
    torch.testing.assert_close(q, expected)
    counts = torch.bincount(torch.tensor([p.tokens[0] for p in proposals]), minlength=tiny.VOCAB) / 400
    assert float((counts - q[0]).abs().sum()) / 2 < 0.08


def test_other_ids_are_read_as_the_unknown_one(target: Any) -> None:
    ids = shuffled(40)
    others = [token for token in range(tiny.VOCAB) if token not in ids]
    draft = permuted(target, ids, unknown_id=7)
    text = [ids[1], others[0], ids[2], others[1], 5000]
    one = Assistant(draft).start(request()).propose(text, 4)
    same = Assistant(draft).start(request()).propose([ids[1], ids[7], ids[2], ids[7], ids[7]], 4)
    assert one.tokens == same.tokens
    assert set(one.tokens) <= set(ids)


def test_a_block_ends_where_processors_leave_nothing_to_draw(target: Any) -> None:
    ids = shuffled(40)
    for do_sample in (False, True):
        for processor in (SuppressTokensLogitsProcessor(ids), SuppressTokensLogitsProcessor(list(range(64)))):
            session = Assistant(permuted(target, ids)).start(request(do_sample, processors=[processor]))
            assert session.propose(tiny.prompt(9)[0].tolist(), 4).tokens == []


def test_tokens_of_several_ids_are_rolled_back(target: Any) -> None:
    """One token of the target may be several of the draft's: the cache is cut back to what the text is read as."""
    from autospec.drafts.assistant import AssistantSession, StopRule

    def reads(token: int) -> tuple[int, ...]:
        return {50: (1, 2, 3), 51: (4, 5), 52: (1, 2), 53: ()}.get(token, (token,) if token < 48 else (0,))

    def session() -> AssistantSession:
        translation = OtherIds(reads, torch.tensor([*range(48), *[-1] * 16]), start=(9,))
        return AssistantSession(target, request(), translation, StopRule(), is_greedy=True)

    generator = torch.Generator().manual_seed(3)
    grown, committed = session(), [50, 3, 53, 51]
    for _ in range(25):
        tokens = grown.propose(committed, 3).tokens
        assert tokens == session().propose(committed, 3).tokens
        with torch.no_grad():
            ids = [9, *(index for token in committed for index in reads(token))]
            assert tokens[0] == int(target(torch.tensor([ids])).logits[0, -1, :48].argmax())
        kept = int(torch.randint(0, 4, (), generator=generator))
        more = torch.randint(45, 60, (int(torch.randint(1, 4, (), generator=generator)),), generator=generator)
        committed = [*committed, *tokens[:kept], *more.tolist()]
    nothing = OtherIds(reads, torch.tensor([*range(48), *[-1] * 16]))
    unread = AssistantSession(target, request(), nothing, StopRule(), is_greedy=True)
    assert unread.propose([53, 53], 3).tokens == []


class TestConfiguration:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"target_token_ids": [1, 2, 2]}, "has 2 more than once"),
            ({"target_token_ids": [1, -2, 3]}, "a list of whole numbers from 0 on"),
            ({"target_token_ids": [1, 2, 3.0]}, "a list of whole numbers from 0 on"),
            ({"target_token_ids": []}, "a list of whole numbers from 0 on"),
            ({"target_token_ids": 5}, "a list of whole numbers from 0 on"),
            ({"target_token_ids": [1, 2]}, "has 2 ids, the model has logits for 3"),
            ({"target_token_ids": [1, 2, 3, 4]}, "has 4 ids, the model has logits for 3"),
            ({"unknown_id": 3}, "unknown_id=3: one of the ids that the model can read, 0 to 2"),
            ({"unknown_id": None}, "unknown_id=None"),
            ({"unknown_id": True}, "unknown_id=True"),
            ({"tokenizer_fingerprint": 5}, "tokenizer_fingerprint=5: a text is needed"),
        ],
        ids=str,
    )
    def test_malformed(self, target: Any, config: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            Assistant(permuted(target, [5, 6, 7], **config))

    def test_one_further_id_may_be_the_unknown_one(self, target: Any) -> None:
        session = Assistant(permuted(target, [5, 6, 7], unknown_id=3, extra_rows=1)).start(request())
        assert set(session.propose([5, 6, 60], 4).tokens) <= {5, 6, 7}

    def test_the_targets_tokenizer(self, target: Any) -> None:
        mine, other = tiny.tokenizer(), tiny.tokenizer(order=shuffled(64))
        named = Assistant(permuted(target, [5, 6, 7], tokenizer_fingerprint=fingerprint(mine)))
        named.attach(target, mine)
        named.attach(target, None)
        with pytest.raises(DraftError, match=f"of fingerprint {fingerprint(mine)}, the target's has"):
            named.attach(target, other)
        unnamed = permuted(target, [5, 6, 7])
        with pytest.warns(UserWarning, match="compared by size alone"):
            Assistant(unnamed).attach(target, mine)
        Assistant(unnamed, tokenizer=mine).attach(target, mine)
        with pytest.raises(DraftError, match="differs from the target's"):
            Assistant(unnamed, tokenizer=other).attach(target, mine)

    def test_ids_that_the_target_has_not(self, target: Any) -> None:
        with pytest.raises(DraftError, match="drafts token id 64, the target has ids 0 to 63"):
            Assistant(permuted(target, [5, 6, 7], target_token_ids=[5, 64, 7])).attach(target, None)

    def test_it_survives_saving(self, target: Any, tmp_path: Any) -> None:
        permuted(target, [5, 6, 7], unknown_id=1).save_pretrained(tmp_path)
        draft = type(target).from_pretrained(tmp_path)
        assert set(Assistant(draft).start(request()).propose([5, 60], 4).tokens) <= {5, 6, 7}
