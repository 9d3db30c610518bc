"""Learned clusters: what they tell apart, files that are not what they should be, and how many are kept."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_tokenizers

from autospec.cluster_choice import BlockCounts, Candidate, MeasuredPrompt, best, candidates, measure, squared_errors
from autospec.data import DemoPrompt
from autospec.drafts import NGram, Suffix
from autospec.errors import AutospecError, ConfigurationError
from autospec.replay import Replay, record
from autospec.segments import Prompt
from autospec.segments.clusters import NUM_WORDS, Clusters, Points, fit_clusters, hashed, points_of
from autospec.segments.shape import NAMES, shape

KINDS = {
    "stories": "Tell a story about the old {} and the sea that took it away",
    "lists": "{}, pear, apple, fig, {}, pear, apple, fig: sort this list",
    "sums": "12 + 7 * {} = ? and 3 * 44 - 15 / {} = ?",
}
FILLERS = ["ship", "tower", "mill", "harbour", "lamp", "bridge", "garden", "wall", "church", "road", "farm", "well"]


def prompts() -> list[tuple[str, Prompt]]:
    return [(kind, Prompt.of_text(text.format(word, word))) for word in FILLERS for kind, text in KINDS.items()]


@pytest.fixture(scope="module")
def clusters() -> Clusters:
    return fit_clusters(points_of([prompt for _, prompt in prompts()]), 3)


@pytest.fixture
def path(clusters: Clusters, tmp_path: Path) -> Path:
    clusters.save(tmp_path / "c.npz")
    return tmp_path / "c.npz"


class TestClusters:
    def test_kinds_are_told_apart(self, clusters: Clusters) -> None:
        found = {(kind, clusters.nearest(prompt)) for kind, prompt in prompts()}
        assert len(found) == len({name for _, name in found}) == 3
        assert clusters.nearest(Prompt.of_text("5 + 8 * 13 = ? and 9 * 2 - 4 / 2 = ?")) in dict(found)["sums"]

    def test_one_at_a_time_is_as_all_together(self, clusters: Clusters) -> None:
        asked = [prompt for _, prompt in prompts()]
        places = clusters.places(points_of(asked)).tolist()
        assert [clusters.names[place] for place in places] == [clusters.nearest(prompt) for prompt in asked]
        points = points_of(asked)
        assert isinstance(points, Points)
        assert len(points.take([1, 5])) == 2

    @pytest.mark.parametrize(
        "text", ["a b a, c!", "", "Über das Meer: 你好 你好", "x " * 500, " ".join(map(str, range(500)))]
    )
    def test_words_are_hashed_as_by_scikit_learn(self, text: str) -> None:
        columns, counts = hashed(text)
        row = np.zeros(NUM_WORDS, np.float32)
        row[columns] = counts
        assert np.array_equal(row, points_of([Prompt.of_text(text)]).words[0])

    def test_the_same_from_the_same_seed(self, clusters: Clusters) -> None:
        again = fit_clusters(points_of([prompt for _, prompt in prompts()]), 3)
        assert np.array_equal(again.centres, clusters.centres)

    def test_distances_are_distances(self, clusters: Clusters) -> None:
        distances = clusters.distances(Prompt.of_text("a ship"))
        assert distances.shape == (3,)
        assert (distances >= 0).all()

    def test_alike_prompts_make_fewer(self) -> None:
        assert len(fit_clusters(points_of([Prompt.of_text("a b c")] * 6), 1)) == 1

    @pytest.mark.parametrize("text", ["", " ", "\x00", "\ud800", "x" * 10_000, "😀" * 50, "\n" * 500])
    def test_any_text_has_a_place(self, clusters: Clusters, text: str) -> None:
        assert clusters.nearest(Prompt.of_text(text)) in clusters.names
        numbers = shape(text, 0)
        assert len(numbers) == len(NAMES)
        assert np.isfinite(numbers).all()


class TestFiles:
    def test_round_trip(self, clusters: Clusters, path: Path) -> None:
        loaded = Clusters.load(str(path))
        assert loaded.notes == clusters.notes == {"prompts": 36, "seed": 0}
        for name in ("centres", "weights", "mean", "scale"):
            assert np.array_equal(getattr(loaded, name), getattr(clusters, name))
        for _, prompt in prompts():
            assert loaded.nearest(prompt) == clusters.nearest(prompt)
        assert [file.name for file in path.parent.iterdir()] == ["c.npz"]

    def test_no_word_of_a_prompt_is_in_it(self, path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            content = b"".join(archive.read(name) for name in archive.namelist())
        for word in (*FILLERS, "story", "pear"):
            assert word.encode() not in content
            assert word.encode("utf-32-le") not in content

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
    def test_cut_short(self, path: Path, share: float) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
        with pytest.raises(AutospecError, match=r"c\.npz: .*autospec segments fit"):
            Clusters.load(path)

    def test_flipped_bytes(self, path: Path) -> None:
        content = path.read_bytes()
        for place in range(0, len(content), max(1, len(content) // 60)):
            path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
            try:
                Clusters.load(path)  # bytes of no meaning in the archive may be anything
            except ConfigurationError as error:
                assert "c.npz" in str(error)  # noqa: PT017

    @staticmethod
    def changed(path: Path, **arrays: Any) -> None:
        with np.load(path, allow_pickle=False) as found:
            kept = {name: found[name] for name in found.files}
        np.savez(path, **{**kept, **arrays})

    @pytest.mark.parametrize(
        ("header", "message"),
        [
            (
                {"format": "autospec clusters", "version": 2},
                "version 2 of the file, this release reads 1; update autospec",
            ),
            ({"format": "autospec clusters", "version": "1"}, "not clusters"),
            ({"format": "something", "version": 1}, "not clusters"),
            ([], "not clusters"),
        ],
    )
    def test_other_headers(self, path: Path, header: Any, message: str) -> None:
        self.changed(path, header=np.asarray(json.dumps(header)))
        with pytest.raises(ConfigurationError, match=message):
            Clusters.load(path)

    def test_a_header_that_is_no_json(self, path: Path) -> None:
        self.changed(path, header=np.asarray("{"))
        with pytest.raises(ConfigurationError, match="not clusters"):
            Clusters.load(path)

    @pytest.mark.parametrize(
        ("name", "array"),
        [
            ("centres", np.zeros((3, 5), np.float32)),
            ("centres", np.zeros((0, 1031), np.float32)),
            ("mean", np.full(7, np.nan, np.float32)),
            ("scale", np.ones(7)),
            ("weights", np.ones(3, np.float32)),
            ("digest", np.asarray("0" * 32)),
        ],
    )
    def test_other_arrays(self, path: Path, name: str, array: Any) -> None:
        self.changed(path, **{name: array})
        with pytest.raises(ConfigurationError, match="damaged clusters; fit them again"):
            Clusters.load(path)

    def test_nothing_pickled_is_read(self, path: Path) -> None:
        class Trap:
            def __reduce__(self) -> Any:
                return (pytest.fail, ("unpickled",))

        self.changed(path, centres=np.asarray([Trap()], dtype=object))
        with pytest.raises(ConfigurationError, match=r"c\.npz: damaged"):
            Clusters.load(path)
        path.write_bytes(pickle.dumps(Trap()))
        with pytest.raises(ConfigurationError, match=r"c\.npz: damaged, or no clusters"):
            Clusters.load(path)

    def test_files_of_something_else(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "pool.npz", texts=np.zeros(3))
        with pytest.raises(ConfigurationError, match=r"pool\.npz: not clusters; name a file of"):
            Clusters.load(tmp_path / "pool.npz")
        (tmp_path / "a.txt").write_text("hello")
        np.save(tmp_path / "a.npy", np.zeros(3))
        for name in ("a.txt", "a.npy"):
            with pytest.raises(ConfigurationError, match="damaged, or no clusters"):
                Clusters.load(tmp_path / name)
        for name in ("none.npz", "."):
            with pytest.raises(ConfigurationError, match="cannot read the clusters"):
                Clusters.load(tmp_path / name)

    def test_too_large_to_unpack(self, tmp_path: Path) -> None:
        np.savez_compressed(tmp_path / "big.npz", centres=np.zeros(10_000_000, np.float32))
        with pytest.raises(ConfigurationError, match=r"big\.npz: too large"):
            Clusters.load(tmp_path / "big.npz")

    def test_a_folder_that_cannot_be_written(self, clusters: Clusters, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="cannot write the clusters"):
            clusters.save(tmp_path / "none" / "c.npz")


def measured(accepted: dict[str, int], blocks: int = 50) -> list[MeasuredPrompt]:
    """All kinds of prompts, where each kind has so many accepted tokens."""
    return [
        MeasuredPrompt(prompt, kind, {"ngram:4": BlockCounts(blocks, accepted[kind])}) for kind, prompt in prompts()
    ]


class TestChoice:
    def test_what_separates_acceptance_is_kept(self) -> None:
        found = list(candidates(measured({"stories": 5, "lists": 150, "sums": 40}), (2, 3, 4, 99)))
        assert [each.clusters for each in found] == [2, 3, 4]
        chosen = best(found)
        assert chosen is not None
        assert chosen.clusters >= 3
        assert chosen.separation > 0.6

    def test_where_acceptance_is_all_the_same_nothing_is(self) -> None:
        found = list(candidates(measured(dict.fromkeys(KINDS, 40)), (2, 3)))
        assert best(found) is None
        assert best([]) is None

    def test_of_equals_the_fewest(self) -> None:
        assert best([Candidate(8, 0.5), Candidate(2, 0.5), Candidate(4, 0.4)]) == Candidate(2, 0.5)

    def test_by_hand(self) -> None:
        """Two clusters, 0 and 100 accepted in 100 blocks; the prior of 30 blocks pulls both to 0.5."""
        prompt = Prompt.of_text("a")
        four = [
            MeasuredPrompt(prompt, "s", {"a": BlockCounts(100, accepted), "b": BlockCounts(0, 0)})
            for accepted in (0, 100, 0, 100)
        ]
        error, base = squared_errors(four, [0, 1, 0, 1], [0, 1], [2, 3])
        assert error == pytest.approx(2 * 100 * (15 / 130) ** 2)
        assert base == pytest.approx(2 * 100 * 0.5**2)

    def test_counts_are_those_of_replays(self) -> None:
        target, tokenizer = tiny.llama(vocab_size=320), tiny_tokenizers.byte_level(320)
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        asked = [
            DemoPrompt(str(i), f"s{i}", ({"role": "user", "content": "the dog and the fox " * 3},), 24)
            for i in range(2)
        ]
        recordings = list(record(target, tokenizer, asked, {"do_sample": False}))
        found = list(measure(target, tokenizer, recordings, [NGram, Suffix], block_lengths=[2, 4]))
        assert [each.segment for each in found] == ["s0", "s1"]
        assert list(found[0].counts) == ["ngram:2", "ngram:4", "suffix:2", "suffix:4"]
        assert found[0].prompt.text == "the dog and the fox " * 3
        source = NGram()
        source.attach(target, tokenizer)
        blocks = [b for b in Replay(source, recordings[0]).run(4) if b.action.block_length]
        expected = BlockCounts(len(blocks), sum(b.num_accepted_tokens for b in blocks))
        assert found[0].counts["ngram:4"] == expected
