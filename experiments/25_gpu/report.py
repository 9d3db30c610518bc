"""The short table that a run prints last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WIDTHS = (5, 6, 7, 22, 8, 8, 15, 7, 7)


def report(results: dict[str, Any]) -> None:
    about = results["about"]
    print(
        f"{about['device']}, torch {about['torch']}, transformers {about['transformers']}, {results['seconds']:.0f} s"
    )
    print(results["says"])
    print()
    print(_line("shape", "agree", "context", "arm", "ms/token", "speed-up", "95 %", "accept", "length"))
    for target in results["targets"].values():
        for cell in target["cells"]:
            for arm in cell["arms"]:
                print(_row(cell, arm))
    print()
    for text in _others(results):
        print(text)
    for text in results["left_out"]:
        print("left out", text)
    for check in results["checks"]:
        print("ok  " if check["is_ok"] else "FAIL", f"{check['name']}: {check['shown']}")
    for text in results["failures"]:
        print("FAIL", text)


def _row(cell: dict[str, Any], arm: dict[str, Any]) -> str:
    context = f"{cell['context']}{'r' if cell['prompt'] == 'repetitive' else ''}"
    low, high = arm["interval"]
    accepted, length = arm.get("acceptance"), arm.get("acceptance_length")
    return _line(
        cell["shape"],
        f"{cell['wanted_agreement']:g}",
        context,
        arm["arm"],
        f"{arm['ms_per_token']:.2f}",
        f"{arm['speed_up']:.2f}",
        f"{low:.2f} to {high:.2f}",
        "" if accepted is None else f"{accepted:.2f}",
        "" if length is None else f"{length:.2f}",
    )


def _others(results: dict[str, Any]) -> Iterator[str]:
    if "copy_bytes_per_second" in results:
        yield f"copy bandwidth {results['copy_bytes_per_second'] / 1e9:.0f} GB/s"
    for name, target in results["targets"].items():
        if "bandwidth" in target:
            found = target["bandwidth"]
            shown = f"{found['step_ms']:.2f} ms of which reading the weights takes {found['floor_ms']:.2f}"
            yield f"{name}: a plain step takes {shown}, a share of {found['share']:.2f}"
        for backend, costs in target.get("costs", {}).items():
            for kind, errors in costs["errors"].items():
                shown = ", ".join(f"{key} {errors[key]['median']:.1%} (p90 {errors[key]['p90']:.1%})" for key in errors)
                yield f"{name}: {backend}: foretelling {kind}: error of {shown}"
            for kind, error in costs["in_service"].items():
                shown = f"error {error['median']:.1%} (p90 {error['p90']:.1%})"
                yield f"{name}: {backend}: foretelling {kind} in service: {shown}"
        for backend, found in target.get("backends", {}).items():
            if found is not None:
                shown = f"{found['captures']} forwards, {found['memory_bytes'] / 1e9:.2f} GB, {found['speedups']}"
                yield f"{name}: {backend} is {found['name']}: {shown}"
        for row in target.get("synchronisations", []):
            yield f"{name}: {row['arm']} waits {row['per_block']:.2f} times a block, {row['per_token']:.2f} a token"
    for row in results.get("processors", []):
        if row["same_bits"] < row["blocks"]:
            shown = f"{row['same_bits']} of {row['blocks']} blocks, largest change {row['largest_change']:.1e}"
            yield f"processor {row['processor']}, {row['vocab_size']} tokens: bits of a block are the rows' in {shown}"


def _line(*cells: str) -> str:
    return " ".join(
        cell.ljust(w) if i in (0, 3) else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, WIDTHS, strict=True))
    )
