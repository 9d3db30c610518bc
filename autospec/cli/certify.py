"""`autospec certify`: the proof of exactness, run again here."""

from __future__ import annotations

import sys
from collections import defaultdict
from json import dumps

import click


@click.command(name="certify")
@click.option("--full", is_flag=True, show_envvar=True, help="Longer outputs and crossed axes: takes much longer.")
@click.option("--json", is_flag=True, show_envvar=True, help="Print one JSON object.")
def command(full: bool, json: bool) -> None:
    """Run the decoder over every branch of every random draw and compare whole-output distributions.

    Small synthetic targets and drafts, float64, production code. Exact means: total variation and missing probability
    of at most 1e-12 in every case. Exits with 1 if a case is not exact.
    """
    from tqdm import tqdm

    from autospec.certify import BOUND, certify, full_cases, quick_cases

    cases = list(full_cases() if full else quick_cases())
    covered: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    certificates = []
    for case, certificate in zip(
        cases, tqdm(certify(cases), total=len(cases), desc="certify", unit="case"), strict=True
    ):
        certificates.append(certificate)
        for axis, value in case.tags.items():
            covered[axis][value] += 1
    violations = [c for c in certificates if not c.is_exact]
    branches = sum(c.branches for c in certificates)
    worst = max(certificates, key=lambda c: c.total_variation)
    if json:
        click.echo(
            dumps(
                {
                    "cases": len(certificates),
                    "branches": branches,
                    "bound": BOUND,
                    "largest_total_variation": worst.total_variation,
                    "covered": covered,
                    "violations": [
                        {"name": c.name, "total_variation": c.total_variation, "mass": c.mass} for c in violations
                    ],
                }
            )
        )
    else:
        for axis, values in covered.items():
            click.echo(f"{axis}: " + ", ".join(f"{value} ({count})" for value, count in values.items()))
        click.echo(
            f"{len(certificates)} cases, {branches} branches; largest total variation {worst.total_variation:.1e}"
        )
        for c in violations:
            click.echo(f"NOT EXACT {c.name}: total variation {c.total_variation:.3e}, mass {c.mass!r}")
        click.echo("exact" if not violations else f"{len(violations)} of {len(certificates)} cases are not exact")
    sys.exit(1 if violations else 0)
