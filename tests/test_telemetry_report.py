from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from autospec.errors import ConfigurationError
from autospec.telemetry.bootstrap import paired_interval, unpaired_interval
from autospec.telemetry.labels import clip, columns, visible
from autospec.telemetry.pages.marks import WIDTH
from autospec.telemetry.report import build_report, to_dict, to_html, to_text
from autospec.telemetry.rows import Report, SegmentRow
from autospec.types import Comparison, Deployment, PhaseSeconds, RequestRecord

ROOT = Path(__file__).parents[1]
HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><!--<script>&\"'",
    "y" * 10_000,
    "\x1b[31mred\x00\x07\nnew line\ttab",
    "\u202egnp.exe\u2066\u200f\u05d0",
    "e" + "\u0301" * 500,
    "\u6f22" * 300,
    "half \ud800",
    "",
    "all",
]


def request(name: str, tokens: int, seconds: float, **changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "segment": "code",
        "policy": "adaptive",
        "is_control": False,
        "do_sample": False,
        **changes,
    }
    return RequestRecord(
        request_id=name,
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        decoding="greedy",
        prompt_tokens=5,
        output_tokens=tokens,
        seconds=PhaseSeconds(prefill=seconds / 4, verify=seconds * 3 / 4),
        **values,  # type: ignore[arg-type]
    )


def control(name: str, tokens: int, seconds: float, **changes: object) -> RequestRecord:
    return request(name, tokens, seconds, is_control=True, policy="control", **changes)


def paired(count: int, factor: float, segment: str = "code") -> tuple[list[RequestRecord], list[Comparison]]:
    generator = np.random.default_rng(3)
    requests, comparisons = [], []
    for i in range(count):
        tokens = int(generator.integers(20, 200))
        seconds = tokens * float(generator.uniform(0.03, 0.05))
        noise = float(generator.uniform(0.9, 1.1))
        requests.append(control(f"{segment} c{i}", tokens, seconds, segment=segment))
        requests.append(request(f"{segment} t{i}", tokens, seconds / factor * noise, segment=segment))
        comparisons.append(Comparison(f"{segment} c{i}", f"{segment} t{i}", True))
    return requests, comparisons


def only(report: Report) -> SegmentRow:
    assert len(report.segments) == 1
    return report.segments[0]


def numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [float(value)] if isinstance(value, int | float) else []


