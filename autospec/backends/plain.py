"""The model's own forward over static buffers: nothing is compiled."""

from __future__ import annotations

from autospec.backends.base import Forward


class PlainRunner:
    """Runs forwards as they are. It gains nothing; it shows what fixed shapes alone cost, and that they are exact."""

    name = "plain"
    memory_bytes = 0

    def __init__(self) -> None:
        self.num_captures = 0

    def prepare(self, forward: Forward) -> Forward:
        self.num_captures += 1
        return forward
