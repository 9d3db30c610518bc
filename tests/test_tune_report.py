"""What a search says of itself: curves of speed-up over block length, the report as text and as a page."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from autospec.policies.fixed import Fixed
from autospec.scores import DraftScores, OfferScores, ScoredRequest
from autospec.scores.luck import Luck
from autospec.scores.luck import runs as runs_of
from autospec.scores.walk import by_segment, totals, walk
from autospec.telemetry.labels import columns
from autospec.tune import curves as curves_module
from autospec.tune.candidates import OFF, Part
from autospec.tune.choice import Choice, SegmentChoice
from autospec.tune.curves import ALL, Curve, Point, best_fixed, curves
from autospec.tune.evaluation import Setting
from autospec.tune.intervals import Interval, interval_of, speed_up
from autospec.tune.page import LABEL_HEIGHT, curve_plot, page, spread
from autospec.tune.report import label, lines
from autospec.tune.search import Tried

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</text></svg><script>&\"'",
    "half \ud800",
    "\u202egnp.exe\u2066\u200f\u05d0",
    "\x1b[31m\nnew line",
    "y" * 300,
    "",
    "all",
]


class Costs:
    """A draft token of the model costs a third of a step, one of retrieval next to nothing."""

    block_lengths = (1, 2, 4, 8)
    version = 0

    def verify_seconds(self, num_tokens: int, context_tokens: int) -> float:
        return 0.03 + 0.001 * num_tokens + 1e-6 * context_tokens

    def draft_seconds(self, source: str, block_length: int, context_tokens: int) -> float:
        if source == "untimed":
            return float("inf")
        return 0.01 * block_length if source == "assistant" else 2e-4

    def is_extrapolated(self, num_tokens: int, context_tokens: int, source: str | None = None) -> bool:
        return False


SETTING = Setting(Costs(), Luck(3), host_seconds=0.002)


def request(number: int, segment: str, accept: float, copied: float, **changes: Any) -> ScoredRequest:
    """Its model draft is right with probability `accept`, its retrieval where the answer is `copied`."""
    rng, length = np.random.default_rng(number), 20 + number % 11
    right = np.minimum(runs_of(rng.random(length) < copied), 6).astype(np.int16)
    model = DraftScores(
        rng.uniform(accept - 0.05, accept + 0.05, length).astype(np.float32),
        rng.random(length).astype(np.float32),
        rng.random(length).astype(np.float32),
        np.zeros(length, dtype=np.int16),
    )
    retrieval = OfferScores(
        np.minimum(right + 1, 6).astype(np.int16), right, np.full(length, 2, dtype=np.int16), ((),) * length
    )
    made = ScoredRequest(
        request_id=f"r{number}",
        started_at=datetime(2026, 3, 1, tzinfo=UTC) + timedelta(minutes=number),
        segment=segment,
        prompt_tokens=30 + number,
        output_tokens=length,
        max_new_tokens=length + number % 3,
        do_sample=True,
        temperature=1.0,
        drafts={"assistant": model},
        offers={"ngram": retrieval},
        prefill_seconds=0.05 if number % 2 else None,
    )
    return replace(made, **changes)


KINDS = {"copies": (0.3, 0.9), "chats": (0.9, 0.1), "noise": (0.06, 0.0)}
REQUESTS = [request(number, list(KINDS)[number % 3], *list(KINDS.values())[number % 3]) for number in range(36)]


def interval(ratio: float, width: float = 0.1) -> Interval:
    return Interval(ratio, ratio - width, ratio + width)


def curve(source: str, *ratios: float) -> Curve:
    """Off, and then block lengths 1, 2, 4, ..."""
    made = [Point(2**place, interval(ratio), 150, 100) for place, ratio in enumerate(ratios)]
    return Curve(source, [Point(0, Interval(1.0, 1.0, 1.0), 150, 150), *made])


def chosen(segment: str, part: Part = OFF, held_out: Interval | None = None, why: str = "because") -> SegmentChoice:
    return SegmentChoice(segment, part, why, 9, 4 if held_out else 0, interval(1.5), held_out)


def choice(*segments: SegmentChoice) -> Choice:
    return Choice({"source": "ngram", "block_length": 4}, segments, interval(1.5), interval(1.42))


TRIED = [Tried({"source": "ngram", "block_length": 4}, {"s": (1.0, 1.5)}), Tried(OFF, {"s": (1.5, 1.5)})]


class TestCurves:
    @pytest.mark.parametrize("source", ["ngram", "assistant"])
    def test_they_are_what_walking_the_fixed_policy_gives(self, source: str) -> None:
        found = curves(REQUESTS, SETTING, Costs.block_lengths)
        for length in Costs.block_lengths:
            policy = Fixed(source, block_length=length)
            walked = list(walk(policy, REQUESTS, SETTING.costs, luck=SETTING.luck, host_seconds=SETTING.host_seconds))
            for segment, wanted in {ALL: totals(walked), **by_segment(walked)}.items():
                made = next(each for each in found[segment] if each.source == source)
                point = next(each for each in made.points if each.block_length == length)
                assert point.speed_up.ratio == pytest.approx(wanted.off_seconds / wanted.seconds, rel=1e-12)
                own = [each for each in walked if segment in (ALL, each.request.segment)]
                assert point.blocks == wanted.blocks
                assert point.num_committed_tokens == sum(each.request.output_tokens - 1 for each in own)
                assert point.mean_accepted == point.num_committed_tokens / point.blocks
                on = [each.seconds + (each.request.prefill_seconds or 0.0) for each in own]
                off = [each.off_seconds + (each.request.prefill_seconds or 0.0) for each in own]
                bounds = speed_up(off, on)
                assert (point.speed_up.low, point.speed_up.high) == pytest.approx((bounds.low, bounds.high), rel=1e-9)
                assert interval_of(own) == bounds

    def test_off_is_one_exactly_and_comes_first(self) -> None:
        found = curves(REQUESTS, SETTING, [4, 1, 0, 4, 2])
        assert set(found) == {ALL, *KINDS}
        for segment, group in found.items():
            steps = sum(each.output_tokens - 1 for each in REQUESTS if segment in (ALL, each.segment))
            for each in group:
                assert [point.block_length for point in each.points] == [0, 1, 2, 4]
                assert each.points[0] == Point(0, Interval(1.0, 1.0, 1.0), steps, steps)
                assert each.points[0].mean_accepted == 1.0

    def test_each_action_is_walked_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        walked: list[Part] = []

        def counting(part: Part, requests: Sequence[ScoredRequest], setting: Setting) -> Any:
            walked.append(part)
            assert len(requests) == len(REQUESTS)
            return walks(part, requests, setting)

        walks = curves_module.walks
        monkeypatch.setattr(curves_module, "walks", counting)
        curves(REQUESTS, SETTING, (2, 4))
        assert sorted((each["source"], each["block_length"]) for each in walked) == [
            ("assistant", 2),
            ("assistant", 4),
            ("ngram", 2),
            ("ngram", 4),
        ]

    def test_sources_are_shown_where_they_were_scored_and_timed(self) -> None:
        draft = REQUESTS[0].drafts["assistant"]
        some = [
            request(1, "both", 0.5, 0.5),
            request(2, "retrieval", 0.5, 0.5, drafts={}),
            request(11, "untimed", 0.5, 0.5, drafts={"untimed": draft}, offers={}, output_tokens=20),
            request(3, "none", 0.5, 0.5, drafts={}, offers={}),
        ]
        found = curves(some, SETTING, (2,))
        names = {segment: [each.source for each in group] for segment, group in found.items()}
        assert names == {
            ALL: ["ngram", "assistant"],
            "both": ["ngram", "assistant"],
            "retrieval": ["ngram"],
            "untimed": [],
            "none": [],
        }

    def test_of_nothing(self) -> None:
        assert curves([], SETTING, (2,)) == {ALL: []}
        assert best_fixed({ALL: []}, SETTING) == {ALL: OFF}

    def test_a_segment_without_a_name_is_part_of_all_traffic_alone(self) -> None:
        mixed = [replace(each, segment="" if each.segment == "chats" else each.segment) for each in REQUESTS]
        found = curves(mixed, SETTING, (2,))
        assert set(found) == {ALL, "copies", "noise"}
        assert found[ALL] == curves(REQUESTS, SETTING, (2,))[ALL]


class TestBestFixed:
    def test_the_fastest_action_of_each_segment_and_of_all(self) -> None:
        found = best_fixed(
            {
                ALL: [curve("ngram", 1.1, 1.2), curve("assistant", 1.3, 1.05)],
                "even": [curve("ngram", 1.0, 1.0)],
                "slow": [curve("ngram", 0.9, 0.99), curve("assistant", 0.7, 0.5)],
                "tied": [curve("ngram", 1.2, 1.2), curve("assistant", 1.2, 1.1)],
            },
            SETTING,
        )
        assert found == {
            ALL: {"source": "assistant", "block_length": 1},
            "even": OFF,
            "slow": OFF,
            "tied": {"source": "ngram", "block_length": 1},
        }

    def test_of_walks_it_is_the_one_with_the_fewest_seconds(self) -> None:
        found = best_fixed(curves(REQUESTS, SETTING, Costs.block_lengths), SETTING)
        assert found["noise"] == OFF
        for segment in ("copies", "chats"):
            own = [each for each in REQUESTS if each.segment == segment]
            seconds = {}
            for source in ("ngram", "assistant"):
                for length in Costs.block_lengths:
                    policy = Fixed(source, block_length=length)
                    options = {"luck": SETTING.luck, "host_seconds": SETTING.host_seconds}
                    summed = totals(list(walk(policy, own, SETTING.costs, **options)))  # type: ignore[arg-type]
                    seconds[source, length] = summed.seconds / summed.off_seconds
            source, length = min(seconds, key=lambda each: seconds[each])
            assert found[segment] == {"source": source, "block_length": length}

    def test_few_requests_have_none_and_too_much_memory_is_none(self) -> None:
        few = [each for each in REQUESTS if each.segment != "noise"] + [REQUESTS[2]]
        assert set(best_fixed(curves(few, SETTING, (4,)), SETTING)) == {ALL, "copies", "chats"}
        small = replace(SETTING, memory={"assistant": 100}, memory_limit=10)
        assert best_fixed(curves(REQUESTS, small, (4,)), small)["chats"].get("source") != "assistant"


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (OFF, "off"),
        ({"source": "ngram", "block_length": 4}, "ngram:4"),
        ({"source": "assistant", "block_length": 6, "least_margin": 0.4}, "assistant:6 margin>=0.40"),
        ({"source": "assistant", "block_length": 6, "most_entropy": 1.257}, "assistant:6 entropy<=1.26"),
        ({"policy": "hedge", "settings": {}}, "hedge"),
        ({"policy": "goodput", "sources": ["ngram", "assistant"]}, "goodput (ngram, assistant)"),
        (
            {"policy": "goodput", "settings": {}, "sources": ["ngram", "assistant"], "pooled": True},
            "goodput (pooled; ngram, assistant)",
        ),
        ({"policy": "guard", "settings": {}, "pooled": False}, "auto (tuned)"),
        ({"policy": "guard", "settings": {}, "pooled": True, "sources": ["ngram"]}, "auto (tuned; pooled; ngram)"),
        ({"policy": "goodput", "new": [1], "settings": {"a": 1}}, "goodput"),
        ({"source": "ngram", "block_length": 2, "new": {"a": 1}}, "ngram:2"),
        ({"source": "\x1b<b>", "block_length": 2}, "\\x1b<b>:2"),
    ],
)
def test_labels(part: Part, said: str) -> None:
    assert label(part) == said


class TestText:
    def found(self, made: dict[str, list[Curve]], *segments: SegmentChoice) -> list[str]:
        return list(lines(choice(*segments), TRIED, ["a note"], made))

    def test_a_row_for_each_source_with_the_fastest_marked(self) -> None:
        group = [curve("ngram", 1.21, 1.4, 1.66, 1.6), curve("assistant", 0.9, 0.8, 0.7, 0.4)]
        found = self.found({ALL: group[:1], "edit": group}, chosen("edit"))
        start = next(place for place, line in enumerate(found) if line.startswith("segment  source"))
        rows = [line.split() for line in found[start : start + 4]]
        assert rows[0] == ["segment", "source", "0", "1", "2", "4", "8", "fastest"]
        assert rows[1][:7] == ["edit", "ngram", "1.00", "1.21", "1.40", "1.66*", "1.60"]
        assert found[start + 1].endswith("4: 1.66x (1.56 to 1.76)")
        assert rows[2] == ["assistant", "1.00*", "0.90", "0.80", "0.70", "0.40", "off"]
        assert rows[3][:2] == ["all", "ngram"]
        assert found[-1] == "a note"
        assert len({line.index("1.00") for line in found[start + 1 : start + 4]}) == 1

    def test_without_curves_it_is_the_report_alone(self) -> None:
        alone = list(lines(choice(chosen("edit")), TRIED, ["a note"]))
        found = self.found({ALL: [curve("ngram", 1.2)]}, chosen("edit"))
        assert not any("block length" in line for line in alone)
        assert [*found[: len(alone) - 1], found[-1]] == alone

    def test_no_source(self) -> None:
        assert "predicted speed-up by block length: no draft source to predict" in self.found({ALL: []}, chosen("edit"))

    def test_long_labels_keep_the_columns(self) -> None:
        pooled = {"policy": "goodput", "settings": {}, "sources": ["ngram", "assistant"], "pooled": True}
        found = list(lines(choice(chosen("a", pooled, why="WHY"), chosen("b", why="WHY")), TRIED, []))
        assert len({line.index("WHY") for line in found if "WHY" in line}) == 1

    def test_names_are_made_fit_to_be_shown(self) -> None:
        made = {ALL: [curve("\x1b]0;", 1.2)], **{name: [curve("ngram", 1.2)] for name in HOSTILE if name}}
        found = self.found(made, *(chosen(name) for name in HOSTILE))
        text = "\n".join(found)
        text.encode()
        assert not re.search("[\x00-\x09\x0b-\x1f\u200b-\u200f\u2028-\u202e\u2066-\u2069]", text)
        assert "y" * 50 not in text
        assert max(map(columns, found)) < 140


class Page(HTMLParser):
    """A page whose elements must be closed in order."""

    EMPTY = frozenset({"meta", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(each == tag for each, _ in self.tags)


def plots(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(each) for each in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def shown(plot: ElementTree.Element) -> list[str]:
    return ["".join(each.itertext()) for each in plot.iter("text")]


MADE: dict[str, Any] = {
    "by": "autospec tune",
    "at": "2026-03-01T00:00:00+00:00",
    "traffic": {"requests": 36, "digest": "0123456789abcdef", "split": "time", "held_out": 0.3},
    "target": {"name": "tiny-target", "dtype": "float32"},
    "device": "cpu: <a & b>",
    "drafts": ["assistant", "ngram"],
    "versions": {"torch": "2.13.0"},
    "best_fixed": {ALL: {"source": "ngram", "block_length": 8}, "code_edit": OFF},
    "speed_up": {"edit": [9.87, 9.86, 9.88]},
    "storage": None,
}


class TestPage:
    def full(self) -> str:
        segments = [
            chosen("edit", {"source": "ngram", "block_length": 4}, interval(1.66), "fastest of 20 in training"),
            chosen("slow", OFF, interval(0.9, 0.05), "not surely above 1"),
            chosen("late", {"policy": "guard", "settings": {}}, None),
        ]
        group = [curve("ngram", 1.2, 1.4, 1.66, 1.6), curve("assistant", 0.9, 0.8, 0.7, 0.4)]
        made = {ALL: group, "edit": group, "slow": group[1:]}
        return page(choice(*segments), TRIED, made, ["scoring took 3 s"], MADE)

    def test_it_is_one_file_without_scripts_or_requests(self) -> None:
        text = self.full()
        found = Page(text)
        assert not {tag for tag, _ in found.tags} & {"script", "img", "link", "iframe", "object", "embed"}
        names = {name for _, attributes in found.tags for name in attributes}
        assert not [name for name in names if name.startswith("on")]
        assert not names & {"src", "href", "style"}
        assert "http" not in text.replace("http-equiv", "")
        assert text.count("url(") == text.count("url(#inside")
        assert "prefers-color-scheme: dark" in text

    def test_it_says_what_was_found_and_where_it_is_from(self) -> None:
        found = Page(self.full())
        text = " ".join(found.texts)
        for words in (
            "1.42x (1.32 to 1.52)",
            "training minus held out +0.080",
            "2 policies were tried",
            "fastest of 20 in training",
            "auto (tuned)",
            "no request held out",
            "0123456789abcdef",
            "traffic.split",
            "tiny-target",
            "cpu: <a & b>",
            "assistant, ngram",
            "2.13.0",
            "2026-03-01T00:00:00+00:00",
            "best_fixed.all",
            "ngram:8",
            "best_fixed.code_edit",
            "scoring took 3 s",
        ):
            assert words in text
        assert "9.87" not in text
        assert "None" not in text
        kinds = [attributes.get("class") for tag, attributes in found.tags if tag == "td"]
        assert (kinds.count("faster"), kinds.count("slower")) == (2, 1)

    def test_tables_have_captions_and_plots_a_label(self) -> None:
        text = self.full()
        found = Page(text)
        assert found.count("caption") == found.count("table") == 5
        labels = [attributes.get("aria-label") for tag, attributes in found.tags if tag == "svg"]
        assert [each and each.rpartition(": ")[2] for each in labels] == ["all traffic", "edit", "slow"]
        for plot in plots(text):
            assert "fastest" in (plot.findtext("desc") or "")
        inside = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
        assert len(set(inside)) == len(inside)

    def test_numbers_stand_where_they_belong(self) -> None:
        group = [curve("ngram", 1.2, 1.4, 1.66, 1.6), curve("assistant", 0.9, 0.8, 0.7, 0.4)]
        plot = ElementTree.fromstring(curve_plot(group, "edit", interval(1.3)))
        held = next(each for each in plot.iter("line") if each.get("class") == "held")
        one = next(each for each in plot.iter("line") if each.get("class") == "one")
        ticks = {
            text.text: float(text.get("y", "nan")) - 4 for text in plot.iter("text") if (text.text or "").endswith("x")
        }
        assert float(one.get("y1", "nan")) == pytest.approx(ticks["1x"], abs=0.1)

        def height(value: float) -> float:
            share = np.log(value) / np.log(1.5)
            return float(ticks["1x"] + share * (ticks["1.5x"] - ticks["1x"]))

        assert float(held.get("y1", "nan")) == pytest.approx(height(1.3), abs=0.3)
        whisker = next(each for each in plot.iter("line") if each.get("class") == "whisker")
        assert float(whisker.get("y1", "nan")) == pytest.approx(height(1.4), abs=0.3)
        assert float(whisker.get("y2", "nan")) == pytest.approx(height(1.2), abs=0.3)
        assert "chosen, held out: 1.30x" in shown(plot)
        assert "ngram: 1.66x at 4" in shown(plot)
        assert "assistant: off is faster" in shown(plot)
        dots = list(plot.iter("circle"))
        assert [float(dot.get("cy", "nan")) for dot in dots[:4]] == pytest.approx(
            [height(value) for value in (1.2, 1.4, 1.66, 1.6)], abs=0.5
        )
        places = [float(dot.get("cx", "nan")) for dot in dots[:4]]
        assert places == sorted(places)
        assert places == [float(dot.get("cx", "nan")) for dot in dots[4:]]
        band = next(each for each in plot.iter("polygon"))
        corners = [tuple(map(float, corner.split(","))) for corner in (band.get("points") or "").split()]
        assert len(corners) == 10
        assert corners[3][1] == pytest.approx(height(1.76), abs=0.5)
        assert corners[6][1] == pytest.approx(height(1.56), abs=0.5)

    def test_nothing_leaves_the_plot_but_lines_that_are_cut_off(self) -> None:
        far = [curve("slow", 0.01, 0.001, 1e-5), curve("fast", 50.0, 500.0, 900.0)]
        plot = ElementTree.fromstring(curve_plot(far, "far", interval(300.0)))
        _, _, width, height = map(float, (plot.get("viewBox") or "").split())
        for each in plot.iter("text"):
            assert 0 < float(each.get("x", "nan")) < width
            assert 0 < float(each.get("y", "nan")) < height
        assert plot.find("clipPath/rect") is not None

    def test_names_beside_the_lines_do_not_overlap(self) -> None:
        many = [curve(f"source{number}", 1.1, 1.1 + number / 1000) for number in range(24)]
        plot = ElementTree.fromstring(curve_plot(many, "many", interval(1.1)))
        heights = sorted(float(each.get("y", "nan")) for each in plot.iter("text") if each.get("class") == "to")
        assert len(heights) == 26
        assert min(b - a for a, b in itertools.pairwise(heights)) >= LABEL_HEIGHT - 0.2

    def test_names_are_spread_no_further_than_needed(self) -> None:
        assert spread([10.0, 50.0, 90.0], 17, 0, 100) == [10.0, 50.0, 90.0]
        assert spread([10.0, 12.0], 17, 0, 100) == [10.0, 27.0]
        assert spread([95.0, 100.0, 100.0], 10, 0, 100) == [80.0, 90.0, 100.0]
        assert spread([], 10, 0, 100) == []

    def test_names_are_escaped(self) -> None:
        part = {"source": "<u>&", "block_length": 2}
        made = {ALL: [curve("<u>&", 1.2)], **{name: [curve("<u>&", 1.2), curve("\ud800", 1.1)] for name in HOSTILE}}
        segments = [chosen(name, part, interval(1.2), why="<why> & \u202e") for name in HOSTILE]
        provenance = {"<key>": {'"': "<value> \x00\ud800"}, "device": "\u202e"}
        text = page(choice(*segments), TRIED, made, ["<note> \x1b"], provenance)
        text.encode()
        found = Page(text)
        assert not {tag for tag, _ in found.tags} & {"script", "img", "u", "b", "why", "note", "key", "value"}
        assert not re.search("[\x00-\x09\x0b-\x1f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", text)
        assert "y" * 100 not in text
        for words in ("<img src=x onerror=alert(1)>", "<note> \\x1b", "<value> \\x00\\ud800", "<u>&:2", "half \\ud800"):
            assert any(words in each for each in found.texts)
        labels = [attributes.get("aria-label") or "" for tag, attributes in found.tags if tag == "svg"]
        assert any(each.endswith("</text></svg><script>&\"'") for each in labels)
        assert len(labels) == len(HOSTILE)  # one for all, none of its own for the name that is empty

    def test_one_segment(self) -> None:
        made = curves(REQUESTS[::3], SETTING, Costs.block_lengths)
        text = page(choice(chosen("copies", held_out=interval(1.2))), TRIED, made, [], {})
        assert len(plots(text)) == 2
        assert Page(text).count("caption") == 4
        assert plots(text)[0].findtext("desc") == plots(text)[1].findtext("desc")

    def test_a_segment_without_requests_held_out_has_no_mark(self) -> None:
        made = {ALL: [curve("ngram", 1.2)], "late": [curve("ngram", 1.2)]}
        everything, late = plots(page(choice(chosen("late")), TRIED, made, [], MADE))
        assert [sum(each.get("class") == "held" for each in plot.iter("line")) for plot in (everything, late)] == [1, 0]
        assert not any("held out" in each for each in shown(late))

    @pytest.mark.parametrize("made", [{}, {ALL: []}, {ALL: [], "s": []}])
    def test_no_sources(self, made: dict[str, list[Curve]]) -> None:
        text = page(choice(chosen("s", held_out=interval(1.0))), TRIED, made, [], MADE)
        found = Page(text)
        assert not plots(text)
        assert sum("Nothing to predict by" in each for each in found.texts) == 2

    def test_of_walks(self) -> None:
        """All that was walked is in the numbers below its plot."""
        made = curves(REQUESTS, SETTING, Costs.block_lengths)
        text = page(choice(*(chosen(name, held_out=interval(1.2)) for name in KINDS)), TRIED, made, [], MADE)
        found = Page(text)
        assert len(plots(text)) == 4
        cells = " ".join(found.texts)
        for group in made.values():
            for each in group:
                for point in each.points:
                    assert f"{point.speed_up.ratio:.2f}x ({point.speed_up.low:.2f} to " in cells
                    assert f"{point.mean_accepted:.2f}" in cells
