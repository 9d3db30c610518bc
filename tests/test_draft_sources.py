"""experiments/09_draft_sources: transformers' own drafting as draft sources, and where ngram accepts less."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from test_drafts import request

from autospec.drafts import EarlyExit

EXPERIMENT = "09_draft_sources"


def test_their_prompt_lookup_copies_after_the_first_match(experiment: Any) -> None:
    source = experiment.TheirPromptLookup()
    target = tiny.llama()
    target.generation_config.eos_token_id = 60
    source.attach(target, None)
    session = source.start(request())
    assert session.propose([1, 2, 3, 4, 1, 2, 5, 1, 2], 2).tokens == [3, 4]
    assert session.propose([1, 2, 3, 4, 1, 2, 5, 1, 2], 4).tokens == [3, 4, 1, 2]
    assert session.propose([7, 1, 8, 2, 1], 1).tokens == [8]  # down to one token
    assert session.propose([1, 2, 3], 2).tokens == []


@pytest.mark.filterwarnings("ignore:.*generation_config.*")
def test_their_assisted_generation_drafts_what_early_exit_drafts(experiment: Any) -> None:
    target = tiny.llama(num_hidden_layers=4)
    theirs, ours = experiment.TheirAssisted(2), EarlyExit(2)
    for source in (theirs, ours):
        source.attach(target, None)
    their_session, our_session = theirs.start(request()), ours.start(request())
    committed = tiny.prompt(20)[0].tolist()
    for block_length in (4, 2, 4, 1):
        drafts = our_session.propose(committed, block_length).tokens
        assert their_session.propose(committed, block_length).tokens == drafts
        committed = [*committed, *drafts[:1], 9]


def test_where_fewer_are_accepted(experiment: Any) -> None:
    def row(source: str, accepted: list[int], length: int = 2) -> dict[str, Any]:
        names = {"decoding": "greedy", "segment": "qa", "block_length": length, "source": source}
        return {**names, "accepted": accepted, "blocks": 10}

    theirs = experiment.TheirPromptLookup.name
    assert experiment.below([row("ngram", [3, 2]), row(theirs, [3, 2])]) == []
    found = experiment.below([row("ngram", [3, 1]), row(theirs, [3, 2]), row("ngram", [9], 1), row(theirs, [1], 1)])
    assert found == ["greedy, qa, length 2: 0.400 against 0.500"]
