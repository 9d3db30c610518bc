"""The built-in segments, told by cheap signs in a short excerpt of the prompt.

Most signs are of no language: symbols, lines, numbers, turns, scripts, length. Words count only where a prompt says
what is wanted: the system's part, and the beginning and the end of the last turn.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autospec.segments.prompts import CUT
from autospec.segments.shape import share_of
from autospec.segments.turns import Turn, turns_of
from autospec.segments.words import (
    CODE,
    DIALOGUE,
    LONG_CONTEXT,
    MATHEMATICS,
    STRUCTURED,
    TRANSLATION,
    cues,
)

OTHER = "other"
SEGMENTS = (STRUCTURED, CODE, TRANSLATION, MATHEMATICS, LONG_CONTEXT, DIALOGUE, OTHER)
"""The built-in segments; of two with the same score the earlier one is taken."""

THRESHOLD = 1.5
"""What a segment needs to be more than `other`."""

_EDGE = 400  # characters at either end of the last turn, and at the beginning of the system's part
_SHORT = 1_500  # characters of a problem in words
_QUESTION = 300  # characters of a question among people
_LONG_TOKENS = 500
_PASSAGE = 800  # characters without a change of turn
_TASK_CAP, _TOPIC_CAP = 3.0, 1.5

_FENCE = re.compile(r"```[ \t]*(\w*)")
_DATA_FENCES = frozenset(["json", "yaml", "xml", "csv", "toml"])
_LINE_STARTS = "def class import from return async await #include public private protected static const let var func fn"
_LINE_STARTS += " package using namespace if( for( while( // /* SELECT INSERT CREATE UPDATE"
_CODE_STARTS = frozenset(_LINE_STARTS.split())
_BLOCK_STARTS = frozenset(["if", "elif", "else:", "for", "while", "with", "try:", "except", "finally:", "case"])
_CODE_ENDS = (";", "{", "}", "):", "=>", "*/")
_BRACKETS = "{}[](),; \t\r"
_SYMBOLS = b"{}[]();=<>_"
_OPERATORS = ("==", "!=", "=>", "->", "::", "+=", "&&", "||", "();", "()")
_JSON_KEY = re.compile(r'"[^"\n]{1,40}"\s*:')
_LATEX = re.compile(r"\\(?:frac|sqrt|sum|int|cdot|times|leq?|geq?|left|pi|alpha|theta)\b|\$\$")
_MATHS_SYMBOLS = re.compile("[\u2211\u222b\u221a\u2264\u2265\u2260\u221e\u2202\u00d7\u00f7\u03c0\u00b2\u00b3]")
_SUM = re.compile(r"\d\s*[+*\u00d7\u00f7=^]\s*[\d(x]|\d\s+[-/]\s+\d|\d/\d|\b[xyzn]\s*[-+*/^=]\s*\d")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_YEAR = re.compile(r"(?:19|20)\d\d")
_PAIR = re.compile(r"\b[a-z]{2}\s?(?:->|\u2192|=>)\s?[a-z]{2}\b", re.I)
_QUESTION_MARKS = ("?", "\uff1f", "\u061f")


class Sign(NamedTuple):
    """Something found in a prompt that speaks for a segment."""

    segment: str
    weight: float
    what: str


def signs(text: str, prompt_tokens: int, decoding: str = "greedy") -> list[Sign]:
    """What speaks for the built-in segments.

    Args:
        text: an excerpt of the prompt, with the special tokens of its chat template.
        prompt_tokens: of the whole prompt.
        decoding: as in a record; constraints on tokens are a sign of structured output.
    """
    turns = turns_of(text)
    said = [turn for turn in turns if turn.role != "system"] or turns
    last = said[-1].text if said else ""
    body = "\n".join(turn.text for turn in said)
    system = " ".join(turn.text[:_EDGE] for turn in turns if turn.role == "system")
    asked = last if len(last) <= 2 * _EDGE else f"{last[:_EDGE]} {last[-_EDGE:]}"
    return [
        *_of_words(f"{system} {asked}", prompt_tokens),
        *_of_code(body),
        *_of_structure(body, decoding),
        *_of_translation(asked),
        *_of_mathematics(last),
        *_of_length(said, prompt_tokens),
        *_of_dialogue(said, last, body),
    ]


def score(found: Sequence[Sign]) -> dict[str, float]:
    """The sum of weights of each segment that has a sign, highest first; of equal ones as in `SEGMENTS`."""
    sums: defaultdict[str, float] = defaultdict(float)
    for sign in found:
        sums[sign.segment] += sign.weight
    return dict(sorted(sums.items(), key=lambda pair: (-pair[1], SEGMENTS.index(pair[0]))))


def classify(found: Sequence[Sign]) -> str:
    """The built-in segment that the signs speak for; `other` when none of them has enough."""
    segment, best = next(iter(score(found).items()), (OTHER, 0.0))
    return segment if best >= THRESHOLD else OTHER


def _of_words(text: str, prompt_tokens: int) -> Iterator[Sign]:
    """Words, up to a bound for each segment; to summarise takes something that is long."""
    left: dict[tuple[str, str], float] = {}
    for cue in cues(text):
        bound = left.setdefault((cue.segment, cue.kind), _TASK_CAP if cue.kind == "task" else _TOPIC_CAP)
        weight = min(cue.weight, bound)
        if cue.segment == LONG_CONTEXT and prompt_tokens < _LONG_TOKENS // 4:
            weight /= 2
        left[cue.segment, cue.kind] = bound - weight
        if weight > 0:
            yield Sign(cue.segment, weight, f"word {cue.word!r}")


def _of_code(body: str) -> Iterator[Sign]:
    fences = [name.lower() for name in _FENCE.findall(body)]
    opened = fences[::2]
    if any(name not in _DATA_FENCES for name in opened):
        yield Sign(CODE, 2.0, "a fenced block")
    lines = [line.strip() for line in body.split("\n") if line.strip(_BRACKETS)]
    code_lines = sum(
        not line.startswith('"')
        and (
            line.endswith(_CODE_ENDS)
            or (first := line.split(None, 1)[0]) in _CODE_STARTS
            or (line.endswith(":") and first in _BLOCK_STARTS)
        )
        for line in lines
    )
    if code_lines >= 2 and 4 * code_lines >= len(lines):
        yield Sign(CODE, min(3.0, 1.0 + 0.25 * code_lines), f"{code_lines} lines of code")
    share = share_of(body.encode("utf-8", "replace"), _SYMBOLS)
    if share > 0.05 and len(body) > 40:
        yield Sign(CODE, 1.0, f"{share:.0%} brackets and operators")
    if sum(operator in body for operator in _OPERATORS) >= 2:
        yield Sign(CODE, 1.0, "operators of programs")


def _of_structure(body: str, decoding: str) -> Iterator[Sign]:
    if any(name.lower() in _DATA_FENCES for name in _FENCE.findall(body)):
        yield Sign(STRUCTURED, 1.5, "a fenced block of data")
    if (keys := len(_JSON_KEY.findall(body))) >= 2:
        yield Sign(STRUCTURED, 2.0, f"{keys} quoted keys")
    if "prefix_allowed_tokens_fn" in decoding:
        yield Sign(STRUCTURED, 3.0, "tokens are constrained")
    elif "logits_processor" in decoding:
        yield Sign(STRUCTURED, 1.0, "a logits processor of the caller's")


def _of_translation(asked: str) -> Iterator[Sign]:
    if ("->" in asked or "\u2192" in asked or "=>" in asked) and _PAIR.search(asked):
        yield Sign(TRANSLATION, 2.5, "a pair of language codes")
    others = len(asked) - len(asked.encode("latin-1", "ignore"))
    letters = len(asked) - asked.count(" ")
    if min(others, letters - others) >= max(15, letters // 5):
        yield Sign(TRANSLATION, 1.0, "two scripts")


def _of_mathematics(last: str) -> Iterator[Sign]:
    if _LATEX.search(last) or _MATHS_SYMBOLS.search(last):
        yield Sign(MATHEMATICS, 1.5, "signs of formulas")
    if len(last) > _SHORT or CUT in last:
        return
    if sums := len(_SUM.findall(last)):
        yield Sign(MATHEMATICS, min(2.5, 1.0 + 0.5 * sums), f"{sums} sums or fractions")
    numbers = sum(not _YEAR.fullmatch(number) for number in _NUMBER.findall(last))
    is_question = any(mark in last for mark in _QUESTION_MARKS)
    if numbers >= 3 and (is_question or 120 * numbers >= len(last)):
        yield Sign(MATHEMATICS, 2.0 if is_question else 1.0, f"{numbers} numbers in a short text")
    elif numbers == 2 and is_question:
        yield Sign(MATHEMATICS, 1.0, "2 numbers in a question")


def _of_length(said: Sequence[Turn], prompt_tokens: int) -> Iterator[Sign]:
    passage = max((len(turn.text) for turn in said), default=0)
    if prompt_tokens >= _LONG_TOKENS and passage >= _PASSAGE:
        yield Sign(LONG_CONTEXT, 2.0, f"{prompt_tokens} tokens, a passage in them")


def _of_dialogue(said: Sequence[Turn], last: str, body: str) -> Iterator[Sign]:
    if (earlier := len(said) - 1) > 0:
        yield Sign(DIALOGUE, min(3.0, 1.25 + 0.25 * earlier), f"{earlier} earlier turns")
    names = Counter(
        name for line in body.split("\n") if (name := line.partition(":")[0]) != line and 0 < len(name.strip()) <= 20
    )
    if sum(count >= 2 for count in names.values()) >= 2:
        yield Sign(DIALOGUE, 2.0, "lines of several speakers")
    if len(last) <= _QUESTION and last.endswith(_QUESTION_MARKS):
        yield Sign(DIALOGUE, 1.5, "a short question")
