"""The segment of each request of a wrapped model. Whatever goes wrong in finding it, the request goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from autospec.errors import ConfigurationError
from autospec.notices import warn
from autospec.segments.labels import DEFAULT, clean
from autospec.segments.prompts import Prompt
from autospec.segments.segmenter import Segmenter

if TYPE_CHECKING:
    from autospec.calls import Call

AUTO = "auto"


def make_segmenter(segments: str | Path | Segmenter | None) -> Segmenter:
    """What `autospec.wrap(segments=...)` means.

    Args:
        segments: None for labels alone, `auto` for the built-in segments, the path of a TOML file, or a segmenter.

    Raises:
        ConfigurationError: something else, or the file cannot be used.
    """
    if isinstance(segments, Segmenter):
        return segments
    if segments is None:
        return Segmenter()
    if segments == AUTO:
        return Segmenter(builtin=True)
    if isinstance(segments, (str, Path)):
        return Segmenter.from_file(segments)
    raise ConfigurationError(
        f"segments={segments!r}: None, 'auto', the path of a TOML file, or an autospec.segments.Segmenter is needed"
    )


class RequestSegments:
    """Asks a segmenter, and outlives its failures."""

    def __init__(self, segmenter: Segmenter) -> None:
        self._segmenter = segmenter
        self._has_warned = False

    def of(self, label: Any, call: Call, tokenizer: Any | None) -> str:
        """The segment of one call.

        Args:
            label: what the call was given as `segment=`.
            call: looked at only where there is no label.
            tokenizer: without it there is no text to look at.

        Raises:
            ConfigurationError: the label is no text, or empty.
        """
        if (given := self._segmenter.given(label)) is not None:
            return given.segment
        if self._segmenter.is_blank:
            return DEFAULT
        try:
            return clean(self._segmenter.assign(Prompt.of_call(call, tokenizer)).segment)
        except Exception as error:  # noqa: BLE001  # a label for the report is never worth an answer
            if not self._has_warned:
                self._has_warned = True
                text = " ".join(str(error).split())
                warn(f"segments: {type(error).__name__}: {text:.200}; such requests are in {DEFAULT!r}", stacklevel=4)
            return DEFAULT
