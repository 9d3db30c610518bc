"""What experiments share: questions that lie outside of the checkout, ways to decode, and one another's scripts."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
FOLDER = Path(__file__).parent
VARIABLE = "AUTOSPEC_PROMPTS"
QUESTIONS = "questions of Spec-Bench, JSON lines with question_id, segment and turns (experiments/04_spec_bench)"
DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "T = 0.8": {"do_sample": True, "temperature": 0.8, "top_k": 0},
}

MIX = "all"
"""In the place of a segment, or of a way to choose tokens: all of them."""


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """The option --prompts, by default the file that the environment names."""
    given = os.environ.get(VARIABLE) or None
    parser.add_argument("--prompts", type=Path, default=given, metavar="FILE", help=f"{QUESTIONS}; else ${VARIABLE}")


def need_prompts(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """End the script in one line unless the file is there."""
    if path is None:
        parser.error(f"no prompts: give --prompts FILE or set {VARIABLE}: {QUESTIONS}")
    if not path.is_file():
        parser.error(f"--prompts {path}: no such file; wanted are {QUESTIONS}")


@cache
def script(folder: str, name: str = "run") -> ModuleType:
    """A module of another experiment."""
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", FOLDER / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def turned(arms: Sequence[T], number: int) -> list[T]:
    """In another order for each number: turned by so many, and every second time backwards."""
    start = number % len(arms) if arms else 0
    found = [*arms[start:], *arms[:start]]
    return found if number % 2 == 0 else found[::-1]


def interval(values: Sequence[float]) -> str:
    """A ratio in words. Args: values: it, and the ends of its interval."""
    value, low, high = values
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def line(*cells: str) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join('all segments' if cell == MIX else cell for cell in cells)} |"


def rule(columns: int) -> str:
    """What stands below a table's heads."""
    return "|" + "---|" * columns