class TestNumbers:
    def test_sums_are_formed_first_and_divided_last(self) -> None:
        row = only(
            build_report(
                [control("c1", 100, 10.0), control("c2", 10, 5.0), request("a", 100, 5.0), request("b", 1, 5.0)], []
            )
        )
        assert row.tokens_per_second == pytest.approx(101 / 10)
        assert row.control_tokens_per_second == pytest.approx(110 / 15)
        assert row.speed_up == pytest.approx((15 / 110) / (10 / 101))
        assert row.seconds == PhaseSeconds(prefill=2.5, verify=7.5)
        assert (row.output_tokens, row.control_output_tokens) == (101, 110)

    def test_failed_and_fallback_requests_count_with_their_seconds(self) -> None:
        row = only(
            build_report(
                [
                    *(control(f"c{i}", 10, 1.0) for i in range(2)),
                    request("a", 10, 1.0),
                    request("b", 0, 3.0, error="out of memory"),
                    request("d", 10, 1.0, fallback_reason="beams"),
                ],
                [],
            )
        )
        assert (row.requests, row.failed_requests, row.fallback_requests) == (3, 1, 1)
        assert row.speed_up == pytest.approx((2 / 20) / (5 / 20))

    def test_controls_are_never_counted_as_requests(self) -> None:
        row = only(build_report([control("c", 10, 1.0, blocks=10, actions={"none": 10})], []))
        assert (row.requests, row.control_requests, row.output_tokens, row.blocks, row.usual_action) == (
            0,
            1,
            0,
            0,
            None,
        )
        assert (row.tokens_per_second, row.mean_acceptance_length) == (None, None)

    def test_acceptance(self) -> None:
        row = only(
            build_report(
                [
                    request(
                        "a",
                        30,
                        1.0,
                        blocks=10,
                        acceptance_lengths={1: 2, 3: 4, 4: 4},
                        num_draft_tokens=40,
                        num_judged_tokens=35,
                        num_accepted_tokens=20,
                        at_risk=(10, 8, 6),
                        accepted=(8, 6, 0),
                        actions={"ngram:4": 7, "none": 3},
                    ),
                    request(
                        "b",
                        6,
                        1.0,
                        blocks=3,
                        acceptance_lengths={1: 2, 2: 1},
                        num_draft_tokens=3,
                        num_judged_tokens=2,
                        num_accepted_tokens=1,
                        at_risk=(2,),
                        accepted=(1,),
                        actions={"none": 3, "suffix:1": 2},
                    ),
                    request("beams", 500, 1.0, fallback_reason="beams"),
                ],
                [],
            )
        )
        assert row.mean_acceptance_length == pytest.approx(
            (30 + 4) / 13
        )  # the first token of an answer is prefill's, of no block
        assert (row.num_draft_tokens, row.num_judged_tokens, row.num_accepted_tokens) == (43, 37, 21)
        assert row.acceptance_by_position == (9 / 12, 6 / 8, 0.0)
        assert row.usual_action == "ngram:4"

    def test_a_position_that_was_never_judged_has_no_share(self) -> None:
        row = only(build_report([request("a", 3, 1.0, blocks=3, at_risk=(4, 0), accepted=(0,))], []))
        assert row.acceptance_by_position == (0.0, None)

    def test_identity_counts(self) -> None:
        requests = [control("c", 10, 1.0)]
        requests += [request(f"g{i}", 10, 1.0) for i in range(5)]
        requests += [request(f"s{i}", 10, 1.0, do_sample=True) for i in range(3)]
        verdicts = {
            "g0": (True, None),
            "g1": (False, True),
            "g2": (False, False),
            "g3": (False, None),
            "g4": (None, None),
            "s0": (True, None),
            "s1": (False, True),
            "s2": (None, None),
        }
        row = only(
            build_report(requests, [Comparison("c", name, same, is_tie=tie) for name, (same, tie) in verdicts.items()])
        )
        assert (row.greedy_compared, row.greedy_identical, row.greedy_ties, row.greedy_different) == (4, 1, 1, 2)
        assert (row.sampled_compared, row.sampled_identical) == (2, 1)

    def test_share_slower(self) -> None:
        requests = [
            control("c", 10, 1.0),
            request("slower", 10, 1.1),
            request("same", 10, 1.0),
            request("longer but as fast", 20, 2.0),
            request("nothing came", 0, 0.1),
            request("alone", 10, 9.0),
        ]
        pairs = [Comparison("c", item.request_id, None) for item in requests[1:5]]
        row = only(build_report(requests, pairs))
        assert (row.paired_requests, row.share_slower) == (4, 0.5)
        assert only(build_report(requests, [])).share_slower is None

    def test_comparisons_whose_requests_are_missing_are_counted_apart(self) -> None:
        report = build_report(
            [control("c", 10, 1.0), request("a", 10, 1.0)],
            [Comparison("c", "gone", True), Comparison("a", "c", True), Comparison("gone", "a", True)],
        )
        assert report.unmatched_comparisons == 3
        assert report.all.greedy_compared == 0
        assert "3 comparisons were left out" in to_text(report)


