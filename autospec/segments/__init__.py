"""Which slice of traffic a request belongs to: labels, rules, built-in signs, learned clusters (docs/segments.md)."""

from autospec.segments.features import OTHER, SEGMENTS
from autospec.segments.labels import DEFAULT, MAX_LENGTH, clean, resolve, segment, tenant
from autospec.segments.prompts import Prompt
from autospec.segments.requests import make_segmenter
from autospec.segments.rules import Rule
from autospec.segments.segmenter import Assignment, Segmenter

__all__ = [
    "DEFAULT",
    "MAX_LENGTH",
    "OTHER",
    "SEGMENTS",
    "Assignment",
    "Prompt",
    "Rule",
    "Segmenter",
    "clean",
    "make_segmenter",
    "resolve",
    "segment",
    "tenant",
]
