"""Learned segments: the nearest of some centres in hashed words and the prompt's shape.

scikit-learn hashes and clusters (HashingVectorizer, MiniBatchKMeans). Centres are plain numbers in a file; nothing in
it is pickled, and no word of a prompt is kept.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autospec.errors import ConfigurationError
from autospec.files import replacing
from autospec.segments.prompts import Prompt
from autospec.segments.shape import NAMES, shape

FORMAT = "autospec clusters"
VERSION = 1
NUM_WORDS = 1024  # columns that words are hashed into
MAX_CLUSTERS = 256
_MAX_BYTES = 16_000_000
_TINY = 1e-6
_FARTHEST = np.float32(3.0)  # standard deviations
_SHARE = np.float32(len(NAMES) ** -0.5)
_BETWEEN = bytes(code if code > 127 or chr(code).isalnum() else ord(" ") for code in range(256))
_ARRAYS = ("centres", "weights", "mean", "scale")
_KEYS = ("header", *_ARRAYS, "digest")

Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Points:
    """Prompts in numbers, before shapes are scaled."""

    words: Matrix  # [n, 1024], hashed counts, with signs
    shapes: Matrix  # [n, 7]

    def __len__(self) -> int:
        return len(self.shapes)

    def take(self, indices: Sequence[int]) -> Points:
        """Some of them."""
        return Points(self.words[list(indices)], self.shapes[list(indices)])


class Clusters:
    """Centres, and what brings a prompt into their space.

    Args:
        centres: [k, 1024 + 7], words first.
        weights: [1024], of the words: 0 for one that every prompt had, such as those of a chat template.
        mean, scale: [7], of the shapes it was fitted on.
        notes: plain JSON values: how it was fitted.
    """

    def __init__(
        self, centres: Matrix, weights: Matrix, mean: Matrix, scale: Matrix, notes: dict[str, Any] | None = None
    ) -> None:
        self.centres = centres
        self.weights = weights
        self.mean = mean
        self.scale = scale
        self.notes = dict(notes or {})
        self._words = np.ascontiguousarray(centres[:, :NUM_WORDS].T)  # [1024, k]: a row for each word
        self._shapes = centres[:, NUM_WORDS:]
        self._squares = (centres**2).sum(axis=1)

    def __len__(self) -> int:
        return len(self.centres)

    @property
    def names(self) -> tuple[str, ...]:
        """The segments, `cluster-0` and so on."""
        return tuple(f"cluster-{index}" for index in range(len(self)))

    def distances(self, prompt: Prompt) -> NDArray[np.float32]:
        """[k], from the prompt to each centre."""
        columns, counts = hashed(prompt.text)
        form = _scaled(np.asarray(shape(prompt.text, prompt.prompt_tokens), dtype=np.float32), self.mean, self.scale)
        weighted = counts * self.weights[columns]
        weighted /= max(float(weighted @ weighted) ** 0.5, _TINY)
        products = weighted @ self._words[columns] + self._shapes @ form
        square = float(weighted @ weighted) + float(form @ form)
        return np.asarray(np.sqrt(np.maximum(self._squares - 2 * products + square, 0.0)), dtype=np.float32)

    def nearest(self, prompt: Prompt) -> str:
        """The segment of a prompt."""
        return self.names[int(self.distances(prompt).argmin())]

    def places(self, points: Points) -> NDArray[np.intp]:
        """[n], which cluster each point is in."""
        spread = _spread(points, self.weights, self.mean, self.scale)
        return np.asarray((self._squares - 2 * spread @ self.centres.T).argmin(axis=1))

    def save(self, path: str | Path) -> None:
        """Write a file that `load` reads; what stood there is replaced only when all is written."""
        path = Path(path)
        header = json.dumps({"format": FORMAT, "version": VERSION, "notes": self.notes})
        try:
            with replacing(path) as unfinished, unfinished.open("wb") as file:
                np.savez_compressed(
                    file,
                    header=np.asarray(header),
                    centres=self.centres,
                    weights=self.weights,
                    mean=self.mean,
                    scale=self.scale,
                    digest=np.asarray(_digest(header, self.centres, self.weights, self.mean, self.scale)),
                )
        except OSError as error:
            raise ConfigurationError(f"{path}: cannot write the clusters ({error.strerror or error})") from error

    @classmethod
    def load(cls, path: str | Path) -> Clusters:
        """Read what `save` wrote.

        Raises:
            ConfigurationError: the file is missing, damaged, of a newer version, or of something else.
        """
        found = _read(Path(path))
        header = _header(found["header"], path)
        centres, weights, mean, scale = arrays = [found[key] for key in _ARRAYS]
        is_whole = (
            all(array.dtype == np.float32 for array in arrays)
            and centres.ndim == 2
            and 1 <= len(centres) <= MAX_CLUSTERS
            and centres.shape[1] == NUM_WORDS + len(NAMES)
            and weights.shape == (NUM_WORDS,)
            and mean.shape == scale.shape == (len(NAMES),)
            and str(found["digest"]) == _digest(str(found["header"]), *arrays)
            and all(np.isfinite(array).all() for array in arrays)
        )
        if not is_whole:
            raise ConfigurationError(f"{path}: damaged clusters; fit them again with `autospec segments fit`")
        return cls(centres, weights, mean, scale, header.get("notes"))


def points_of(prompts: Sequence[Prompt]) -> Points:
    """Prompts by words and shape."""
    return Points(
        _vectorizer().transform([prompt.text for prompt in prompts]).toarray().astype(np.float32),
        np.asarray([shape(prompt.text, prompt.prompt_tokens) for prompt in prompts], dtype=np.float32),
    )


def fit_clusters(points: Points, count: int, *, seed: int = 0) -> Clusters:
    """Cluster prompts.

    Args:
        points: at least `count` of them.
        count: of clusters; fewer come out where prompts are alike.
        seed: of the first centres.
    """
    from sklearn.cluster import MiniBatchKMeans

    mean, scale = points.shapes.mean(axis=0), np.maximum(points.shapes.std(axis=0), np.float32(_TINY))
    having = (points.words != 0).sum(axis=0)
    weights = np.log((1 + len(points)) / (1 + having)).astype(np.float32)  # inverse document frequency
    spread = _spread(points, weights, mean, scale)
    found = MiniBatchKMeans(count, random_state=seed, n_init=5, batch_size=1024).fit(spread)
    centres = np.unique(found.cluster_centers_.astype(np.float32), axis=0)
    return Clusters(centres, weights, mean, scale, {"prompts": len(points), "seed": seed})


def _spread(points: Points, weights: Matrix, mean: Matrix, scale: Matrix) -> Matrix:
    """[n, 1024 + 7]"""
    words = points.words * weights
    words /= np.maximum(np.linalg.norm(words, axis=1, keepdims=True), np.float32(_TINY))
    return np.hstack([words, _scaled(points.shapes, mean, scale)])


def _scaled(shapes: Matrix, mean: Matrix, scale: Matrix) -> Matrix:
    """Of about the same length as the words, which have length 1; no number of a shape outweighs all else."""
    scaled: Matrix = np.minimum(np.maximum((shapes - mean) / scale, -_FARTHEST), _FARTHEST) * _SHARE
    return scaled


def hashed(text: str) -> tuple[NDArray[np.intp], Matrix]:
    """One text as HashingVectorizer has it, in a fifth of the time: columns, and the count in each, with signs."""
    sums: dict[int, int] = {}
    for word, count in Counter(_words(text)).items():
        column, sign = _place(word)
        sums[column] = sums.get(column, 0) + sign * count
    return np.fromiter(sums, np.intp, len(sums)), np.fromiter(sums.values(), np.float32, len(sums))


@lru_cache(maxsize=65_536)
def _place(word: bytes) -> tuple[int, int]:
    from sklearn.utils import murmurhash3_32

    number = int(murmurhash3_32(word, seed=0))
    return abs(number) % NUM_WORDS, 1 if number >= 0 else -1


def _words(text: str) -> list[bytes]:
    """What lies between ASCII punctuation and spaces, in lower case and UTF-8."""
    return text.lower().encode("utf-8", "replace").translate(_BETWEEN).split()


@cache
def _vectorizer() -> Any:
    from sklearn.feature_extraction.text import HashingVectorizer

    return HashingVectorizer(n_features=NUM_WORDS, dtype=np.float32, norm=None, analyzer=_words)


def _read(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:  # before anything is unpacked: a small file can hold a lot
            if sum(member.file_size for member in archive.infolist()) > _MAX_BYTES:
                raise ConfigurationError(f"{path}: too large for clusters; name a file of `autospec segments fit`")
        with np.load(path, allow_pickle=False) as arrays:
            if any(key not in arrays for key in _KEYS):
                raise ConfigurationError(f"{path}: not clusters; name a file of `autospec segments fit`")
            return {key: arrays[key] for key in _KEYS}
    except ConfigurationError:
        raise
    except OSError as error:
        raise ConfigurationError(
            f"{path}: cannot read the clusters ({error.strerror or error}); name a file of `autospec segments fit`"
        ) from error
    except Exception as error:
        raise ConfigurationError(
            f"{path}: damaged, or no clusters ({type(error).__name__}); fit them again with `autospec segments fit`"
        ) from error


def _header(raw: Any, path: str | Path) -> dict[str, Any]:
    try:
        header = json.loads(str(raw))
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT or type(header.get("version")) is not int:
        raise ConfigurationError(f"{path}: not clusters; name a file of `autospec segments fit`")
    if header["version"] != VERSION:
        raise ConfigurationError(
            f"{path}: version {header['version']} of the file, this release reads {VERSION}; update autospec, or fit "
            "them again with `autospec segments fit`"
        )
    return header


def _digest(header: str, *arrays: Matrix) -> str:
    content = header.encode("utf-8", "replace") + b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    return hashlib.blake2b(content, digest_size=16).hexdigest()
