"""Costs of steps by their tokens, learned in service."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from autospec.costs.batches import BatchCosts
from autospec.policies.prices import Prices


def taught(seconds: Callable[[int], float], widths: list[int], times: int = 32, noise: float = 0.0) -> BatchCosts:
    costs = BatchCosts((1, 2, 4, 8), ["ngram"])
    chance = random.Random(1)
    for _ in range(times):
        for width in widths:
            costs.observe(width, seconds(width) * (1.0 + noise * chance.random()))
    return costs


def linear(width: int) -> float:
    return 0.04 + 0.001 * width


def test_before_anything_was_seen_wider_steps_cost_more() -> None:
    costs = BatchCosts((1, 2, 4), ["ngram"])
    prices = [costs.verify_seconds(width, 100) for width in (1, 2, 3, 5, 9)]
    assert prices == sorted(prices)
    assert prices[0] > 0.0
    assert costs.is_extrapolated(1, 100)
    assert costs.draft_seconds("ngram", 4, 100) == 0.0
    assert costs.draft_seconds("suffix", 4, 100) == math.inf
    assert costs.is_extrapolated(1, 100, "suffix")


def test_widths_seen_are_as_they_were_and_between_them_is_a_line() -> None:
    costs = taught(linear, [1, 5, 9])
    for width in (1, 5, 9, 3, 7):
        assert costs.step_seconds(width) == pytest.approx(linear(width), rel=0.01)
    assert not costs.is_extrapolated(9, 100)
    assert costs.is_extrapolated(10, 100)


def test_a_step_that_is_really_there_stays() -> None:
    stairs: Callable[[int], float] = lambda width: 0.05 if width <= 4 else 0.08  # noqa: E731
    costs = taught(stairs, [1, 2, 3, 4, 5, 6, 9], noise=0.02)
    assert costs.step_seconds(4) == pytest.approx(0.0505, rel=0.02)
    assert costs.step_seconds(5) == pytest.approx(0.081, rel=0.02)


def test_a_falling_curve_is_believed_where_it_was_measured() -> None:
    costs = taught(lambda width: {1: 0.056, 2: 0.092, 4: 0.086, 8: 0.078}[width], [1, 2, 4, 8])
    assert costs.step_seconds(8) < costs.step_seconds(4) < costs.step_seconds(2)


def test_beyond_the_widest_the_slope_goes_on() -> None:
    costs = taught(linear, [1, 5, 9, 17, 33, 65])
    assert costs.step_seconds(130) == pytest.approx(linear(130), rel=0.05)
    assert taught(lambda width: 0.05, [4, 8, 16, 32, 64]).step_seconds(128) == pytest.approx(0.05, rel=0.15)


def test_stalls_hardly_move_what_is_known() -> None:
    costs = taught(linear, [1, 5])
    for _ in range(3):
        costs.observe(5, 9.0)
    for _ in range(29):
        costs.observe(5, linear(5))
    costs.observe(5, math.nan)
    costs.observe(5, -1.0)
    costs.observe(0, 0.1)
    assert costs.step_seconds(5) == pytest.approx(linear(5), rel=0.1)


def test_a_device_that_slows_down_is_followed_also_where_nothing_is_seen() -> None:
    costs = taught(linear, [1, 5, 9])
    for _ in range(400):
        costs.observe(1, 1.5 * linear(1))
    assert costs.step_seconds(1) == pytest.approx(1.5 * linear(1), rel=0.03)
    assert costs.step_seconds(9) == pytest.approx(1.5 * linear(9), rel=0.15)


def test_estimates_stand_still_between_two_versions() -> None:
    costs = taught(linear, [1, 5], noise=0.01)
    seen = {}
    for _ in range(100):
        costs.observe(5, linear(5) * 1.2)
        assert seen.setdefault(costs.version, costs.verify_seconds(5, 100)) == costs.verify_seconds(5, 100)
    assert len(seen) > 1


def test_one_request_is_the_default_and_many_share_a_step() -> None:
    costs = taught(linear, [1, 4, 8, 16, 36, 72])
    assert costs.num_requests == 1
    assert costs.verify_seconds(5, 100) == pytest.approx(linear(5), rel=0.01)
    assert costs.verify_seconds(5, 100, num_requests=8) == pytest.approx(linear(40), rel=0.02)
    assert costs.verify_seconds(1, 100, num_requests=8) == pytest.approx(linear(8), rel=0.01)


def test_on_a_straight_line_it_makes_no_difference_how_many_draft() -> None:
    costs = taught(linear, [1, 4, 8, 16, 36, 72])
    costs.serve(8, 1.0)
    all_of_them = costs.verify_seconds(5, 100)
    costs.serve(8, 0.25)
    assert costs.verify_seconds(5, 100) == pytest.approx(all_of_them, rel=0.02)


def test_where_few_draft_a_step_has_room_for_them() -> None:
    """Sixteen tokens cost as one: of eight requests two may draft four tokens each, all of them may not."""
    flat: Callable[[int], float] = lambda width: 0.05 if width <= 16 else 0.05 + 0.004 * (width - 16)  # noqa: E731
    costs = taught(flat, [1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48])
    costs.serve(8, 0.25)
    assert costs.verify_seconds(5, 100) == pytest.approx(0.05, rel=0.01)
    costs.serve(8, 1.0)
    assert costs.verify_seconds(5, 100) == pytest.approx(flat(40), rel=0.05)


def test_prices_are_made_anew_for_another_batch_and_only_then() -> None:
    costs = taught(linear, [1, 4, 8, 16, 36, 72])
    prices = Prices(costs)
    first = prices.at(100)
    costs.serve(1)
    assert prices.at(100) is prices.at(1000) is first  # of the context nothing is known
    costs.serve(8)
    assert prices.at(100).step == pytest.approx(linear(8), rel=0.01)
    version = costs.version
    costs.serve(40)
    costs.serve(43)  # less than an eighth more
    assert costs.version == version + 1
    assert costs.num_requests == 40


def test_another_one_can_go_on_from_what_was_seen() -> None:
    costs = taught(linear, [1, 5, 40], noise=0.05)
    other = BatchCosts((1, 2, 4, 8), ["ngram"])
    other.begin_with([*costs.points(), (0, 1.0), (3, 0.0), (4, math.nan)])
    for width in (1, 3, 5, 40):
        assert other.step_seconds(width) == pytest.approx(costs.step_seconds(width), rel=0.02)
    assert [tokens for tokens, _ in other.points()] == [1, 5, 40]
    for _ in range(64):
        other.observe(5, 2.0 * linear(5))
    assert other.step_seconds(5) == pytest.approx(2.0 * linear(5), rel=0.1)


def test_what_drafting_takes_changes_with_a_version() -> None:
    costs = taught(linear, [1, 5])
    version = costs.version
    assert costs.draft_seconds("ngram", 4, 100) == 0.0
    for _ in range(64):
        costs.observe_draft(0.01)
        costs.observe(5, linear(5))
    assert costs.draft_seconds("ngram", 4, 100) == pytest.approx(0.01)
    assert costs.version > version
    version = costs.version
    for _ in range(64):
        costs.observe_draft(0.0101)  # a hundredth, of little
        costs.observe(5, linear(5))
    assert costs.version == version


def test_a_share_that_wavers_makes_no_prices_anew() -> None:
    costs = taught(linear, [1, 4, 8, 16, 36, 72])
    costs.serve(16, 0.51)
    version = costs.version
    for share in (0.49, 0.51, 0.53, 0.47) * 10:
        costs.serve(16, share)
    assert costs.version == version
    costs.serve(16, 0.4)
    assert costs.version == version + 1


def both_kinds(widths: list[int]) -> BatchCosts:
    """Greedy steps of all these widths, and of sampled ones, half as dear again, a few of 8 and 12 tokens."""
    costs = taught(linear, widths)
    costs.serve(8, is_sampled=True)
    for _ in range(3):
        for width in (8, 12):
            costs.observe(width, 1.5 * linear(width))
    costs._settle()
    return costs


def test_a_few_sampled_steps_leave_what_greedy_ones_taught() -> None:
    widths = [1, 4, 8, 16, 32, 64]
    costs = both_kinds(widths)
    for width in (8, 10, 12):
        assert costs.step_seconds(width) == pytest.approx(1.5 * linear(width), rel=0.01)
    for width in (1, 4, 16, 40, 64):
        assert costs.step_seconds(width) == pytest.approx(1.5 * linear(width), rel=0.02)
    assert not costs.is_extrapolated(8, 100)
    costs.serve(8)
    assert costs.step_seconds(32) == pytest.approx(linear(32), rel=0.01)


def test_where_the_other_kind_saw_no_more_a_kind_goes_by_its_own() -> None:
    own, other = both_kinds([9, 10]), BatchCosts((1, 2, 4, 8), ["ngram"])
    other.serve(8, is_sampled=True)
    for _ in range(3):
        for width in (8, 12):
            other.observe(width, 1.5 * linear(width))
    other._settle()
    for width in (1, 8, 10, 12, 64):
        assert own.step_seconds(width) == other.step_seconds(width)


def test_what_another_one_saw_is_taken_as_it_is_whatever_the_drift_by_now() -> None:
    costs = taught(linear, [1])
    for _ in range(400):
        costs.observe(1, 1.5 * linear(1))
    costs.begin_with([(1, 0.05), (9, 0.08)])
    assert costs.step_seconds(1) == pytest.approx(0.05)
    assert costs.step_seconds(9) == pytest.approx(0.08)
