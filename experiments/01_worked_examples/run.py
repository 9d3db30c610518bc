"""The numbers people learn speculative decoding from, derived with exact fractions and checked.

Every distribution below comes from enumerating the rule's random branches, not from a formula for its result.
Sources: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

Dist = tuple[Fraction, ...]  # probabilities, one a token
Branch = Generator[Dist, int, int]  # yields the distribution to draw from, is sent the draw, returns the result
Recover = Callable[[Dist, Dist], Dist]  # (target_probs, draft_probs) -> what a rejected position samples from
DropRate = Callable[[int], Fraction]  # drawn token -> probability that it is withheld from verification

PLAIN_STEP_MS, DRAFT_STEP_MS, VERIFY_MS, BLOCK_LENGTH = Fraction(30), Fraction(2), Fraction(45), 5


def dist(text: str) -> Dist:
    """Read numbers such as "0.6 3/10 0.1" exactly."""
    return tuple(Fraction(word) for word in text.split())


def acceptance(target_probs: Dist, draft_probs: Dist) -> Dist:
    """Return min(1, p/q) for each token; a token with q = 0 is never drawn and counts as p > 0."""
    pairs = zip(target_probs, draft_probs, strict=True)
    return tuple(min(Fraction(1), p / q) if q else Fraction(p > 0) for p, q in pairs)


def normalised(weights: Sequence[Fraction]) -> Dist:
    """Scale weights to sum to 1."""
    return tuple(weight / sum(weights) for weight in weights)


def residual(target_probs: Dist, draft_probs: Dist) -> Dist:
    """Return normalised max(0, p - q), which a recovered token is sampled from; undefined where nothing is rejected."""
    return normalised([max(Fraction(0), p - q) for p, q in zip(target_probs, draft_probs, strict=True)])


def total_variation(left: Dist, right: Dist) -> Fraction:
    """Return half the summed absolute difference."""
    return sum((abs(a - b) for a, b in zip(left, right, strict=True)), Fraction(0)) / 2


def coin(rate: Fraction) -> Dist:
    """Return the distribution of 1 with probability `rate`, else 0."""
    return 1 - rate, rate


def enumerate_branches(rule: Callable[[], Branch], size: int) -> Dist:
    """Run `rule` down every branch of its random draws and return the probability of each of `size` results."""
    output = [Fraction(0)] * size

    def walk(drawn: tuple[int, ...], weight: Fraction) -> None:
        branch = rule()
        try:
            probs = next(branch)
            for choice in drawn:
                probs = branch.send(choice)
        except StopIteration as stop:
            output[stop.value] += weight
        else:
            for choice in (index for index, prob in enumerate(probs) if prob > 0):
                walk((*drawn, choice), weight * probs[choice])

    walk((), Fraction(1))
    return tuple(output)


def speculative_output(
    target_probs: Dist,
    draft_probs: Dist,
    rates: Dist | None = None,  # a token's acceptance probability; the exact rule: acceptance(p, q)
    recover: Recover | None = None,  # what a rejected position samples from; the exact rule: residual
    drop_rate: DropRate = lambda _token: Fraction(0),  # withhold the drawn token and sample p instead
) -> Dist:
    """Return the exact output distribution of draft, accept or reject, recover, by enumeration."""

    def rule() -> Branch:
        token = yield draft_probs
        if (yield coin(drop_rate(token))):
            return (yield target_probs)
        if (yield coin((rates or acceptance(target_probs, draft_probs))[token])):
            return token
        return (yield (recover or residual)(target_probs, draft_probs))

    return enumerate_branches(rule, len(target_probs))


def total_acceptance(target_probs: Dist, draft_probs: Dist) -> Fraction:
    """Return the probability that a drafted token is accepted, by enumeration."""

    def rule() -> Branch:
        token = yield draft_probs
        return (yield coin(acceptance(target_probs, draft_probs)[token]))

    return enumerate_branches(rule, 2)[1]


def expected_committed(rate: Fraction, block_length: int) -> Fraction:
    """Return E_k = (1 - a^(k+1))/(1 - a), +1 included, for a constant acceptance rate a (Leviathan et al. 2023)."""
    return Fraction(block_length + 1) if rate == 1 else (1 - rate ** (block_length + 1)) / (1 - rate)


def break_even_rate(tokens: Fraction, block_length: int, width: Fraction) -> tuple[Fraction, Fraction]:
    """Bracket the constant acceptance rate at which E_k equals `tokens`, by bisection down to `width`."""
    low, high = Fraction(0), Fraction(1)
    while high - low > width:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_committed(middle, block_length) < tokens else (low, middle)
    return low, high


def block_speed_up(tokens: Fraction | int, block_ms: Fraction) -> Fraction:
    """Return plain milliseconds for `tokens` over the block's; below 1 is a slow-down."""
    return tokens * PLAIN_STEP_MS / block_ms


