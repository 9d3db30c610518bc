"""The search for a policy on scored traffic: split, search, choice, and what it says of itself."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from autospec.costs.model import CostModel
from autospec.costs.table import CostTable, Curve
from autospec.errors import AutospecError, ConfigurationError
from autospec.policies.registry import build_policy
from autospec.policies.tuned import make_tuned, read_tuned
from autospec.scores import DraftScores, OfferScores, ScoredRequest
from autospec.scores.folder import ScoreFolder
from autospec.scores.luck import Luck
from autospec.tune.candidates import OFF
from autospec.tune.choice import can_be_named, choose
from autospec.tune.evaluation import Setting, seconds_by_segment, walks
from autospec.tune.intervals import said, speed_up
from autospec.tune.policy_file import write_policy
from autospec.tune.report import lines
from autospec.tune.search import Search, Tried, derived_seed
from autospec.tune.split import split
from autospec.tune.workers import Job, helping, shared_storage
from tests.postgres_server import fresh_database

WHEN = datetime(2026, 1, 1, tzinfo=UTC)
TOKENS = 40


class Costs:
    """Verification rises by a fiftieth of a step for each token; the draft costs a fifth of a step a token."""

    block_lengths = (1, 2, 4, 8)
    version = 0

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        return 0.040 + 0.0008 * (num_tokens - 1)

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        return 0.008 * block_length if source == "assistant" else 1e-4

    def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
        return False


def scored(number: int, segment: str, rate: float, copies: float, conversation: str | None = None) -> ScoredRequest:
    """A request whose model draft is right at `rate`, and whose retrieval is right at `copies`."""
    rng = np.random.default_rng(number)
    right = rng.random(TOKENS) < copies
    runs = np.array([next((i for i, r in enumerate(right[start:]) if not r), 0) for start in range(TOKENS)])
    draft = DraftScores(
        np.full(TOKENS, rate, dtype=np.float32),
        np.full(TOKENS, 0.5, dtype=np.float32),
        np.ones(TOKENS, dtype=np.float32),
        np.zeros(TOKENS, dtype=np.int16),
    )
    offer = OfferScores(
        np.full(TOKENS, 8, dtype=np.int16),
        np.minimum(runs, 8).astype(np.int16),
        np.full(TOKENS, 3, dtype=np.int16),
        ((),) * TOKENS,
    )
    return ScoredRequest(
        request_id=f"r{number:04}",
        started_at=WHEN + timedelta(seconds=number),
        segment=segment,
        prompt_tokens=100,
        output_tokens=TOKENS,
        max_new_tokens=TOKENS,
        do_sample=False,
        temperature=0.0,
        drafts={"assistant": draft},
        offers={"ngram": offer},
        conversation=conversation,
    )


TRAFFIC = [
    scored(number, segment, *rates)
    for number, (segment, rates) in enumerate(
        itertools.islice(itertools.cycle([("copy", (0.3, 0.9)), ("chat", (0.85, 0.05)), ("noise", (0.05, 0.02))]), 120)
    )
]
SETTING = Setting(Costs(), Luck(0))


def search(**options: object) -> Search:
    settings = {"sources": ("ngram", "assistant"), "block_lengths": Costs.block_lengths, **options}
    return Search(TRAFFIC, SETTING, **settings)  # type: ignore[arg-type]


class TestSplit:
    def test_the_last_requests_are_held_out(self) -> None:
        train, rest = split(TRAFFIC, held_out=0.25)
        assert (len(train), len(rest)) == (90, 30)
        assert max(each.started_at for each in train) < min(each.started_at for each in rest)

    def test_no_conversation_is_in_both_parts(self) -> None:
        requests = [scored(n, "s", 0.5, 0.5, conversation=f"c{n % 25}") for n in range(100)]
        train, rest = split(requests, by="conversation", held_out=0.3)
        names = [{each.conversation for each in part} for part in (train, rest)]
        assert not names[0] & names[1]
        assert 10 < len(rest) < 60

    def test_a_conversation_across_the_border_is_trained_on(self) -> None:
        requests = [scored(n, "s", 0.5, 0.5, conversation="long" if n in (60, 80) else None) for n in range(100)]
        train, rest = split(requests, held_out=0.3)
        assert "r0080" in {each.request_id for each in train}
        assert len(rest) == 29

    def test_too_few_and_bad_arguments(self) -> None:
        with pytest.raises(ConfigurationError, match="at least 2 of each"):
            split(TRAFFIC[:2])
        with pytest.raises(ConfigurationError, match="known are time, conversation"):
            split(TRAFFIC, by="block")
        with pytest.raises(ConfigurationError, match="between 0 and 1"):
            split(TRAFFIC, held_out=1.0)


def test_intervals_hold_what_they_should() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        seconds = rng.gamma(5.0, 1.0, 60)
        off = seconds * 1.3 * rng.normal(1.0, 0.2, 60)
        found = speed_up(off.tolist(), seconds.tolist(), seed=seed)
        hits += found.low <= 1.3 <= found.high
        assert found.low <= found.ratio <= found.high
    assert hits >= 180


class TestSearch:
    def test_it_begins_with_what_is_usual_and_gets_no_worse(self) -> None:
        one = search()
        list(one.run(trials=25))
        tried = one.tried()
        assert {each.part.get("policy", "fixed") for each in tried} >= {"guard", "goodput", "fixed", "hedge"}
        usual = next(
            each for each in tried if each.part.get("policy") == "goodput" and each.part["settings"]["optimism"] == 1.0
        )
        assert tried[0].share <= usual.share
        assert tried == sorted(tried, key=lambda each: each.share)

    def test_the_same_seed_tries_the_same(self) -> None:
        parts = []
        for _ in range(2):
            one = search(seed=3)
            list(one.run(trials=14))
            parts.append([trial.user_attrs["part"] for trial in one.study.get_trials()])
        assert parts[0] == parts[1]

    def test_it_goes_on_after_an_interruption(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 'study.db'}"
        first = search(storage=url)
        list(first.run(trials=8))
        second = search(storage=url)
        list(second.run(trials=14))
        trials = second.study.get_trials()
        assert len(trials) == 14
        parts = [str(trial.user_attrs["part"]) for trial in trials]
        assert len(set(parts[8:])) >= 3
        assert parts[8:] != parts[:6]

    def test_candidates_tried_before_are_not_walked_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one = search()
        list(one.run(trials=6))
        walked: list[object] = []
        monkeypatch.setattr(Search, "_walk", lambda self, trial, part: walked.append(part) or {"s": (1.0, 1.0)})
        uses = {"uses ngram": "ngram", "uses assistant": "assistant"}
        one.study.enqueue_trial({"policy": "hedge", "pooled": False, **uses})
        list(one.run(trials=7))
        assert not walked

    def test_time_ends_it(self) -> None:
        ticks = itertools.count()
        one = search()
        found = list(one.run(seconds=3, clock=lambda: float(next(ticks))))
        assert 1 <= len(found) <= 3

    def test_seeds_of_workers_differ(self) -> None:
        assert len({derived_seed(1, finished, worker) for finished in range(5) for worker in range(5)}) == 25

    def test_several_processes_on_one_fresh_file(self, tmp_path: Path) -> None:
        """The schema is made by whoever comes first; no trial is lost."""
        url = f"sqlite:///{tmp_path / 'study.db'}"
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); import test_tune as t; "
            "list(t.search(storage=sys.argv[2], worker=int(sys.argv[3]), seed=1).run(trials=12))"
        )
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(Path(__file__).parent), url, str(n)], stderr=subprocess.PIPE, text=True
            )
            for n in range(4)
        ]
        errors = [worker.communicate()[1] for worker in workers]
        assert [worker.returncode for worker in workers] == [0] * 4, errors
        assert len(search(storage=url).tried()) >= 8

    def test_two_processes_may_be_given_one_waiting_trial(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The one that comes later goes on with the next."""
        one = search()

        def finished_by_another(trial: optuna.Trial, part: object) -> object:
            trial.set_user_attr("seconds", {"copy": [0.5, 1.0]})
            one.study.tell(trial.number, 0.5)
            raise optuna.exceptions.UpdateFinishedTrialError

        with monkeypatch.context() as patched:
            patched.setattr(one, "_walk", finished_by_another)
            assert one._try() is None
        assert one._try() is not None

    def test_workers_that_begin_together_try_different_candidates(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 'study.db'}"
        one, other = search(storage=url), search(storage=url)
        list(one.run(trials=len(one.study.get_trials())))  # what is usual
        for _ in range(4):
            one._try()
            other._try()
        parts = [str(trial.user_attrs["part"]) for trial in one.study.get_trials()[-8:]]
        assert len(set(parts)) >= 6

    def test_tables_that_another_process_is_making_are_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        create, calls = optuna.create_study, []

        def failing_at_first(**options: Any) -> optuna.Study:
            calls.append(options)
            if len(calls) < 3:
                raise RuntimeError("UNIQUE constraint failed: alembic_version.version_num")
            return create(**options)

        monkeypatch.setattr(optuna, "create_study", failing_at_first)
        search()
        assert len(calls) == 3

    def test_a_storage_that_cannot_be_used_is_named(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("autospec.tune.study._PAUSES", ())
        with pytest.raises(AutospecError, match="storage cannot be used"):
            search(storage=f"sqlite:///{tmp_path}/nowhere/study.db")

    def test_the_study_of_other_requests_is_refused(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 'study.db'}"
        list(search(storage=url).run(trials=2))
        settings: dict[str, Any] = {
            "sources": ("ngram", "assistant"),
            "block_lengths": Costs.block_lengths,
            "storage": url,
        }
        other_luck = replace(SETTING, luck=Luck(1))
        for requests, setting, changed in (
            (TRAFFIC[:50], SETTING, {}),
            (TRAFFIC, SETTING, {"sources": ("ngram",)}),
            (TRAFFIC, other_luck, {}),
            (TRAFFIC, SETTING, {"origin": "another assistant"}),
        ):
            with pytest.raises(ConfigurationError, match="of other requests, draft sources or models"):
                Search(requests, setting, **{**settings, **changed})
        Search(TRAFFIC[:50], SETTING, **{**settings, "name": "another"})
        Search(TRAFFIC, SETTING, **settings)


def table() -> CostTable:
    """`Costs`, as a table that can be written down."""
    lengths, tokens = Costs.block_lengths, (1, 2, 3, 5, 9)
    costs = Costs()
    verify = Curve((64,), tokens, (tuple(costs.verify_seconds(each, 64) for each in tokens),))
    drafts = {
        name: Curve((64,), lengths, (tuple(costs.draft_seconds(name, each, 64) for each in lengths),))
        for name in ("ngram", "assistant")
    }
    return CostTable(block_lengths=lengths, verify=verify, drafts=drafts)


def job_of(scores: Path, request_ids: list[str], storage: str | None, *, trials: int) -> Job:
    return Job(
        scores=scores,
        request_ids=request_ids,
        offer=Setting(CostModel(table()), Luck(0)).offer("here"),
        luck=0,
        memory={},
        memory_limit=None,
        sources=("ngram", "assistant"),
        block_lengths=Costs.block_lengths,
        storage=storage,
        name="autospec",
        seed=0,
        origin="",
        trials=trials,
        seconds=None,
    )


class TestTogether:
    def test_all_go_by_the_costs_of_the_first(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path / 'study.db'}"
        dear = replace(table(), verify=Curve((64,), (1, 9), ((0.04, 0.4),)))
        first = Search(
            TRAFFIC,
            Setting(CostModel(table()), Luck(0), host_seconds=0.001),
            sources=("ngram", "assistant"),
            block_lengths=Costs.block_lengths,
            storage=url,
            device="here",
        )
        second = Search(
            TRAFFIC,
            Setting(CostModel(dear), Luck(0)),
            sources=("ngram", "assistant"),
            block_lengths=Costs.block_lengths,
            storage=url,
            device="elsewhere",
        )
        assert (first.device, second.device) == ("here", "here")
        assert second.setting.costs.table == table()  # type: ignore[attr-defined]
        assert second.setting.host_seconds == 0.001
        assert len(second.study.get_trials()) == len(first.study.get_trials())  # queued once

    def test_a_study_nobody_says_the_content_of(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("autospec.tune.study._PAUSES", (0.0,))
        url = f"sqlite:///{tmp_path / 'study.db'}"
        optuna.create_study(storage=url, study_name="autospec")
        with pytest.raises(ConfigurationError, match="nobody said of what"):
            search(storage=url)

    def test_processes_share_a_file_that_is_gone_afterwards(self, tmp_path: Path) -> None:
        folder = ScoreFolder(tmp_path / "scores", {"target": "t"})
        for request in TRAFFIC:
            folder.add(request)
        with shared_storage(None, 3) as storage:
            assert storage is not None
            job = job_of(folder.path, [each.request_id for each in TRAFFIC[:90]], storage, trials=12)
            one = job.search(TRAFFIC[:90])
            with helping(job, 2):
                pass  # the others do it all
            trials = one.study.get_trials()
            assert 12 <= len([trial for trial in trials if trial.state.is_finished()]) <= 13
            assert not [trial for trial in trials if trial.state == optuna.trial.TrialState.FAIL]
            queued = [trial.params for trial in trials if trial.params.get("block_length") == 4]
            assert len({str(params) for params in queued}) == len(queued)  # nobody tried another one's
            path = Path(storage.removeprefix("journal:"))
            assert path.exists()
        assert not path.exists()

    @pytest.fixture
    def postgres(self) -> Iterator[str]:
        with fresh_database() as url:
            yield url

    def test_several_processes_on_postgresql(self, tmp_path: Path, postgres: str) -> None:
        folder = ScoreFolder(tmp_path / "scores", {"target": "t"})
        for request in TRAFFIC[:30]:
            folder.add(request)
        job = job_of(folder.path, [each.request_id for each in TRAFFIC[:30]], postgres, trials=8)
        one = job.search(TRAFFIC[:30])
        with helping(job, 1):
            list(one.run(trials=8))
        finished = [trial for trial in one.study.get_trials() if trial.state.is_finished()]
        assert 8 <= len(finished) <= 9
        assert len({trial.number for trial in finished}) == len(finished)
        elsewhere = replace(job, offer={**job.offer, "device": "elsewhere", "host_seconds": 1.0})
        joined = elsewhere.search(TRAFFIC[:30], worker=1)
        assert (joined.device, joined.setting.host_seconds) == ("here", 0.0)
        for each in (one, joined):
            each.close()

    def test_a_process_that_fails_is_said(self, tmp_path: Path) -> None:
        with shared_storage(None, 2) as storage:
            job = job_of(tmp_path / "nowhere", ["a"], storage, trials=1)
            with pytest.warns(UserWarning, match="1 of 1 more processes of the search failed"), helping(job, 1):
                pass


class TestMemory:
    def test_a_source_that_does_not_fit_is_not_chosen(self) -> None:
        train, held_out = split(TRAFFIC)
        small = replace(SETTING, memory={"ngram": 10, "assistant": 1000}, memory_limit=500)
        one = Search(train, small, sources=("ngram", "assistant"), block_lengths=(4,))
        list(one.run(trials=12))
        assert any("assistant" in str(each.part) for each in one.tried())
        violated = [trial for trial in one.study.get_trials() if "assistant" in str(trial.user_attrs["part"])]
        assert all(trial.constraints["memory"] > 0 for trial in violated if trial.state.name == "COMPLETE")
        choice = choose(one.tried(), train, held_out, small)
        assert choice.sources == {"ngram"}

    def test_sources_of_all_segments_together_fit(self) -> None:
        train, held_out = split(TRAFFIC)
        parts = [{"source": name, "block_length": 4} for name in ("ngram", "assistant")]
        tried = sorted(
            (Tried(part, seconds_by_segment(list(walks(part, train, SETTING)))) for part in parts),
            key=lambda each: each.share,
        )
        assert choose(tried, train, held_out, SETTING).sources == {"ngram", "assistant"}
        either = replace(SETTING, memory={"ngram": 300, "assistant": 400}, memory_limit=500)
        assert choose(tried, train, held_out, either).sources == {"ngram"}
        with pytest.raises(ConfigurationError, match="more memory"):
            choose(tried, train, held_out, replace(either, memory_limit=200))


class TestChoice:
    def test_segments_are_merged_unless_one_is_surely_faster_by_itself(self) -> None:
        kinds = [("copy", 0.05, 0.95), ("s0", 0.8, 0.1), ("s1", 0.8, 0.1), ("s2", 0.8, 0.1)]
        train, held_out = split([scored(number, *kinds[number % 4]) for number in range(120)])
        draft, copy = ({"source": name, "block_length": 4} for name in ("assistant", "ngram"))
        luckier = {**draft, "block_length": 2}  # by its sums in one segment, and by nothing else
        tried = [Tried(part, seconds_by_segment(list(walks(part, train, SETTING)))) for part in (draft, copy, luckier)]
        seconds = tried[0].seconds["s1"]
        tried[2] = Tried(luckier, {**tried[2].seconds, "s1": (seconds[0] * 0.999, seconds[1])})
        choice = choose(tried, train, held_out, SETTING)
        found = {each.segment: each.part for each in choice.segments}
        assert found["copy"] == copy
        assert found["s0"] == found["s1"] == found["s2"] == tried[0].part
        assert choice.contents({})["drafts"] == {"ngram": {"source": "ngram"}}

    def test_nothing_tried_is_said(self) -> None:
        with pytest.raises(ConfigurationError, match="more trials"):
            choose([], *split(TRAFFIC), SETTING)

    def test_any_name_of_a_segment_is_written_or_left_to_the_default(self, tmp_path: Path) -> None:
        names = ['a."b"\\', "half \ud800", "", "\x1b[31m\n", "日本"]
        requests = [replace(each, segment=names[number % 5]) for number, each in enumerate(TRAFFIC)]
        train, held_out = split(requests)
        one = Search(train, SETTING, sources=("ngram", "assistant"), block_lengths=(4,))
        list(one.run(trials=6))
        choice = choose(one.tried(), train, held_out, SETTING)
        kept = {name: {"source": "ngram", "block_length": 2} for name in names}
        for each in choice.segments:
            assert ("no text" in each.why) == (each.segment == "half \ud800")
        path = tmp_path / "Policy.TOML"
        write_policy(path, {**choice.contents({}), "segments": {n: kept[n] for n in names if can_be_named(n)}})
        made = read_tuned(path, lambda name, settings: build_policy(name, settings, Costs))
        assert set(made.segments) == set(names) - {"half \ud800"}
        text = "\n".join(lines(choice, one.tried(), []))
        assert "\x1b" not in text
        text.encode()

    def test_each_segment_gets_what_is_good_for_it(self) -> None:
        train, held_out = split(TRAFFIC)
        one = Search(train, SETTING, sources=("ngram", "assistant"), block_lengths=Costs.block_lengths)
        list(one.run(trials=25))
        choice = choose(one.tried(), train, held_out, SETTING)
        by_name = {each.segment: each for each in choice.segments}
        assert by_name["noise"].part == OFF
        assert "not surely above 1" in by_name["noise"].why
        for name in ("copy", "chat"):
            assert by_name[name].part != OFF
            assert by_name[name].held_out is not None
            assert by_name[name].held_out.low > 1.0
        assert choice.held_out.ratio > 1.2
        contents = choice.contents({"requests": len(TRAFFIC)})
        policy = make_tuned(contents, lambda name, settings: build_policy(name, settings, Costs))
        assert policy.settings["made"] == {"requests": 120}

    def test_what_wins_by_luck_alone_is_not_shipped(self) -> None:
        """Fits the training part, and nothing else: the draft was right there, and never after."""
        early = [scored(n, "s", 0.9, 0.0) for n in range(30)]
        late = [scored(n, "s", 0.02, 0.0) for n in range(30, 60)]
        one = Search(early, SETTING, sources=("assistant",), block_lengths=(4,))
        list(one.run(trials=8))
        choice = choose(one.tried(), early, late, SETTING)
        (segment,) = choice.segments
        assert segment.part == OFF
        assert choice.default == OFF
        assert choice.held_out.ratio == pytest.approx(1.0)

    def test_small_segments_go_with_the_others(self) -> None:
        few = [scored(n, "few", 0.9, 0.0) for n in (1000, 1001, 1002)]
        requests = sorted([*TRAFFIC, *few], key=lambda each: each.started_at)
        train, held_out = split(requests)
        one = Search(train, SETTING, sources=("ngram", "assistant"), block_lengths=(4,))
        list(one.run(trials=6))
        choice = choose(one.tried(), [*train, *few], held_out, SETTING)
        found = next(each for each in choice.segments if each.segment == "few")
        assert found.part == choice.default
        assert "3 requests to choose by" in found.why


def test_totals_by_segment_add_up() -> None:
    walked = list(walks({"source": "ngram", "block_length": 4}, TRAFFIC, SETTING))
    sums = seconds_by_segment(walked)
    assert sum(on for on, _ in sums.values()) == pytest.approx(sum(each.seconds for each in walked))
    assert sums["copy"][0] < sums["copy"][1]


def test_luck_of_an_id_follows_its_scores() -> None:
    """Scored again, by another draft say, a request keeps its draws and not its outcomes."""
    luck = Luck(0)
    assert not luck.runs(scored(1, "s", 0.0, 0.0), "assistant").any()
    assert luck.runs(scored(1, "s", 1.0, 0.0), "assistant")[0] == TOKENS


def test_blocks_that_may_end_pay_for_what_lies_beyond_the_answer() -> None:
    """The draft does not know where an answer ends: one that is never unsure drafts as much as without a stop."""
    request = replace(scored(1, "s", 1.0, 0.0), max_new_tokens=400)
    part = {"source": "assistant", "block_length": 32}
    (plain,) = walks(part, [request], SETTING)
    (stopped,) = walks({**part, "least_margin": 0.05}, [request], SETTING)
    assert stopped.seconds == pytest.approx(plain.seconds)
    assert stopped.num_draft_tokens == plain.num_draft_tokens


def test_few_requests_are_said_and_prove_nothing() -> None:
    few = speed_up([2.0] * 3, [1.0] * 3)
    assert (few.requests, few.is_sure, said(few)) == (3, False, "2.00x (of 3)")
    assert said(speed_up([2.0] * 8, [1.0] * 8)) == "2.00x (2.00 to 2.00)"
    early, late = split([scored(number, "s", 0.9, 0.0) for number in range(24)], held_out=0.25)
    one = Search(early, SETTING, sources=("assistant",), block_lengths=(4,))
    list(one.run(trials=3))
    choice = choose(one.tried(), early, late, SETTING)
    assert choice.default == OFF
    assert "6 held-out requests to judge by, 8 are needed" in choice.segments[0].why


def test_later_turns_are_walked_after_earlier_ones(tmp_path: Path) -> None:
    folder = ScoreFolder(tmp_path / "scores", {"target": "t"})
    earlier = replace(scored(1, "s", 0.5, 0.5), request_id="b")
    folder.add(replace(earlier, request_id="a", turn=1))
    folder.add(earlier)
    assert [each.request_id for each in folder.read()] == ["b", "a"]


def test_a_small_segment_that_loses_with_what_all_others_have_is_decoded_plainly() -> None:
    """Too few to choose by, and all the same slower on what was held out."""
    kinds = [("copy", 0.05, 0.95)] * 5 + [("noise", 0.02, 0.02)]
    train, held_out = split([scored(number, *kinds[number % 6]) for number in range(90)], held_out=0.4)
    part = {"source": "ngram", "block_length": 8}
    tried = [Tried(part, seconds_by_segment(list(walks(part, train, SETTING))))]
    choice = choose(tried, train, held_out, SETTING, least_requests=20)
    found = {each.segment: each for each in choice.segments}
    assert choice.default != OFF
    assert found["copy"].part != OFF
    assert found["noise"].part == OFF
    assert "slower with what all others have" in found["noise"].why
