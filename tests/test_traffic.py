"""Recorded traffic: what is written is read back, whatever happens to the writer and to its files."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard

import autospec
from autospec.errors import AutospecError, ConfigurationError
from autospec.traffic import FollowUp, Manifest, ShardWriter, Traffic, TrafficFullError, TrafficReader, TrafficRequest
from autospec.traffic.shards import encode, frames, shard_files
from autospec.types import PhaseSeconds
from tests import tiny

ROOT = Path(__file__).parent.parent
TOKENIZER = tiny.tokenizer()
START = datetime(2026, 1, 31, 12, tzinfo=UTC)


def request(number: int, **options: Any) -> TrafficRequest:
    settings: dict[str, Any] = {
        "request_id": f"{number:032x}",
        "started_at": START + timedelta(seconds=number),
        "segment": "code",
        "prompt": tuple(range(number % 7 + 1)),
        "output": (number, 3),
    }
    return TrafficRequest(**{**settings, **options})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "traffic"


def opened(folder: Path, **options: Any) -> Traffic:
    traffic = Traffic(folder, **options)
    traffic.belong_to(TOKENIZER, "tiny")
    return traffic


def written(folder: Path, requests: Sequence[TrafficRequest], **options: Any) -> Traffic:
    traffic = opened(folder, **options)
    for each in requests:
        traffic.write(each)
    traffic.close()
    return traffic


class TestRequest:
    def test_all_fields_come_back(self) -> None:
        full = request(
            1,
            options={"do_sample": True, "temperature": 0.8, "eos_token_id": [1, 2]},
            decoding="sample temperature=0.8",
            policy="auto",
            is_control=True,
            fallback_reason="beams",
            total_seconds=1.5,
            seconds=PhaseSeconds(prefill=0.5, other=1.0),
            acceptance_lengths={1: 4, 3: 2},
            num_draft_tokens=12,
            conversation="c",
            origin="import:openai",
            is_arrival_known=False,
            follow_up=FollowUp(({"role": "user", "content": "a\u2028b"},), ("next",)),
            revision=2,
        )
        for each in (full, request(2), request(3, output=())):
            assert TrafficRequest.from_json(json.loads(json.dumps(each.to_json()))) == each
        assert request(3, output=()).is_pending

    @pytest.mark.parametrize(
        "change",
        [
            {"prompt": [1.5]},
            {"prompt": [-1]},
            {"output": "ab"},
            {"started_at": "2026-01-31T12:00:00"},
            {"started_at": "soon"},
            {"segment": None},
            {"seconds": {"coffee": 1}},
        ],
        ids=str,
    )
    def test_what_is_no_request(self, change: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"."):
            TrafficRequest.from_json({**request(1).to_json(), **change})
        with pytest.raises(ValueError, match="no request"):
            TrafficRequest.from_json([])

    def test_keys_of_later_versions_are_left_out(self) -> None:
        assert TrafficRequest.from_json({**request(1).to_json(), "mood": "good"}) == request(1)


class TestFolder:
    def test_read_in_the_order_of_arrival_over_all_files(self, folder: Path) -> None:
        every = [request(number) for number in range(9)]
        written(folder, [every[5], every[1], every[8]])
        written(folder, [every[7], every[2], every[0]])
        written(folder, [every[4], every[3], every[6]])
        reader = TrafficReader(folder, TOKENIZER)
        assert list(reader) == every
        assert (reader.num_files, reader.num_superseded, reader.damages) == (3, 0, ())
        assert list(reader) == every  # again

    @pytest.mark.parametrize("is_first_file", [True, False])
    def test_later_turns_come_after_earlier_ones_whatever_their_file(self, folder: Path, is_first_file: bool) -> None:
        """Both have the time of the conversation's first turn; a pool that is replayed must not know the later one."""
        written(folder, [request(1)])
        written(folder, [request(2, started_at=request(1).started_at, turn=1)])
        earlier, later = sorted(shard_files(folder), key=lambda path: path.stat().st_mtime_ns)
        names = ("1-a.jsonl.zst", "2-b.jsonl.zst")
        for path, name in zip((earlier, later), names if is_first_file else names[::-1], strict=True):
            path.rename(folder / name)
        assert [each.request_id for each in TrafficReader(folder)] == [request(1).request_id, request(2).request_id]

    def test_a_completed_record_takes_the_place_of_the_first(self, folder: Path) -> None:
        waits, other = request(1, output=()), request(2)
        done = replace(waits, output=(9,), revision=1)
        for files in ([[waits, other], [done]], [[done], [waits, other]], [[done, waits, other, waits]]):
            place = folder / str(len(files)) / str(files[0][0].revision)
            for requests in files:
                written(place, requests)
            reader = TrafficReader(place)
            assert list(reader) == [done, other]
            assert reader.num_superseded >= 1

    def test_the_manifest(self, folder: Path) -> None:
        written(folder, [request(1)])
        manifest = TrafficReader(folder).manifest
        assert manifest.target == "tiny"
        assert {"autospec", "python", "torch", "transformers"} >= set(manifest.versions) >= {"python", "transformers"}
        assert datetime.fromisoformat(manifest.created_at).tzinfo is not None
        assert sorted(path.name for path in folder.iterdir())[1:] == ["manifest.json"]
        assert (folder.stat().st_mode & 0o777, shard_files(folder)[0].stat().st_mode & 0o777) == (0o700, 0o600)

    def test_another_tokenizer_is_refused_with_both_names(self, folder: Path) -> None:
        written(folder, [request(1)])
        other = tiny.tokenizer(order=[1, 0, *range(2, tiny.VOCAB)])
        other.name_or_path = "/somewhere/else/other-tokenizer"
        for use in (lambda: TrafficReader(folder, other), lambda: Traffic(folder).belong_to(other)):
            with pytest.raises(
                ConfigurationError, match=r"PreTrainedTokenizerFast|TokenizersBackend.*not of 'other-tokenizer'"
            ) as caught:
                use()
            assert "\n" not in str(caught.value)
        assert list(TrafficReader(folder, TOKENIZER)) == [request(1)]

    def test_another_target_is_warned_of(self, folder: Path) -> None:
        written(folder, [request(1)])
        with pytest.warns(UserWarning, match="target 'tiny', and is used with 'large'"):
            Traffic(folder).belong_to(TOKENIZER, "large")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "is damaged"),
            ("[]", "is damaged"),
            ('{"format": 1}', "is damaged"),
            ('{"format": 2}', "has format 2, this autospec knows up to 1: update"),
        ],
    )
    def test_manifests_that_cannot_be_used(self, folder: Path, content: str, message: str) -> None:
        folder.mkdir()
        (folder / "manifest.json").write_text(content)
        for use in (lambda: TrafficReader(folder), lambda: opened(folder)):
            with pytest.raises(ConfigurationError, match=message):
                use()
        assert (folder / "manifest.json").read_text() == content

    def test_no_traffic(self, folder: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"holds no traffic \(no manifest\.json\)"):
            TrafficReader(folder)
        file = folder.with_name("file")
        file.write_text("")
        with pytest.raises(ConfigurationError, match="is a file"):
            opened(file)

    def test_of_two_processes_the_faster_ones_manifest_counts(self, folder: Path) -> None:
        first, second = Manifest.of(TOKENIZER, "one"), Manifest.of(TOKENIZER, "two")
        assert first.write(folder) == first
        assert second.write(folder) == first
        assert [path.name for path in folder.iterdir()] == ["manifest.json"]