def show(value: Fraction) -> str:
    """Write at most four decimals, with the fraction beside them where they are rounded."""
    short = f"{float(value):.4f}".rstrip("0").rstrip(".")
    return short if Fraction(short) == value or value.denominator > 9999 else f"{short} ({value})"


@dataclass
class Report:
    """Prints the tables and checks of one run and keeps what results.json holds."""

    sections: list[dict[str, object]] = field(default_factory=list)
    checks: list[dict[str, object]] = field(default_factory=list)  # those of the section in hand
    failures: list[str] = field(default_factory=list)

    def section(self, title: str, header: str, rows: Sequence[tuple[str, Dist, str]]) -> None:
        """Print rows of (label, computed values, expected values), then check those that expect something."""
        print(f"\n{title}\n  {'':<36}" + "".join(f"{word:>17}" for word in header.split()))
        for label, values, _ in rows:
            print(f"  {label:<36}" + "".join(f"{show(value):>17}" for value in values))
        self.checks = []
        self.sections.append({"title": title, "checks": self.checks})
        for label, values, expected in (row for row in rows if row[2]):
            self.check(label, expected, *values)

    def check(self, name: str, expected: str, *computed: Fraction) -> None:
        shown = [", ".join(map(show, side)) for side in (dist(expected), computed)]
        passed = dist(expected) == computed
        line = f"{'ok  ' if passed else 'FAIL'} {name}: expected {shown[0]}; computed {shown[1]}"
        print(line)
        self.failures += [] if passed else [line]
        exact, decimal = [str(value) for value in computed], [round(float(value), 6) for value in computed]
        self.checks.append({"name": name, "exact": exact, "decimal": decimal, "shown": shown[1]})


def acceptance_example(report: Report) -> None:
    p, q = dist("0.6 0.3 0.1"), dist("0.5 0.4 0.1")
    kept = speculative_output(p, q, rates=dist("1 1 1"))
    fresh = speculative_output(p, q, recover=lambda target, _draft: target)
    rows = [("target_probs p", p, ""), ("draft_probs q", q, "")]
    rows += [("acceptance min(1, p/q)", acceptance(p, q), "1 0.75 1"), ("residual", residual(p, q), "1 0 0")]
    rows += [("output, exact rule: p", speculative_output(p, q), "0.6 0.3 0.1")]
    rows += [("output, (a) keep every draft token: q", kept, "0.5 0.4 0.1")]
    rows += [("output, (b) fresh p after a rejection", fresh, "0.56 0.33 0.11")]
    rows += [("output, (c) exact rule with q = p", speculative_output(p, p), "0.6 0.3 0.1")]
    report.section("1. Accept, reject, recover", "A B C", rows)
    overlap = sum(map(min, p, q), Fraction(0))
    report.check("total acceptance, by enumeration and as sum min(p, q)", "0.9 0.9", total_acceptance(p, q), overlap)
    report.check("total variation from p, (a) and (b)", "0.1 0.04", total_variation(kept, p), total_variation(fresh, p))
    slow_ms = BLOCK_LENGTH * PLAIN_STEP_MS + VERIFY_MS  # step times of example 2, the draft as slow as the target
    slow = (total_acceptance(p, p), slow_ms, block_speed_up(6, slow_ms))
    report.check("(c) total acceptance, block ms, speed-up of its six tokens", "1 195 12/13", *slow)


