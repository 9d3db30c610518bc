"""`num_speculative_tokens_per_batch_size` for vLLM, from telemetry and from what steps cost."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import tomli_w
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from autospec.cli.main import group
from autospec.errors import ConfigurationError
from autospec.export.batch_sizes import Acceptance, measured_acceptance, schedule
from autospec.export.schemas import SCHEMAS
from autospec.export.vllm_check import check
from autospec.telemetry import Recorder, Store
from autospec.types import ActionTally, CalibrationSample, Deployment, PhaseSeconds, RequestRecord

GOOD = Acceptance(1.0, tuple(0.8**position for position in range(1, 9)), 1000)


def saturating(num_tokens: float) -> float:
    """Up to 64 tokens cost as one."""
    return 0.02 * max(1.0, num_tokens / 64.0)


def test_the_larger_the_batch_the_shorter_the_drafts() -> None:
    table = schedule(GOOD, saturating, longest=8, most_requests=256)
    assert table[0] == (1, 7, 8)  # 7 requests and 56 drafts still fit
    lengths = [length for _, _, length in table]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0
    assert [first for first, _, _ in table] == [1, *(last + 1 for _, last, _ in table[:-1])]
    assert table[-1][1] == 256


def test_what_is_never_accepted_is_never_drafted() -> None:
    assert schedule(Acceptance(1.0, (0.0,), 1000), saturating, 8, 16) == ((1, 16, 0),)
    assert schedule(Acceptance(0.0, (), 1000), saturating, 8, 16) == ((1, 16, 0),)


def test_where_drafts_are_rare_they_are_longer() -> None:
    """Of 32 requests an eighth has drafts: there is room for theirs."""
    rare = Acceptance(0.125, GOOD.survival, 1000)
    length_of = {acceptance: schedule(acceptance, saturating, 8, 32)[-1][2] for acceptance in (rare, GOOD)}
    assert length_of[rare] > length_of[GOOD]


def deployment(device: str = "vllm: cpu") -> Deployment:
    return Deployment("host", device, "model", "float32", ("ngram",), {})


def request(number: int, policy: str, blocks: int = 100) -> RequestRecord:
    tally = ActionTally(blocks=blocks, at_risk=(blocks, blocks // 2), accepted=(blocks // 2, blocks // 4))
    return RequestRecord(
        f"{number:032x}", datetime.now(UTC), "default", policy, False, True, "greedy", 10, 100, PhaseSeconds(other=1.0),
        blocks=blocks, actions={"ngram:4": blocks}, by_action={"ngram:4": tally}, deployment=deployment(),
    )  # fmt: skip


def test_steps_in_which_the_proposer_was_off_are_no_misses(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    off = {"none": ActionTally(blocks=1000)}
    fixed, ingested = request(1, "fixed:ngram:4", 200), request(2, "vllm:suffix", 200)
    with Recorder(url) as recorder:
        recorder.record(replace(fixed, blocks=1200, by_action={**fixed.by_action, **off}))
        suffix = {"suffix:4": fixed.by_action["ngram:4"]}
        recorder.record(replace(ingested, blocks=1200, by_action={**suffix, **off}))  # vLLM's own: it found nothing
        recorder.flush()
    with Store(url, readonly=True) as store:
        assert measured_acceptance(store, "ngram").hit_rate == 1.0
        assert measured_acceptance(store, "suffix").hit_rate == pytest.approx(1 / 6)


def export(folder: Path, *args: str) -> tuple[int, str, str]:
    policy = folder / "policy.toml"
    default = {"source": "ngram", "block_length": 4}
    policy.write_text(tomli_w.dumps({"format": "autospec-policy", "version": 1, "default": default}))
    done = CliRunner().invoke(group, ["export", str(policy), *args], prog_name="autospec")
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/store.db"
    with Recorder(url) as recorder:
        recorder.record(request(1, "fixed:ngram:4", 200))
        recorder.record(request(2, "auto", 10_000))  # chosen block by block: says nothing of a fixed drafter
        when = datetime(2026, 1, 1, tzinfo=UTC)
        for tokens in (1, 8, 64, 128, 512):
            recorder.note(CalibrationSample(deployment(), when, "target", tokens, 0, saturating(tokens)))
        recorder.note(CalibrationSample(deployment("cpu"), datetime.now(UTC), "target", 1, 64, 5.0))
        recorder.flush()
    return url


def test_the_table_goes_with_the_configuration(tmp_path: Path, url: str) -> None:
    code, out, err = export(tmp_path, "--to", "vllm", "--store", url, "--most-requests", "128")
    assert code == 0, err
    settings = json.loads(out)
    assert list(Draft202012Validator(SCHEMAS["vllm"]).iter_errors(settings)) == []
    table = settings["num_speculative_tokens_per_batch_size"]
    assert table[0][0] == 1
    assert table[0][2] > 0
    assert table[-1] == [table[-1][0], 128, 0]
    assert "no schedule by batch size" not in err


def test_what_is_not_known_is_said(tmp_path: Path, url: str) -> None:
    empty = f"sqlite:///{tmp_path}/empty.db"
    with Recorder(empty) as recorder:
        recorder.record(request(1, "auto"))
        recorder.flush()
    code, _, err = export(tmp_path, "--to", "vllm", "--store", empty)
    assert code == 2
    assert "0 blocks of requests that 'ngram' alone decoded, 200 are needed" in err
    with Recorder(empty) as recorder:
        recorder.record(request(2, "vllm:ngram", 300))
        recorder.flush()
    code, _, err = export(tmp_path, "--to", "vllm", "--store", empty)
    assert code == 2
    assert "no engine has told what its steps cost" in err
    code, _, err = export(tmp_path, "--to", "sglang", "--store", url)
    assert code == 2
    assert "--store and --check are for --to vllm alone" in err


def test_check_needs_vllm() -> None:
    with pytest.raises(ConfigurationError, match="asks the vLLM that is installed, and here is none"):
        check({}, "model", 16)