class TestIntervals:
    def test_paired_when_every_request_has_a_control(self) -> None:
        requests, comparisons = paired(30, 1.5)
        row = only(build_report(requests, comparisons, resamples=500, seed=7))
        assert (
            row.interval_method
            == "paired bootstrap over 30 control requests, each with its requests, 500 resamples, seed 7"
        )
        assert row.speed_up_low is not None
        assert row.speed_up_high is not None
        assert row.speed_up is not None
        assert 1.4 < row.speed_up_low < row.speed_up < row.speed_up_high < 1.6
        assert row.verdict == "faster"

    def test_unpaired_when_one_has_none(self) -> None:
        requests, comparisons = paired(30, 1.5)
        row = only(build_report(requests, comparisons[1:], resamples=500))
        assert (
            row.interval_method == "unpaired bootstrap over 30 requests and 30 control requests, 500 resamples, seed 0"
        )
        assert row.speed_up_low is not None

    def test_pairing_removes_what_prompts_have_in_common(self) -> None:
        requests, comparisons = paired(30, 1.5)
        with_pairs, without = only(build_report(requests, comparisons)), only(build_report(requests, []))
        assert with_pairs.speed_up == pytest.approx(without.speed_up)

        def width(row: SegmentRow) -> float:
            assert row.speed_up_low is not None
            assert row.speed_up_high is not None
            return row.speed_up_high - row.speed_up_low

        assert width(with_pairs) < width(without)

    def test_requests_that_share_a_control_share_a_prompt(self) -> None:
        requests, comparisons = paired(5, 1.5)
        again = [replace(item, request_id=item.request_id + " again") for item in requests if not item.is_control]
        more = [replace(item, request_id=item.request_id + " again") for item in comparisons]
        once, twice = (
            only(build_report(requests, comparisons)),
            only(build_report(requests + again, comparisons + more)),
        )
        assert (
            twice.interval_method
            == "paired bootstrap over 5 control requests, each with its requests, 2000 resamples, seed 0"
        )
        assert (twice.requests, twice.control_requests) == (10, 5)
        assert (twice.speed_up_low, twice.speed_up_high) == pytest.approx((once.speed_up_low, once.speed_up_high))

    @pytest.mark.parametrize(("factor", "verdict"), [(2.0, "faster"), (1.0, "unclear"), (0.6, "slower")])
    def test_verdicts(self, factor: float, verdict: str) -> None:
        assert only(build_report(*paired(20, factor))).verdict == verdict

    def test_the_same_report_whatever_the_order(self) -> None:
        requests, comparisons = paired(20, 1.2)
        assert build_report(requests, comparisons) == build_report(requests[::-1], comparisons[::-1])

    @pytest.mark.parametrize(("treated", "controls"), [(1, 5), (5, 1), (5, 0), (0, 5)])
    def test_too_little_data_is_said_and_never_a_number(self, treated: int, controls: int) -> None:
        requests = [request(f"t{i}", 10, 1.0) for i in range(treated)] + [
            control(f"c{i}", 10, 1.0) for i in range(controls)
        ]
        report = build_report(requests, [])
        for row in (only(report), report.all):
            assert (row.speed_up, row.speed_up_low, row.speed_up_high, row.interval_method) == (None, None, None, None)
            assert (row.note, row.verdict) == ("too little data", None)

    def test_three_are_too_few_for_a_verdict(self) -> None:
        requests = [request(f"t{i}", 10, 1.0) for i in range(3)] + [control(f"c{i}", 10, 2.0) for i in range(3)]
        row = only(build_report(requests, []))
        assert (row.speed_up, row.speed_up_low, row.interval_method, row.verdict) == (2.0, None, None, None)

    def test_no_output_tokens_is_said_too(self) -> None:
        requests = [request(f"t{i}", 0, 1.0) for i in range(5)] + [control(f"c{i}", 10, 1.0) for i in range(5)]
        row = only(build_report(requests, []))
        assert (row.note, row.speed_up, row.speed_up_low) == ("no output tokens", None, None)

    def test_coverage(self) -> None:
        """Of many samples of a known ratio, about 95 % of the intervals hold it."""
        generator = np.random.default_rng(11)
        hits = 0
        for _ in range(120):
            seconds = generator.gamma(9.0, 1.0, size=(2, 40))
            tokens = np.full(40, 10.0)
            control_sums, treated_sums = (np.stack([row, tokens], axis=1) for row in (seconds[0] * 1.3, seconds[1]))
            for interval in (paired_interval, unpaired_interval):
                found = interval(control_sums, treated_sums, resamples=300, seed=1)
                assert found is not None
                hits += found[0] <= 1.3 <= found[1]
        assert 0.9 < hits / 240 < 0.99

    def test_many_requests_are_resampled_in_parts(self) -> None:
        generator = np.random.default_rng(5)
        values = np.stack([generator.uniform(1, 2, 30_000), np.full(30_000, 10.0)], axis=1)
        low, high = unpaired_interval(values, values, resamples=60, seed=0) or (0.0, 0.0)
        assert 0.98 < low < 1 < high < 1.02


