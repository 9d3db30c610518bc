"""Heads: the same text as plain decoding, q as it was drawn, and the proposals of transformers' own generators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_heads
import torch
import transformers
from test_decoder import Alternating, both
from test_drafts import request
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation import candidate_generator

import autospec
from autospec.certify import Case, SyntheticModel, certify, random_table
from autospec.certify.cases import SAMPLING, FollowingAcceptance, Switching
from autospec.costs.calibration import calibrate
from autospec.drafts import Heads, NGram, Proposal, make_sources
from autospec.drafts.drawing import Drawing
from autospec.drafts.heads import HeadsSession
from autospec.errors import ConfigurationError, DraftError
from autospec.policies import Fixed
from autospec.types import OFF, Action

KINDS = ("mtp", "dflash", "mellum")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        "mtp": tiny_heads.llama(tmp_path_factory.mktemp("llama")),
        "dflash": tiny.llama(vocab_size=8),
        "mellum": tiny_heads.mellum(tmp_path_factory.mktemp("mellum")),
    }


@pytest.fixture(scope="module")
def drafters(targets: dict[str, Any]) -> dict[str, Any]:
    """The DFlash models; None where the heads are in the target's checkpoint."""
    return {"mtp": None, "dflash": tiny_heads.dflash(targets["dflash"]), "mellum": None}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def target(targets: dict[str, Any], kind: str) -> Any:
    return targets[kind]


@pytest.fixture
def drafter(drafters: dict[str, Any], kind: str) -> Any:
    return drafters[kind]


def prompt(target: Any, length: int = 20, seed: int = 0) -> torch.Tensor:
    return tiny.prompt(length, seed) % target.config.vocab_size


def attached(target: Any, drafter: Any, **options: Any) -> Heads:
    source = Heads(drafter, **options)
    source.attach(target, None)
    return source


def asked(target: Any, **options: Any) -> Any:
    return request(vocab_size=target.config.vocab_size, **options)


def fresh(source: Heads, target: Any, committed: list[int], **options: Any) -> HeadsSession:
    """A session that has seen the target's hidden states of a text, in one piece."""
    session = source.start(asked(target, **options))
    session.see(tiny_heads.states_of(target, source.hidden_layers, committed[:-1]))
    return session


class TestText:
    @pytest.mark.parametrize("block_length", [1, 2, 3, 8])
    def test_greedy_is_plain(self, target: Any, drafter: Any, kind: str, block_length: int) -> None:
        plain, found, record = both(
            target,
            prompt(target),
            drafts=[Heads(drafter)],
            policy=Fixed("heads", block_length=block_length),
            max_new_tokens=24,
            do_sample=False,
        )
        assert torch.equal(plain, found)
        assert record.num_judged_tokens > 10
        if kind == "mtp":
            assert 0 < record.num_accepted_tokens < record.num_judged_tokens

    @pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "repetition_penalty": 1.2, "top_k": 6}], ids=str)
    def test_sampled_text_follows_the_seed(self, target: Any, drafter: Any, options: dict[str, Any]) -> None:
        accepted = 0
        for seed in range(3):
            plain, found, record = both(
                target,
                prompt(target, 15, seed),
                drafts=[Heads(drafter, greedy=seed == 2)],
                policy=Fixed("heads", block_length=3),
                seed=seed,
                max_new_tokens=12,
                do_sample=True,
                **options,
            )
            assert torch.equal(plain, found), seed
            accepted += record.num_accepted_tokens
        assert accepted > 0

    @pytest.mark.parametrize("do_sample", [False, True])
    def test_sources_switched_from_block_to_block(self, target: Any, drafter: Any, do_sample: bool) -> None:
        for seed in range(1):
            plain, found, record = both(
                target,
                prompt(target, 30, seed),
                drafts=[Heads(drafter), NGram(min_ngram=1)],
                policy=Alternating(("none", 0), ("ngram", 4), ("heads", 2), ("none", 0), ("heads", 4), ("heads", 1)),
                seed=seed,
                max_new_tokens=30,
                do_sample=do_sample,
            )
            assert torch.equal(plain, found)
            assert {"heads:1", "heads:2", "heads:4", "ngram:4"} <= set(record.actions)

    def test_maximal_sampling(self, target: Any, drafter: Any) -> None:
        source = Heads(drafter)
        with autospec.wrap(target, drafts=[source], policy="fixed:heads:3", sampling="maximal") as speculator:
            torch.manual_seed(0)
            target.generate(prompt(target), max_new_tokens=40, do_sample=True, temperature=0.7)
            record = speculator.last_request
        assert record is not None
        assert record.notes is None
        assert 0 < record.num_accepted_tokens < record.num_judged_tokens

    @pytest.mark.parametrize("length", [1, 3])
    def test_short_prompts_and_padding(self, target: Any, drafter: Any, length: int) -> None:
        ids = prompt(target, length) + 1
        padded = torch.cat([torch.zeros((1, 4), dtype=torch.long), ids], dim=-1)
        mask = torch.tensor([[0] * 4 + [1] * length])
        counts = []
        for options in ({}, {"attention_mask": mask}):
            plain, found, record = both(
                target,
                padded if options else ids,
                drafts=[Heads(drafter)],
                policy=Fixed("heads", block_length=4),
                max_new_tokens=12,
                do_sample=False,
                **options,
            )
            assert torch.equal(plain, found)
            counts.append((found[0, -12:].tolist(), record.num_draft_tokens, record.num_accepted_tokens))
        assert counts[0] == counts[1]


