"""What a segmenter may look at: a short excerpt of the prompt, its length, how it is decoded, for whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autospec.segments.labels import current_tenant

if TYPE_CHECKING:
    from torch import Tensor

    from autospec.calls import Call

HEAD_TOKENS = 160
TAIL_TOKENS = 160
MAX_CHARACTERS = 1_000  # of either end
CUT = "\n[...]\n"
"""What stands in an excerpt for the middle of the prompt."""
_BYTES_PER_TOKEN = 4  # where no tokenizer counts them


class Prompt:
    """One request before it is decoded. What takes time is worked out when it is first asked for.

    Args:
        read: gives the excerpt.
        prompt_tokens: of the whole prompt; 0 when it is not given as ids.
        do_sample: whether tokens are sampled.
        decoding: as in `sample temperature=0.8 top_p=0.95`, with `logits_processor` and `prefix_allowed_tokens_fn`
            where the call has them; or what gives this.
        tenant: for whom.
    """

    def __init__(
        self,
        read: Callable[[], str],
        prompt_tokens: int,
        *,
        do_sample: bool = False,
        decoding: str | Callable[[], str] = "greedy",
        tenant: str | None = None,
    ) -> None:
        self._read = read
        self.prompt_tokens = prompt_tokens
        self.do_sample = do_sample
        self._decoding = decoding
        self.tenant = tenant

    @cached_property
    def text(self) -> str:
        """Both ends of the prompt, special tokens included; empty without a tokenizer."""
        return self._read()

    @cached_property
    def decoding(self) -> str:
        """How tokens are chosen."""
        return self._decoding if isinstance(self._decoding, str) else self._decoding()

    @classmethod
    def of_call(cls, call: Call, tokenizer: Any | None) -> Prompt:
        """The first row of what `generate` was given."""
        ids = call.prompt_ids()
        tokenizer = call.arguments.get("tokenizer", tokenizer)

        def read() -> str:
            if tokenizer is None or ids is None or not len(ids) or ids.is_floating_point():
                return ""
            return excerpt(ids[0], tokenizer)

        return cls(
            read,
            call.prompt_tokens(),
            do_sample=bool(call.setting("do_sample")),
            decoding=call.describe,
            tenant=current_tenant(),
        )

    @classmethod
    def of_ids(cls, ids: Sequence[int], tokenizer: Any, **options: Any) -> Prompt:
        """A prompt that is there as tokens."""
        return cls(lambda: excerpt(list(ids), tokenizer), len(ids), **options)

    @classmethod
    def of_text(cls, text: str, *, prompt_tokens: int | None = None, **options: Any) -> Prompt:
        """A prompt that is there as text alone; its tokens are estimated where they are not given."""
        if prompt_tokens is None:
            prompt_tokens = -(-len(text.encode("utf-8", "replace")) // _BYTES_PER_TOKEN)
        return cls(lambda: shortened(text), prompt_tokens, **options)


def excerpt(ids: list[int] | Tensor, tokenizer: Any) -> str:
    """The first and the last tokens of a prompt as text, special tokens included.

    Args:
        ids: [n]; no more than 320 of them are read.
        tokenizer: has `decode`.
    """
    if len(ids) <= HEAD_TOKENS + TAIL_TOKENS:
        return shortened(str(tokenizer.decode(ids)))
    head, tail = tokenizer.decode(ids[:HEAD_TOKENS]), tokenizer.decode(ids[-TAIL_TOKENS:])
    return f"{head[:MAX_CHARACTERS]}{CUT}{tail[-MAX_CHARACTERS:]}"


def shortened(text: str) -> str:
    """A text with its middle left out where it is long."""
    if len(text) <= 2 * MAX_CHARACTERS:
        return text
    return text[:MAX_CHARACTERS] + CUT + text[-MAX_CHARACTERS:]