def time_example(report: Report) -> None:
    block_ms = BLOCK_LENGTH * DRAFT_STEP_MS + VERIFY_MS
    rows = [
        (f"tokens from the block: {n}", (n * PLAIN_STEP_MS, block_ms, block_speed_up(n, block_ms)), expected)
        for n, expected in ((1, "30 55 6/11"), (2, "60 55 12/11"), (5, "150 55 30/11"), (6, "180 55 36/11"))
    ]
    report.section("2. One block's time: 5 x 2 ms drafting, 45 ms verification", "plain_ms block_ms speed-up", rows)
    report.check("tokens a second, at length 4 and plain", "800/11 100/3", 4000 / block_ms, 1000 / PLAIN_STEP_MS)
    even = block_ms / PLAIN_STEP_MS
    report.check("break-even acceptance length, +1 included", "11/6", even)
    low, high = break_even_rate(even, BLOCK_LENGTH, Fraction(1, 10**9))
    report.check("break-even rate a, both ends of its bracket", "0.4597 0.4597", round(low, 4), round(high, 4))
    losing = [Fraction(sum(rate**j for j in range(BLOCK_LENGTH + 1)) < even) for rate in (low, high)]
    report.check("slower than plain at its low end, at its high end (1 = yes)", "1 0", *losing)
    print(f"  A block whose acceptance lies below a = {float(high):.4f} ({show(even)} tokens) is slower than plain.")


def json_example(report: Report) -> None:
    raw, q = dist("0.3 0.2 0.1 0.4"), dist("0.2 0.4 0.1 0.3")
    p = normalised([*raw[:3], Fraction(0)])  # the grammar mask forbids the fourth key
    unmasked = speculative_output(p, q, recover=lambda _target, draft: residual(raw, draft))
    rows = [("target before the mask", raw, ""), ("draft_probs q", q, "")]
    rows += [("target_probs p, masked, renormalised", p, "1/2 1/3 1/6 0")]
    rows += [("acceptance min(1, p/q)", acceptance(p, q), "1 5/6 1 0")]
    rows += [("residual of the masked target", residual(p, q), "9/11 0 2/11 0")]
    rows += [("output: the masked target", speculative_output(p, q), "1/2 1/3 1/6 0")]
    rows += [("output, wrong: unmasked residual", unmasked, "23/60 1/3 1/10 11/60")]
    report.section("3. Constrained JSON: the key 'ssn' is forbidden", "name age city ssn", rows)
    report.check("total acceptance", "19/30", total_acceptance(p, q))
    others = [q, *map(dist, ("0 0 0 1", "1/4 1/4 1/4 1/4", "0.005 0.003 0.002 0.99"))]
    report.check("acceptance of 'ssn' under four drafts", "0 0 0 0", *(acceptance(p, other)[3] for other in others))
    report.check("'ssn' in the output, same drafts", "0 0 0 0", *(speculative_output(p, other)[3] for other in others))


def saving_example(report: Report) -> None:
    plain_ms, speculative_ms = Fraction(4000), Fraction(2900)
    saved, speed_up = 1 - speculative_ms / plain_ms, plain_ms / speculative_ms
    row = ("4,000 ms against 2,900 ms", (saved, speed_up, speed_up - 1), "0.275 40/29 11/29")
    report.section("4. One fact said three ways", "time_saved speed-up faster_by", [row])
    report.check("speed-up as 1/(1 - saved), saved as 1 - 1/speed-up", "40/29 0.275", 1 / (1 - saved), 1 - 1 / speed_up)
    report.check("faster by, as saved/(1 - saved)", "11/29", saved / (1 - saved))
    report.check("in percent: saved, faster by", "27.5 37.9", 100 * saved, round(100 * (speed_up - 1), 1))


def trap_example(report: Report) -> None:
    p, q = dist("0.7 0.3"), dist("0.5 0.5")
    trap = speculative_output(p, q, drop_rate=lambda token: Fraction(token == 1))
    blind = speculative_output(p, q, drop_rate=lambda _token: Fraction(1, 2))
    rows = [("target_probs p", p, ""), ("draft_probs q", q, "")]
    rows += [("output, wrong: drop x if it is second", trap, "0.85 0.15")]
    rows += [("output, drop by a blind coin: p", blind, "0.7 0.3")]
    report.section("5. The trap: a decision that looks at the drawn token x", "first second", rows)
    report.check("total variation from p of the wrong rule", "0.15", total_variation(trap, p))


def main(argv: Sequence[str] | None = None) -> int:
    """Print and check every example; write results.json only when all of them hold."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json")
    out, report = parser.parse_args(argv).out, Report()
    for example in (acceptance_example, time_example, json_example, saving_example, trap_example):
        example(report)
    if report.failures:
        print("\n".join(report.failures), file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps({"sections": report.sections}, indent=2) + "\n", encoding="utf-8")
    print(f"\nAll checks hold; wrote {out / 'results.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