class TestDamage:
    def test_a_tail_torn_at_any_byte_costs_the_last_record_alone(self, folder: Path) -> None:
        written(folder, [request(1), request(2), request(3)])
        (shard,) = shard_files(folder)
        data = shard.read_bytes()
        last = list(frames(memoryview(data)))[-1]
        assert last.position + last.num_bytes == len(data)
        for end in range(last.position, len(data)):
            shard.write_bytes(data[:end])
            reader = TrafficReader(folder)
            assert list(reader) == [request(1), request(2)]
            torn = [(each.position, each.num_bytes, each.reason) for each in reader.damages]
            assert torn == ([(last.position, end - last.position, "cut off")] if end > last.position else [])

    def test_a_byte_damaged_anywhere_costs_its_record_alone(self, folder: Path) -> None:
        written(folder, [request(1), request(2), request(3)])
        (shard,) = shard_files(folder)
        data = shard.read_bytes()
        middle = list(frames(memoryview(data)))[1]
        for place in range(middle.position, middle.position + middle.num_bytes):
            damaged = bytearray(data)
            damaged[place] ^= 0xFF
            shard.write_bytes(bytes(damaged))
            reader = TrafficReader(folder)
            assert {each.request_id for each in reader} >= {request(1).request_id, request(3).request_id}
            assert len(reader.damages) == 1
            assert (reader.damages[0].file, reader.damages[0].position) == (shard.name, middle.position)

    def test_whole_frames_that_are_no_request(self, folder: Path) -> None:
        written(folder, [request(1)])
        (shard,) = shard_files(folder)
        size = shard.stat().st_size
        with shard.open("ab") as file:
            file.write(encode({"request_id": 7}) + encode(request(2).to_json()))
            file.write(zstandard.ZstdCompressor(write_checksum=True).compress(b"[" * 100_000))
        (folder / "empty.jsonl.zst").touch()
        reader = TrafficReader(folder)
        assert list(reader) == [request(1), request(2)]
        assert reader.damages[0].position == size
        assert [each.reason[:13] for each in reader.damages] == ["not a request"] * 2

    def test_other_programs_can_read_it(self, folder: Path) -> None:
        written(folder, [request(1), request(2)])
        (shard,) = shard_files(folder)
        with shard.open("rb") as file:
            text = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
        assert [json.loads(line)["output"] for line in text.splitlines()] == [[1, 3], [2, 3]]