class TestProposals:
    @pytest.mark.parametrize("do_sample", [False, True])
    def test_state_follows_the_committed_prefix(self, target: Any, drafter: Any, do_sample: bool) -> None:
        """After any mixture of acceptance, rejection and drafts of others it proposes what a fresh session does."""
        generator = torch.Generator().manual_seed(0)
        source = attached(target, drafter)
        committed = prompt(target, 12)[0].tolist()
        session = source.start(asked(target, do_sample=do_sample))
        seen = 0
        for turn in range(16):
            states = tiny_heads.states_of(target, source.hidden_layers, committed[:-1])
            session.see([layer[seen:] for layer in states])
            seen = len(committed) - 1
            tokens: list[int] = []
            if turn % 3:
                length = 1 + turn % 4
                torch.manual_seed(turn)
                tokens = session.propose(committed, length).tokens
                torch.manual_seed(turn)
                alone = fresh(source, target, committed, do_sample=do_sample)
                assert alone.propose(committed, length).tokens == tokens
                assert session.propose(committed, length).tokens == tokens  # nothing new: nothing else
            kept = int(torch.randint(0, len(tokens) + 1, (), generator=generator))
            others = torch.randint(1, 8, (1 + turn % 5,), generator=generator).tolist()
            committed = [*committed, *tokens[:kept], *others]

    def test_the_next_request_starts_empty(self, target: Any, drafter: Any) -> None:
        source = attached(target, drafter)
        first, second = prompt(target, 20, 1)[0].tolist(), prompt(target, 9, 2)[0].tolist()
        alone = fresh(source, target, second).propose(second, 4).tokens
        fresh(source, target, first).propose(first, 4)
        assert fresh(source, target, second).propose(second, 4).tokens == alone

    def test_no_longer_than_asked_and_trained_for(self, target: Any, drafter: Any, kind: str) -> None:
        source, committed = attached(target, drafter), prompt(target)[0].tolist()
        session = fresh(source, target, committed)
        most = {"mtp": 3, "dflash": 4, "mellum": 1}[kind]
        whole = session.propose(committed, 9).tokens
        assert len(whole) == most
        for block_length in range(1, most + 1):
            assert session.propose(committed, block_length).tokens == whole[:block_length]

    def test_paired_drafts_leave_the_targets_noise(self, target: Any, drafter: Any) -> None:
        committed = prompt(target)[0].tolist()
        session = fresh(attached(target, drafter), target, committed, do_sample=True)
        before = torch.get_rng_state()
        session.propose(committed, 4)
        assert torch.equal(torch.get_rng_state(), before)

    def test_drawn_tokens_have_the_frequencies_of_q(self, target: Any, drafter: Any) -> None:
        committed = prompt(target)[0].tolist()
        source = attached(target, drafter)
        session = fresh(source, target, committed, do_sample=True, is_paired=False, processors=[TopKLogitsWarper(3)])
        torch.manual_seed(0)
        proposals = [session.propose(committed, 1) for _ in range(120)]
        first, last = proposals[0].draft_probs, proposals[-1].draft_probs
        assert first is not None
        assert last is not None
        assert first.shape == (1, target.config.vocab_size)
        torch.testing.assert_close(first, last)
        assert float(first.sum()) == pytest.approx(1.0)
        assert int((first > 0.02).sum()) > 1
        counts = torch.bincount(torch.tensor([p.tokens[0] for p in proposals]), minlength=target.config.vocab_size)
        assert float((counts / 120 - first[0]).abs().sum()) / 2 < 0.12

    def test_q_is_processed_with_the_prefix_of_each_position(self, targets: dict[str, Any]) -> None:
        """What transformers' own layers say of the same drafts, processed one prefix at a time."""
        target = targets["mtp"]
        source, committed = attached(target, None), prompt(target)[0].tolist()
        processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(3.0), TemperatureLogitsWarper(0.7)])
        session = fresh(source, target, committed, do_sample=True, is_paired=False, processors=processors)
        proposal = session.propose(committed, 3)
        assert proposal.draft_probs is not None
        model: Any = source._head.model  # type: ignore[union-attr]
        drafted = iter(proposal.tokens)

        def forced(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            processed.append(processors(ids, scores).softmax(dim=-1))
            return torch.full_like(scores, -torch.inf).index_fill_(-1, torch.tensor([next(drafted)]), 0.0)

        processed: list[torch.Tensor] = []
        count = len(committed) - 1
        with torch.no_grad():
            tokens, _, _ = model(
                torch.tensor([committed[1:]]),
                tiny_heads.states_of(target, [-1], committed[:-1])[0][None],
                None,
                torch.arange(1, count + 1)[None],
                transformers.cache_utils.MtpCache(config=model.config),
                logits_processor=forced,
                full_input_ids=torch.tensor([committed]),
            )
        assert tokens[0].tolist() == proposal.tokens
        torch.testing.assert_close(torch.cat(processed), proposal.draft_probs)


class TestTransformersOwn:
    @pytest.mark.parametrize("penalty", [1.0, 1.3])
    def test_the_same_tokens_are_proposed(
        self, target: Any, drafter: Any, kind: str, penalty: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Greedy, block by block: the same committed text, the same drafts."""
        theirs: dict[int, list[int]] = {}
        ours: dict[int, list[int]] = {}
        name = "DFlashTokenCandidateGenerator" if kind == "dflash" else "MTPCandidateGenerator"
        generator = getattr(candidate_generator, name)
        get, propose = generator.get_candidates, HeadsSession.propose

        def noted(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            found = get(self, input_ids, **kwargs)
            theirs[input_ids.shape[1]] = found[0][0, input_ids.shape[1] :].tolist()
            return found

        def noted_too(self: Any, committed: Any, block_length: int) -> Proposal:
            found = propose(self, committed, block_length)
            ours[len(committed)] = found.tokens
            return found

        monkeypatch.setattr(generator, "get_candidates", noted)
        monkeypatch.setattr(HeadsSession, "propose", noted_too)
        ids = prompt(target)
        options = {"max_new_tokens": 30, "do_sample": False, "repetition_penalty": penalty}
        their_options = (
            {"use_mtp": True} if kind != "dflash" else {"assistant_model": drafter, "speculation_type": "dflash"}
        )
        their_text = target.generate(ids, **options, **their_options)
        with autospec.wrap(target, drafts=[Heads(drafter)], policy="fixed:heads:8"):
            our_text = target.generate(ids, **options)
        assert torch.equal(their_text, our_text)
        assert len(ours) > 5
        for length, tokens in ours.items():
            assert tokens == theirs[length][: len(tokens)], length  # only the last block asks for fewer
        assert sum(len(tokens) for tokens in ours.values()) > len(ours) or kind == "mellum"


class Watching:
    """A source of somebody else's that only looks; it drafts what it was told to."""

    name = "watching"

    def __init__(self, layers: tuple[int, ...], answer: list[int], fails: int = 0) -> None:
        self.hidden_layers = layers
        self.seen: list[list[torch.Tensor]] = []
        self._answer = answer
        self._fails = fails

    def attach(self, target: Any, tokenizer: Any) -> None:
        pass

    def start(self, request: Any) -> Any:
        return self

    def see(self, hidden_states: Any) -> None:
        self.seen.append([states.clone() for states in hidden_states])
        if len(self.seen) == self._fails:
            raise RuntimeError("looked away")

    def propose(self, committed: Any, block_length: int) -> Proposal:
        count = sum(len(states[0]) for states in self.seen)
        assert count == len(committed) - 1
        tokens = self._answer[len(committed) : len(committed) + block_length]
        return Proposal([(t + 1) % 64 if (len(committed) + i) % 4 == 0 else t for i, t in enumerate(tokens)])


class TestHiddenStates:
    @pytest.mark.parametrize("make", [tiny.llama, lambda: tiny.mistral(window=8)], ids=["llama", "mistral"])
    def test_those_of_all_committed_tokens_and_of_no_others(self, make: Any) -> None:
        model, ids, layers = make(), tiny.prompt(20), (1, -1, 0)
        answer = model.generate(ids, max_new_tokens=30, do_sample=False)[0].tolist()
        source = Watching(layers, answer)
        policy = Alternating(("watching", 5), ("none", 0), ("ngram", 3))
        with autospec.wrap(model, drafts=[source, NGram(min_ngram=1)], policy=policy) as speculator:
            assert model.generate(ids, max_new_tokens=30, do_sample=False)[0].tolist() == answer
            record = speculator.last_request
        assert record is not None
        assert 0 < record.num_accepted_tokens < record.num_judged_tokens
        expected = tiny_heads.states_of(model, layers, answer[:-1])
        for found, layer in zip(zip(*source.seen, strict=True), expected, strict=True):
            torch.testing.assert_close(torch.cat(found), layer, rtol=1e-6, atol=1e-6)

    def test_asking_changes_no_logits_and_costs_no_forward(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, ids = tiny.llama(), tiny.prompt(20)
        answer = model.generate(ids, max_new_tokens=20, do_sample=False)[0].tolist()
        forwards: list[tuple[int, Any, torch.Tensor]] = []
        forward = type(model).forward

        def noted(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            outputs = forward(self, input_ids, **kwargs)
            forwards.append((input_ids.shape[1], kwargs.get("output_hidden_states"), outputs.logits.clone()))
            return outputs

        runs = []
        for layers in ((), (0, -1)):
            source = Watching(layers, answer)
            if not layers:
                source.see([torch.zeros(0)])
                monkeypatch.setattr(source, "propose", lambda c, k, s=source: Proposal(s._answer[len(c) : len(c) + k]))
            else:
                monkeypatch.setattr(source, "propose", lambda c, k, s=source: Proposal(s._answer[len(c) : len(c) + k]))
            with autospec.wrap(model, drafts=[source], policy="fixed:watching:4"):
                monkeypatch.setattr(type(model), "forward", noted)
                model.generate(ids, max_new_tokens=20, do_sample=False)
                monkeypatch.setattr(type(model), "forward", forward)
            runs.append(list(forwards))
            forwards.clear()
        asked_nothing, asked_some = runs
        assert [width for width, _, _ in asked_nothing] == [width for width, _, _ in asked_some]
        assert {str(what) for _, what, _ in asked_nothing} == {"None"}
        assert {str(what) for _, what, _ in asked_some} == {"[0, -1]"}
        for (_, _, without), (_, _, with_) in zip(asked_nothing, asked_some, strict=True):
            assert torch.equal(without, with_)

    def test_a_session_that_cannot_look_is_switched_off(self) -> None:
        model, ids = tiny.llama(), tiny.prompt(20)
        answer = model.generate(ids, max_new_tokens=20, do_sample=False)[0].tolist()
        for sampling in ("paired", "maximal"):
            source = Watching((-1,), answer, fails=3)
            with autospec.wrap(model, drafts=[source], policy="fixed:watching:4", sampling=sampling) as speculator:
                with pytest.warns(UserWarning, match="watching switched off: RuntimeError: looked away"):
                    assert model.generate(ids, max_new_tokens=20, do_sample=False)[0].tolist() == answer
                assert speculator.last_request is not None
                assert len(source.seen) == 3

    def test_layers_that_the_target_has_not(self) -> None:
        model, ids = tiny.llama(), tiny.prompt(20)
        said = "watching switched off: the target gives no hidden states of layer 7"
        source, warned = Watching((7,), []), pytest.warns(UserWarning, match=said)
        with autospec.wrap(model, drafts=[source], policy="fixed:watching:2"), warned:
            model.generate(ids, max_new_tokens=4)

    def test_with_policy_off_nobody_is_shown_anything(self) -> None:
        source = Watching((-1,), [])
        with autospec.wrap(tiny.llama(), drafts=[source], policy="off") as speculator:
            speculator.model.generate(tiny.prompt(20), max_new_tokens=4)
        assert source.seen == []

    def test_a_prompt_run_in_chunks(self, target: Any, drafter: Any) -> None:
        ids, options = prompt(target, 20), {"max_new_tokens": 12, "do_sample": False, "prefill_chunk_size": 8}
        plain = target.generate(ids, **options)
        with autospec.wrap(target, drafts=[Heads(drafter)], policy="fixed:heads:2") as speculator:
            with pytest.warns(UserWarning, match="seen for 0 of 20 tokens: those of a prompt that came in a cache"):
                assert torch.equal(target.generate(ids, **options), plain)
            assert speculator.last_request is not None
            assert speculator.last_request.num_draft_tokens == 0

    def test_a_users_own_wish_is_left_to_generate(self, targets: dict[str, Any]) -> None:
        target = targets["mtp"]
        options = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_hidden_states": True}
        with autospec.wrap(target, drafts=[Heads()], policy="fixed:heads:2") as speculator:
            with pytest.warns(UserWarning, match="hidden states were asked for"):
                output = target.generate(prompt(target), **options)
            assert len(output.hidden_states) == 4
            assert speculator.last_request is not None
            assert speculator.last_request.num_draft_tokens == 0


class Showing(SyntheticModel):
    """Its hidden states are the tokens, as its cache has them."""

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        outputs = super().forward(input_ids, logits_to_keep, **kwargs)
        if kwargs.get("output_hidden_states"):
            outputs.hidden_states = (input_ids[..., None].to(torch.float64),)
        return outputs


class Reading:
    """Drafts by a table from the tokens that it saw as hidden states, which have to be those committed."""

    name = "heads"
    hidden_layers = (-1,)

    def __init__(self, draft: SyntheticModel) -> None:
        self._draft = draft
        self._seen: list[int] = []

    def attach(self, target: Any, tokenizer: Any) -> None:
        pass

    def start(self, request: Any) -> Any:
        self._request = request
        return self

    def see(self, hidden_states: Any) -> None:
        self._seen += [int(state) for state in hidden_states[0][:, 0]]

    def propose(self, committed: Any, block_length: int) -> Proposal:
        assert self._seen == list(committed[:-1])
        drawing = Drawing(self._request, [*self._seen, committed[-1]], is_greedy=False)
        while len(drawing.tokens) < block_length:
            drawing.draw(self._draft.logits_after([*self._seen, committed[-1], *drawing.tokens])[None])
        return drawing.proposal(0.0)


@pytest.fixture(scope="module")
def tiniest(tmp_path_factory: pytest.TempPathFactory) -> Any:
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    target = tiny_heads.llama(tmp_path_factory.mktemp("tiniest"), num_mtp_layers=2, vocab_size=3, **shape)
    with torch.no_grad():
        target.lm_head.weight.div_(20.0)
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits_after(prefix: list[int]) -> torch.Tensor:
        key = tuple(prefix)
        if key not in known:
            with torch.no_grad():
                known[key] = target(torch.tensor([prefix])).logits[0, -1]
        return known[key]

    target.logits_after = logits_after
    return target


class TestCertified:
    @pytest.mark.parametrize("sampling", SAMPLING)
    @pytest.mark.parametrize("policy", ["fixed", "switching", "following"])
    def test_a_source_that_sees_hidden_states(self, policy: str, sampling: str) -> None:
        p, q = random_table(61, 3), random_table(62, 3)
        policies: dict[str, Any] = {
            "fixed": lambda: Fixed("heads", block_length=2),
            "switching": lambda: Switching(Action("heads", 2), OFF, Action("ngram", 3), Action("heads", 1)),
            "following": lambda: FollowingAcceptance("heads"),
        }
        case = Case(
            "seeing",
            Showing(p, 3),
            lambda: {"heads": Reading(SyntheticModel(q, 3)), "ngram": NGram(min_ngram=1)},
            policies[policy],
            prompt=(0, 1, 0),
            max_new_tokens=4 if policy == "switching" else 3,
            sampling=sampling,
            processors=lambda: LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)]),
        )
        certificate = next(certify([case]))
        assert certificate.is_exact, certificate
        assert certificate.accepted > 0.1

    def case(self, target: Any, sampling: str) -> Case:
        source = attached(target, None)
        return Case(
            "real layers",
            target,
            lambda: {"heads": source},
            lambda: Fixed("heads", block_length=2),
            prompt=(0, 1, 2),
            sampling=sampling,
            processors=lambda: LogitsProcessorList([TemperatureLogitsWarper(0.5)]),
        )

    @pytest.mark.parametrize("sampling", SAMPLING)
    def test_real_layers(self, tiniest: Any, sampling: str) -> None:
        certificate = next(certify([self.case(tiniest, sampling)]))
        assert certificate.is_exact, certificate
        assert certificate.accepted > 0.1

    def test_raw_logits_as_q_are_found(self, tiniest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        proposal = Drawing.proposal

        def raw(self: Drawing, catch_up_seconds: float) -> Proposal:
            found = proposal(self, catch_up_seconds)
            assert found.draft_probs is not None
            unprocessed = found.draft_probs**0.5
            return Proposal(found.tokens, unprocessed / unprocessed.sum(dim=-1, keepdim=True))

        monkeypatch.setattr(Drawing, "proposal", raw)
        assert next(certify([self.case(tiniest, "maximal")])).total_variation > 1e-4


class TestFailures:
    def test_a_head_that_overflows_is_switched_off(self, tmp_path: Path) -> None:
        target = tiny_heads.llama(tmp_path)
        plain = target.generate(prompt(target), max_new_tokens=12, do_sample=False)
        source = Heads()
        with autospec.wrap(target, drafts=[source], policy="fixed:heads:3") as speculator:
            source._head.model.layers[0].post_norm.weight.data.fill_(torch.inf)  # type: ignore[union-attr]
            with pytest.warns(UserWarning, match="heads switched off: the draft's logits are not finite"):
                assert torch.equal(target.generate(prompt(target), max_new_tokens=12, do_sample=False), plain)
            assert speculator.last_request is not None
            assert speculator.last_request.fallback_reason is None
            assert speculator.last_request.num_draft_tokens == 0

    @pytest.mark.parametrize("is_paired", [True, False])
    def test_what_was_drawn_before_a_failure_is_submitted(self, targets: dict[str, Any], is_paired: bool) -> None:
        target = targets["mtp"]
        source, committed = attached(target, None), prompt(target)[0].tolist()
        layers = source._head.model.layers  # type: ignore[union-attr]
        session = fresh(source, target, committed, do_sample=True, is_paired=is_paired)
        assert len(session.propose(committed, 3).tokens) == 3
        hook = layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        assert len(session.propose(committed, 3).tokens) == 1
        hook.remove()
        with pytest.raises(DraftError, match="ZeroDivisionError"):
            session.propose(committed, 3)

    @pytest.mark.parametrize("sampling", ["paired", "maximal"])
    def test_any_failure_is_survived(self, targets: dict[str, Any], sampling: str) -> None:
        target = targets["mtp"]
        source = Heads()
        with autospec.wrap(target, drafts=[source], policy="fixed:heads:3", sampling=sampling) as speculator:
            layer = source._head.model.layers[2]  # type: ignore[union-attr]
            calls: list[int] = []

            def breaks(*_: Any) -> None:
                calls.append(len(calls))
                if len(calls) > 2:  # caught up, drafted once
                    raise RuntimeError("broken")

            hook = layer.register_forward_pre_hook(breaks)
            with pytest.warns(UserWarning, match="heads switched off: RuntimeError: broken"):
                found = target.generate(prompt(target), max_new_tokens=20, do_sample=True)
            hook.remove()
            assert found.shape[1] == 40
            assert speculator.last_request is not None
            assert speculator.last_request.num_draft_tokens == 3 + 2

    def test_hidden_states_that_are_missing(self, targets: dict[str, Any]) -> None:
        target = targets["mtp"]
        session = attached(target, None).start(asked(target))
        with pytest.raises(DraftError, match=r"hidden states were seen for 0 of 4 tokens"):
            session.propose([1, 2, 3, 4, 5], 2)


class TestRefusals:
    def refused(self, target: Any, message: str, drafter: Any = None) -> None:
        with pytest.raises(DraftError, match=message) as caught:
            autospec.wrap(target, drafts=[Heads(drafter)], policy="off")
        assert "\n" not in str(caught.value)
        assert "generate" not in vars(target)

    def test_no_layers_in_the_config(self) -> None:
        self.refused(tiny.llama(), r"LlamaForCausalLM has no multi-token-prediction layers \(no num_mtp_layers")

    def test_not_from_a_checkpoint(self) -> None:
        self.refused(tiny.llama(num_mtp_layers=1), "was not loaded from a checkpoint")

    def test_layers_missing_from_the_checkpoint(self, tmp_path: Path) -> None:
        model = tiny.llama(num_mtp_layers=1)
        type(model)  # the layers are named in the config alone
        tiny_heads.LlamaWithMtp(model.config).save_pretrained(tmp_path)
        target = tiny_heads.LlamaWithMtp.from_pretrained(tmp_path).eval()
        self.refused(target, r"could not be loaded from .*: RuntimeError: The following MtpModel weights are missing")

    def test_a_family_that_keeps_no_layers(self, tmp_path: Path) -> None:
        tiny.llama(num_mtp_layers=1).save_pretrained(tmp_path)
        target = tiny.LlamaForCausalLM.from_pretrained(tmp_path).eval()
        self.refused(target, "the multi-token-prediction layers of LlamaForCausalLM could not be loaded")

    def test_training_mode(self, tmp_path: Path) -> None:
        target = tiny_heads.llama(tmp_path)
        source = Heads()
        target.train()
        with pytest.raises(DraftError, match="LlamaWithMtp is in training mode"):
            source.attach(target, None)
        plain = tiny.llama(vocab_size=8)
        self.refused(plain, "MuseGlimmerAssistantModel is in training mode", tiny_heads.dflash(plain).train())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"hidden_size": 16}, "its hidden size is 16, the target's 32"),
            ({"target_layer_ids": [0, 2]}, r"it reads the target's layers \[0, 2\], the target has layers 0 to 1"),
            ({"mask_token_id": 8}, "its mask token is 8, the target has ids 0 to 7"),
            ({"block_size": 1}, "its window of 1 leaves nothing to draft"),
        ],
        ids=str,
    )
    def test_a_dflash_model_of_another_target(self, options: dict[str, Any], message: str) -> None:
        target = tiny.llama(vocab_size=8)
        made = f"MuseGlimmerAssistantModel was made for another target: {message}"
        self.refused(target, made, tiny_heads.dflash(target, **options))

    def test_another_device(self) -> None:
        target = tiny.llama(vocab_size=8)
        drafter = tiny_heads.dflash(target).to("meta")
        self.refused(target, "the DFlash model is on meta, the target on cpu: move it first", drafter)

    def test_several_devices(self) -> None:
        target = tiny.llama()
        target.hf_device_map = {"model": 0, "lm_head": 1}
        with pytest.raises(DraftError, match="spread over several devices"):
            Heads().attach(target, None)

    def test_encoder_decoder(self) -> None:
        config = transformers.T5Config(vocab_size=16, d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8)
        with pytest.raises(DraftError, match="T5ForConditionalGeneration is an encoder-decoder model"):
            Heads().attach(transformers.T5ForConditionalGeneration(config).eval(), None)

    def test_what_breaks_on_the_first_forward(self) -> None:
        target = tiny.llama(vocab_size=8)
        drafter = tiny_heads.dflash(target)
        drafter.encoder.fc = torch.nn.Linear(3, 32, dtype=torch.float64)
        self.refused(target, "heads cannot draft for LlamaForCausalLM: RuntimeError: mat1 and mat2", drafter)

    @pytest.mark.parametrize(("kind", "name"), [("mtp", "MtpModel"), ("dflash", "DFlashCache")])
    def test_an_older_transformers(
        self, targets: dict[str, Any], drafters: dict[str, Any], kind: str, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transformers, "__version__", "5.17.0")
        message = rf"heads need {name} of transformers 5\.24 or newer, this is 5\.17\.0: upgrade it"
        self.refused(targets[kind], message, drafters[kind])

    @pytest.mark.parametrize(
        ("kind", "module", "name"),
        [
            ("mtp", "modeling_layers", "MtpModel"),
            ("mtp", "cache_utils", "MtpCache"),
            ("dflash", "cache_utils", "DFlashCache"),
        ],
    )
    def test_a_transformers_without_the_layers(
        self,
        targets: dict[str, Any],
        drafters: dict[str, Any],
        kind: str,
        module: str,
        name: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.delattr(f"transformers.{module}.{name}")
        self.refused(targets[kind], f"heads need {name} of transformers 5.24 or newer, this is", drafters[kind])

    def test_settings(self) -> None:
        with pytest.raises(ConfigurationError, match=r"Heads\(LlamaForCausalLM\): a DFlash model of transformers"):
            Heads(tiny.llama())
        with pytest.raises(ConfigurationError, match=r"Heads\(greedy=1\)"):
            Heads(greedy=1)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"pass autospec\.drafts\.Heads\(\)"):
            make_sources(["heads"])

    def test_before_it_is_attached_and_after_a_move(self, targets: dict[str, Any]) -> None:
        with pytest.raises(DraftError, match="no target yet"):
            Heads().start(request())
        source = attached(targets["mtp"], None)
        source._device = torch.device("meta")
        with pytest.raises(DraftError, match="the heads are on meta, the target has moved to cpu: wrap it again"):
            source.start(request())