class TestGroups:
    def test_by_several_keys(self) -> None:
        gpu = Deployment("h", "cuda: H200", "m", "bf16", (), {})
        requests = [
            request("a", 1, 1.0),
            request("b", 1, 1.0, do_sample=True),
            request("d", 1, 1.0, policy="fixed", deployment=gpu),
            request("e", 1, 1.0, segment="chat"),
        ]
        report = build_report(requests, [], group_by=("segment", "decoding", "policy", "device"))
        assert [tuple(row.group.values()) for row in report.segments] == [
            ("chat", "greedy", "adaptive", "unknown"),
            ("code", "greedy", "adaptive", "unknown"),
            ("code", "greedy", "fixed", "cuda: H200"),
            ("code", "sampled", "adaptive", "unknown"),
        ]
        assert report.all.requests == 4

    def test_a_control_serves_every_policy_of_its_group(self) -> None:
        requests = [*(control(f"c{i}", 10, 2.0) for i in range(2)), control("other", 10, 9.0, segment="chat")]
        requests += [request(f"{policy}{i}", 10, 1.0, policy=policy) for policy in ("p", "q") for i in range(2)]
        report = build_report(requests, [], group_by=("segment", "policy"))
        assert {
            tuple(row.group.values()): (row.requests, row.control_requests, row.speed_up) for row in report.segments
        } == {
            ("chat", "control"): (0, 1, None),
            ("code", "p"): (2, 2, 2.0),
            ("code", "q"): (2, 2, 2.0),
        }

    def test_no_key_means_one_row(self) -> None:
        requests, comparisons = paired(4, 1.5)
        assert only(build_report(requests, comparisons, group_by=())).requests == 4

    @pytest.mark.parametrize(
        "options", [{"group_by": ["colour"]}, {"group_by": ["segment", "segment"]}, {"resamples": 0}]
    )
    def test_unknown_options(self, options: dict[str, object]) -> None:
        with pytest.raises(ConfigurationError):
            build_report([], [], **options)  # type: ignore[arg-type]


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