WRITER = """
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from autospec.traffic import Traffic, TrafficRequest
folder, first, count, start = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), datetime.fromisoformat(sys.argv[4])
traffic = Traffic(folder)
for number in range(first, first + count):
    at = start + timedelta(seconds=number)
    traffic.write(TrafficRequest(f"{number:032x}", at, "code", tuple(range(number % 7 + 1)), (number, 3)))
    print(number, flush=True)
assert "torch" not in sys.modules
"""


def writer(folder: Path, first: int, count: int) -> subprocess.Popen[str]:
    opened(folder)
    command = [sys.executable, "-c", WRITER, str(folder), str(first), str(count), START.isoformat()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


class TestProcesses:
    def test_kill_9_loses_nothing_that_was_written(self, folder: Path) -> None:
        process = writer(folder, 0, 10**9)
        assert process.stdout is not None
        for _ in range(200):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        said = 200 + process.communicate()[0].count("\n")
        reader = TrafficReader(folder, TOKENIZER)
        found = list(reader)
        assert found == [request(number) for number in range(len(found))]
        assert said - 1 <= len(found) <= said + 1  # the last number said may be torn itself
        assert len(reader.damages) <= 1

    def test_two_at_once(self, folder: Path) -> None:
        processes = [writer(folder, 0, 300), writer(folder, 300, 300)]
        for process in processes:
            process.communicate()
            assert process.returncode == 0
        reader = TrafficReader(folder, TOKENIZER)
        assert list(reader) == [request(number) for number in range(600)]
        assert (reader.num_files, reader.damages) == (2, ())

    def test_a_forked_child_has_a_file_of_its_own(self, folder: Path) -> None:
        traffic = opened(folder)
        traffic.write(request(1))
        traffic._writer._lock.acquire()  # as if another thread was writing at the fork
        child = os.fork()
        if child == 0:
            traffic.write(request(2))
            os._exit(0 if traffic.failed == 0 else 1)
        traffic._writer._lock.release()
        assert os.waitpid(child, 0)[1] == 0
        traffic.write(request(3))
        reader = TrafficReader(folder)
        assert list(reader) == [request(1), request(2), request(3)]
        assert (reader.num_files, reader.damages) == (2, ())

    def test_threads(self, folder: Path) -> None:
        traffic = opened(folder, shard_bytes=2000)
        threads = [
            threading.Thread(target=lambda k=k: [traffic.write(request(100 * k + n)) for n in range(50)])
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reader = TrafficReader(folder)
        assert len(list(reader)) == traffic.written == 200
        assert reader.num_files > 1
        assert reader.damages == ()


class TestBounds:
    def test_a_new_file_when_one_is_large(self, folder: Path) -> None:
        every = [request(number) for number in range(20)]
        written(folder, every, shard_bytes=400)
        assert len(shard_files(folder)) > 3
        assert all(path.stat().st_size < 800 for path in shard_files(folder))
        assert list(TrafficReader(folder)) == every

    def test_recording_stops_at_the_bound_with_one_warning(self, folder: Path) -> None:
        with pytest.warns(UserWarning, match="reached its bound of 2000 bytes: nothing more is recorded") as caught:
            traffic = written(folder, [request(number) for number in range(40)], max_bytes=2000)
        assert len(caught) == 1
        assert traffic.written + traffic.failed == 40
        assert 1500 < sum(path.stat().st_size for path in shard_files(folder)) <= 2000
        assert not traffic.takes_next()
        assert list(TrafficReader(folder)) == [request(number) for number in range(traffic.written)]

    def test_the_bound_is_the_folders(self, folder: Path) -> None:
        written(folder, [request(number) for number in range(10)])
        with pytest.warns(UserWarning, match="reached its bound"):
            assert written(folder, [request(11)], max_bytes=1000).written == 0

    def test_a_disk_error_is_warned_of_once_and_undone(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        traffic = opened(folder)
        traffic.write(request(1))
        real, calls = os.write, []

        def full(descriptor: int, data: bytes) -> int:
            calls.append(len(data))
            if len(calls) % 2:
                return real(descriptor, data[:10])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.warns(UserWarning, match="No space left on device: requests are answered") as caught:
            _ = [traffic.write(request(number)) for number in (2, 3)]
        monkeypatch.undo()
        traffic.write(request(4))
        assert len(caught) == 1
        assert (traffic.written, traffic.failed) == (2, 2)
        reader = TrafficReader(folder)
        assert list(reader) == [request(1), request(4)]
        assert reader.damages == ()

    def test_a_share(self, folder: Path) -> None:
        traffic = opened(folder, share=0.25)
        taken = sum(traffic.takes_next() for _ in range(4000))
        assert 800 < taken < 1200
        assert not any(opened(folder, share=0.0).takes_next() for _ in range(100))
        assert all(opened(folder).takes_next() for _ in range(100))

    @pytest.mark.parametrize(
        "options",
        [{"share": 2}, {"share": True}, {"share": float("nan")}, {"max_bytes": 0}, {"shard_bytes": 1.5}, {"redact": 3}],
        ids=str,
    )
    def test_options_that_make_no_sense(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            Traffic("t", **options)

    def test_what_is_not_published_is_not_seen(self, folder: Path) -> None:
        opened(folder)
        one, two = ShardWriter(folder, is_partial=True), ShardWriter(folder, is_partial=True, shard_bytes=1)
        one.write(request(1))
        two.write(request(2))
        two.write(request(3))
        assert list(TrafficReader(folder)) == []
        one.discard()
        two.publish()
        assert list(TrafficReader(folder)) == [request(2), request(3)]
        with pytest.raises(TrafficFullError):
            ShardWriter(folder, max_bytes=10).write(request(4))


def asked(model: Any, count: int = 3, **options: Any) -> list[torch.Tensor]:
    settings = {"max_new_tokens": 9, "do_sample": False, **options}
    return [model.generate(tiny.prompt(12 + n), **settings) for n in range(count)]


class TestWrap:
    def test_greedy_and_sampled_as_generate_said(self, folder: Path) -> None:
        model = tiny.llama()
        with autospec.wrap(model, tokenizer=TOKENIZER, policy="fixed:ngram:3", record=folder) as speculator:
            outputs = asked(model, segment="a")
            outputs += asked(model, do_sample=True, temperature=0.8, top_p=0.9, segment="b")
            last = speculator.last_request
        found = list(TrafficReader(folder, TOKENIZER))
        assert [list(each.prompt + each.output) for each in found] == [output[0].tolist() for output in outputs]
        assert [each.segment for each in found] == ["a"] * 3 + ["b"] * 3
        assert [each.options["do_sample"] for each in found] == [False] * 3 + [True] * 3
        assert (found[-1].options["temperature"], found[-1].options["top_p"]) == (0.8, 0.9)
        assert found[-1].options["max_new_tokens"] == 9
        assert last is not None
        assert found[-1].decoding == "sample temperature=0.8 top_p=0.9"
        assert (found[-1].request_id, found[-1].started_at) == (last.request_id, last.started_at)
        assert (found[-1].seconds, found[-1].total_seconds) == (last.seconds, last.total_seconds)
        assert found[-1].acceptance_lengths == last.acceptance_lengths
        assert (found[-1].policy, found[-1].origin, found[-1].is_arrival_known) == ("fixed:ngram:3", "wrap", True)

    def test_controls_and_fallbacks(self, folder: Path) -> None:
        model = tiny.llama()
        with autospec.wrap(model, tokenizer=TOKENIZER, policy="off", record=str(folder)) as speculator:
            with speculator.control():
                outputs = asked(model, 1)
            with pytest.warns(UserWarning, match="left to the original generate"):
                outputs += asked(model, 1, num_beams=2)
            with pytest.warns(UserWarning, match="left to the original generate"):
                model.generate(tiny.prompt(8).repeat(2, 1), max_new_tokens=3)  # a batch is not recorded
            outputs += [asked(model, 1, return_dict_in_generate=True)[0].sequences]
            with pytest.raises(ValueError, match=r"."):
                model.generate(tiny.prompt(8), max_new_tokens=-1)
        found = list(TrafficReader(folder))
        assert [list(each.prompt + each.output) for each in found] == [output[0].tolist() for output in outputs]
        assert [each.is_control for each in found] == [True, False, False]
        assert [each.fallback_reason is not None for each in found] == [False, True, False]
        assert "num_beams=2" in found[1].decoding

    def test_a_store_beside_it_keeps_no_tokens(self, folder: Path, tmp_path: Path) -> None:
        from autospec.telemetry.store import Store

        model, url = tiny.llama(), f"sqlite:///{tmp_path / 't.db'}"
        with autospec.wrap(model, tokenizer=TOKENIZER, policy="off", record=folder, store=url):
            asked(model)
        with Store(url, readonly=True) as store:
            assert list(store.recordings()) == []
            assert {each.request_id for each in store.requests()} == {each.request_id for each in TrafficReader(folder)}

    def test_what_a_function_leaves(self, folder: Path) -> None:
        def redact(prompt: list[int], output: list[int]) -> tuple[list[int], list[int]] | None:
            return None if len(prompt) == 13 else ([0] * len(prompt), output[:2])

        model = tiny.llama()
        traffic = autospec.traffic.Traffic(folder, redact=redact)
        with autospec.wrap(model, tokenizer=TOKENIZER, policy="off", record=traffic):
            outputs = asked(model)
        found = list(TrafficReader(folder))
        assert [each.prompt for each in found] == [(0,) * 12, (0,) * 14]
        assert found[0].output == tuple(outputs[0][0, 12:14].tolist())

    @pytest.mark.parametrize("given", [lambda p, o: 1 / 0, lambda p, o: p, lambda p, o: (["text"], o)])
    def test_a_function_that_fails_keeps_nothing(self, folder: Path, given: Any) -> None:
        model = tiny.llama()
        traffic = Traffic(folder, redact=given)
        with (
            pytest.warns(UserWarning, match="nothing of the request is kept"),
            autospec.wrap(model, tokenizer=TOKENIZER, policy="off", record=traffic),
        ):
            assert len(asked(model)) == 3
        assert list(TrafficReader(folder)) == []
        assert traffic.written == 0

    def test_a_share_and_a_disk_that_is_gone(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny.llama()
        none, gone = Traffic(folder, share=0.0), Traffic(folder)
        with autospec.wrap(model, tokenizer=TOKENIZER, policy="off", record=none):
            asked(model)
        assert (none.written, none.failed) == (0, 0)

        def full(descriptor: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        with autospec.wrap(model, tokenizer=TOKENIZER, policy="off", record=gone):
            monkeypatch.setattr("autospec.traffic.writer.os.write", full)
            with pytest.warns(UserWarning, match="No space left"):
                assert len(asked(model)) == 3
            monkeypatch.undo()
        assert (gone.written, gone.failed) == (0, 3)

    def test_refused_before_anything_is_made(self, folder: Path) -> None:
        with pytest.raises(ConfigurationError, match="give tokenizer="):
            autospec.wrap(tiny.llama(), record=folder)
        assert not folder.exists()
        written(folder, [request(1)])
        model = tiny.llama()
        with pytest.raises(ConfigurationError, match="holds traffic of tokenizer"):
            autospec.wrap(model, tokenizer=tiny.tokenizer(order=[1, 0, *range(2, tiny.VOCAB)]), record=folder)
        assert "generate" not in vars(model)
        with pytest.raises(AutospecError, match="cannot write"):
            autospec.wrap(model, tokenizer=TOKENIZER, record="/proc/none/traffic")
        with pytest.raises(ConfigurationError, match="a folder or Traffic is needed"):
            autospec.wrap(model, store="sqlite://", record=3)  # type: ignore[arg-type]

    def test_a_copy_of_the_model_is_not_recorded(self, folder: Path) -> None:
        model = tiny.llama()
        with autospec.wrap(model, tokenizer=TOKENIZER, policy="off", record=folder):
            asked(copy.deepcopy(model), 1)
        assert list(TrafficReader(folder)) == []
