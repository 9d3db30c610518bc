"""What a folder of traffic holds, in counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from autospec.traffic.reader import TrafficReader


def summarise(folder: Path) -> dict[str, Any]:
    """Requests and tokens by segment and in all, what they were recorded with, when they arrived, what is damaged.

    Returns:
        plain JSON values.

    Raises:
        ConfigurationError: the folder holds no traffic.
    """
    reader = TrafficReader(folder)
    requests: Counter[str] = Counter()
    pending: Counter[str] = Counter()
    prompt_tokens: Counter[str] = Counter()
    output_tokens: Counter[str] = Counter()
    first: datetime | None = None
    last: datetime | None = None
    for request in reader:
        requests[request.segment] += 1
        pending[request.segment] += request.is_pending
        prompt_tokens[request.segment] += len(request.prompt)
        output_tokens[request.segment] += len(request.output)
        if request.is_arrival_known:
            first, last = first or request.started_at, request.started_at
    counts = {
        "requests": requests,
        "pending": pending,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
    }
    return {
        "target": reader.manifest.target,
        "tokenizer": reader.manifest.tokenizer,
        "fingerprint": reader.manifest.fingerprint,
        "versions": dict(reader.manifest.versions),
        "first": None if first is None else first.isoformat(timespec="seconds"),
        "last": None if last is None else last.isoformat(timespec="seconds"),
        "files": reader.num_files,
        "superseded": reader.num_superseded,
        "damaged": [asdict(each) for each in reader.damages],
        "segments": [
            {"segment": name, **{key: count[name] for key, count in counts.items()}} for name in sorted(requests)
        ],
        "all": {key: count.total() for key, count in counts.items()},
    }