def test_heads_share_the_targets_embedding_and_leave_it_alone(targets: dict[str, Any]) -> None:
    target = targets["mtp"]
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    source = attached(target, None)
    model: Any = source._head.model  # type: ignore[union-attr]
    assert model.shared_head is target.lm_head
    assert model.embed_tokens is target.get_input_embeddings()
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {target.dtype}
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())


def test_a_normed_embedding_is_read_without_its_norm() -> None:
    from autospec.drafts.dflash import _without_norm

    class Normed(torch.nn.Embedding):
        def __init__(self) -> None:
            super().__init__(8, 4)
            self.embed_norm = torch.nn.LayerNorm(4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            normed: torch.Tensor = self.embed_norm(super().forward(ids))
            return normed

    embedding = Normed()
    ids = torch.tensor([[1, 2]])
    before = embedding(ids)
    twin = _without_norm(embedding)
    assert torch.equal(twin(ids)[0], embedding.weight[1:3])
    assert twin.weight is embedding.weight
    assert torch.equal(embedding(ids), before)


def test_heads_can_be_timed(target: Any, drafter: Any) -> None:
    source = attached(target, drafter)
    table = calibrate(target, {"heads": source}, block_lengths=(1, 2), contexts=(32,), repeats=1)
    assert table.draft_seconds("heads", 2, 32) > 0
    assert "heads" in table.drafts
