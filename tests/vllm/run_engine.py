"""One vLLM engine from start to end, as a process of its own: a job on stdin, its answers on stdout.

A job has `speculative` (vLLM's config, or null), and `rounds`: lists of requests that are answered together, each with
`messages` and `sampling` (vLLM's SamplingParams).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

CONCURRENCY = 4


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever vLLM prints
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["model"],
        speculative_config=job["speculative"],
        enforce_eager=True,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=CONCURRENCY,
        gpu_memory_utilization=0.3,  # of the memory, also on the CPU
        seed=0,
        per_request_spec_decode_metrics="summary" if job["speculative"] else "none",
        **job.get("engine", {}),
    )
    rounds, counts = [], {"num_draft_tokens": 0, "num_accepted_draft_tokens": 0, "num_spec_steps": 0}
    for requests in job["rounds"]:
        made = llm.chat(
            [request["messages"] for request in requests],
            [SamplingParams(**request["sampling"]) for request in requests],
            use_tqdm=False,
        )
        for each in made:
            own = each.outputs[0].spec_decode_metrics
            for name in counts if own is not None else ():
                counts[name] += own.to_dict()[name]
        rounds.append([list(each.outputs[0].token_ids) for each in made])
    json.dump({"rounds": rounds, "counts": counts}, answers)
    answers.close()


if __name__ == "__main__":
    main()