class TestRendering:
    def report(self, **options: object) -> Report:
        requests: list[RequestRecord] = []
        comparisons: list[Comparison] = []
        for i, name in enumerate(HOSTILE):
            more, pairs = paired(6, [1.5, 1.0, 0.7][i % 3], name)
            requests += [
                replace(item, actions={name: 3}, policy=name, at_risk=(9, 5), accepted=(7, 0)) for item in more
            ]
            comparisons += pairs
        requests += [request("alone", 0, 1.0, segment="tiny")]
        return build_report(requests, comparisons, resamples=50, **options)  # type: ignore[arg-type]

    def empty(self) -> Report:
        return build_report([], [])

    @pytest.mark.parametrize("group_by", [("segment",), ("segment", "policy", "decoding", "device"), ()])
    def test_text_fits_and_holds_nothing_that_acts(self, group_by: tuple[str, ...]) -> None:
        text = to_text(self.report(group_by=group_by))
        assert max(columns(line) for line in text.splitlines()) <= 120
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", text)
        text.encode()
        assert "too little data" in text or not group_by

    def test_text_explains_every_column_and_the_method(self) -> None:
        text = " ".join(to_text(self.report()).split())
        for words in (
            "speed-up: control seconds per output token",
            "+1 included",
            "95 % interval",
            "paired bootstrap over 6 control requests, each with its requests, 50 resamples, seed 0",
            "faster",
            "slower",
            "unclear",
        ):
            assert words in text

    def test_a_narrower_terminal_gets_shorter_names(self) -> None:
        requests, comparisons = paired(4, 1.5, "a name that is rather long for a terminal of a hundred columns")
        report = build_report(requests, comparisons)
        assert max(len(line) for line in to_text(report, width=100).splitlines()) <= 100
        assert "\u2026" in to_text(report, width=100)

    def test_json_holds_plain_numbers_and_the_same_keys(self) -> None:
        full, nothing = to_dict(self.report()), to_dict(self.empty())
        text = json.dumps(full, allow_nan=False)
        assert json.loads(text) == full
        assert set(full["all"]) == set(nothing["all"]) == set(full["segments"][0])
        assert all(math.isfinite(number) for number in numbers(full))
        assert nothing["segments"] == []
        assert (nothing["all"]["speed_up"], nothing["all"]["tokens_per_second"]) == (None, None)
        assert nothing["all"]["mean_acceptance_length"] is None
        assert {row["group"]["segment"] for row in full["segments"]} == {*HOSTILE, "tiny"}

    def test_html_is_one_file_without_scripts_or_requests(self) -> None:
        text = to_html(self.report(), title="<b>run</b> \u202e")
        page = Page(text)
        assert not {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "object", "embed", "b"}
        names = {name for _, attributes in page.tags for name in attributes}
        assert not [name for name in names if name.startswith("on")]
        assert not names & {"src", "href", "style"}
        assert "http" not in text.replace("http-equiv", "")
        assert "url(" not in text
        assert "prefers-color-scheme: dark" in text
        assert any("<img src=x onerror=alert(1)>" in shown for shown in page.texts)
        assert "\u202e" not in text
        assert "\x1b" not in text
        assert "y" * 100 not in text
        text.encode()

    def test_every_row_has_its_place_on_an_axis_with_a_line_at_one(self) -> None:
        found = re.findall(r'<svg class="dot.*?</svg>', to_html(self.report()), re.DOTALL)
        plots = [ElementTree.fromstring(text) for text in found]
        assert len(plots) == len(HOSTILE) + 1
        assert sum(len(plot.findall("path")) for plot in plots) == len(HOSTILE)
        for plot in plots:
            (line,) = plot.findall("line[@class='one']")
            one = float(line.get("x1", "nan"))
            for interval in plot.findall("line[@class='interval']"):
                ends = [float(interval.get(end, "nan")) for end in ("x1", "x2")]
                shape = re.match(r"M([0-9.]+) ", plot.findall("path")[0].get("d", ""))
                assert shape is not None
                assert ends[0] <= float(shape.group(1)) <= ends[1]
                kind = plot.get("class", "").removeprefix("dot ")
                assert kind in ("faster", "slower", "unclear")
                assert kind != "faster" or ends[0] > one
                assert kind != "slower" or ends[1] < one

    def test_it_looks_like_the_dashboard(self) -> None:
        """The same facts, table, marks, definitions and style, the worst first."""
        text = to_html(self.report())
        assert (ROOT / "telemetry" / "pages" / "static" / "style.css").read_text(encoding="utf-8") in text
        assert '<dl class="facts">' in text
        assert 'data-definition="control seconds per output token' in text
        first = re.findall(r'<svg class="dot (\w+)"', text)
        order = ["slower", "unclear", "faster"]
        assert first == sorted(first, key=order.index)
        assert "\u25b2</span> faster" in text

    def test_other_groups_have_their_names(self) -> None:
        report = build_report(*paired(6, 1.5), group_by=("segment", "decoding"))
        shown = " ".join(Page(to_html(report)).texts)
        assert "Speed-up by segment and decoding" in shown
        assert "greedy" in shown
        assert "Speed-up" in " ".join(Page(to_html(build_report(*paired(6, 1.5), group_by=()))).texts)

    def test_extreme_speed_ups_stay_inside_the_plot(self) -> None:
        requests = [control(f"c{i}", 10, 1.0, segment=name) for name in "ab" for i in range(3)]
        requests += [request(f"a{i}", 10, 1e-6, segment="a") for i in range(3)]
        requests += [request(f"b{i}", [0, 0, 1][i], 1e6, segment="b") for i in range(3)]
        text = to_html(build_report(requests, []))
        places = re.findall(r' (?:cx|x1|x2|d)="M?([0-9.]+)', text)
        assert len(places) > 4
        assert all(0 <= float(place) <= WIDTH for place in places)

    def test_empty(self) -> None:
        assert "No requests are recorded here yet." in to_text(self.empty())
        assert "No requests are recorded here yet." in to_html(self.empty())

    def test_only_failed_requests(self) -> None:
        report = build_report([request(f"{i}", 0, 1.0, error="x") for i in range(3)], [])
        assert "too little data" in to_text(report)
        assert "No speed-up can be shown" in to_html(report)


class TestLabels:
    @pytest.mark.parametrize("text", HOSTILE)
    @pytest.mark.parametrize("limit", [1, 2, 8, 60])
    def test_never_wider_than_asked(self, text: str, limit: int) -> None:
        shown = visible(text, limit)
        assert columns(shown) <= limit
        assert shown.isprintable()
        shown.encode()

    def test_what_is_hidden_is_spelled_out(self) -> None:
        assert visible("a\x1b\u202eb", 40) == "a\\x1b\\u202eb"
        assert visible("plain name", 40) == "plain name"

    def test_ellipsis(self) -> None:
        assert clip("abcdef", 4) == "abc\u2026"
        assert clip("\u6f22\u6f22\u6f22", 4) == "\u6f22\u2026"
        assert visible("x" * 10_000, 10) == "x" * 9 + "\u2026"
