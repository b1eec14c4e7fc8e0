"""The n-grams of test sets, and where they occur in other texts: exactly, whatever hashes collide."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megatron.core.tokenizers.corpus import read_chunks, texts_on_line
from megatron.corpora.words import compiled, folded_codes, ngrams

_BUCKETS_PER_GRAM: Final = 16
"""Buckets of the first look-up; one in so many places that are no n-gram of a test set passes it."""
_JSON_SUFFIXES: Final = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class TestSet:
    """A test set and its files."""

    __test__ = False
    """Not a test, whatever pytest thinks of the name."""
    name: str
    """What reports call it."""
    path: Path
    """JSON lines, or plain text with a document a line; compressed or not."""

    @classmethod
    def parse(cls, text: str) -> "TestSet":
        """The test set that ``NAME=PATH`` means, or ``PATH``, which is its name then.

        Raises:
            ValueError: if there is no such file.
        """
        name, equals, path = text.partition("=")
        found = cls(name, Path(path)) if equals else cls(text, Path(text))
        if not found.path.is_file():
            raise ValueError(f"--test-sets {text}: no such file")
        return found

    def documents(self, keys: Sequence[str]) -> Iterator[list[str]]:
        """The texts of each document: those under the keys, or a line of plain text.

        Raises:
            ValueError: at a line that cannot be used.
        """
        is_json = any(suffix in _JSON_SUFFIXES for suffix in self.path.suffixes[-2:])
        for chunk in read_chunks([self.path]):
            for number, line in enumerate(chunk.lines, start=chunk.first_line):
                try:
                    if is_json:
                        texts = texts_on_line(line, keys, "--test-json-keys")
                        if texts is not None:
                            yield [text for of_key in texts for text in of_key]
                    elif line.strip():
                        yield [line.decode()]
                except ValueError as error:
                    raise ValueError(f"--test-sets: {self.path}:{number}: {error}") from None


class GramTable:
    """All n-grams of some test sets, each once.

    Args:
        sets: the test sets.
        keys: keys of the texts of those that are JSON lines.
        size: n, in words; no n-gram reaches from one text into another.
    """

    def __init__(self, sets: Sequence[TestSet], keys: Sequence[str], size: int) -> None:
        self.size = size
        self.names = [one.name for one in sets]
        self.documents = np.zeros(len(sets), np.int64)
        """[s] documents in each set."""
        hashes, places, owners = [], [], []
        encoded: list[npt.NDArray[np.uint32]] = []
        length = 0
        for number, one in enumerate(sets):
            for texts in one.documents(keys):
                found = ngrams(texts, size, "words", short=False)
                before = np.array([len(text) for text in texts], np.int64).cumsum() - [len(t) for t in texts]
                shift = np.repeat(before, np.diff(found.offsets)) + length
                hashes.append(found.hashes)
                places.append(np.stack((found.starts + shift, found.ends + shift)))
                owner = np.array([[number], [self.documents[number]]])
                owners.append(np.broadcast_to(owner, (2, len(found.hashes))))
                encoded += [codes_of(text) for text in texts]
                length += sum(map(len, texts))
                self.documents[number] += 1
        self._codes = np.concatenate([*encoded, np.empty(0, np.uint32)])
        every = np.concatenate([*hashes, np.empty(0, np.uint64)])
        where = np.concatenate([*places, np.empty((2, 0), np.int64)], axis=1)
        self.owners = np.concatenate([*owners, np.empty((2, 0), np.int64)], axis=1)
        """[2, t] set, and document within it, of each place that holds an n-gram."""
        self.grams, kept = self._number(every, where)
        """[t] number of the n-gram at each place; ``count`` different ones."""
        self.count = len(kept)
        self._hashes = every[kept]
        self._places = np.ascontiguousarray(where[:, kept])
        bits = max(1, (self.count * _BUCKETS_PER_GRAM).bit_length())
        self._shift = np.uint64(64 - bits)
        self._buckets = np.zeros(1 << bits, np.bool_)
        self._buckets[self._hashes >> self._shift] = True

    def _number(
        self, hashes: npt.NDArray[np.uint64], places: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Number the n-grams in order of their hashes: [t] numbers, and the place of each one's first."""
        order = np.argsort(hashes, kind="stable")
        grams, kept = np.empty(len(hashes), np.int64), np.empty(len(hashes), np.int64)
        count = number_grams(hashes, order, places, self._codes, folded_codes(), grams, kept)
        return grams, kept[:count]

    def compile(self) -> None:
        """Compile what :meth:`find` uses, once and not in each worker."""
        self.find(["a"])
        nowhere, nothing = np.zeros((2, 0), np.int64), np.empty(0, np.uint64)
        self._compare("", nowhere, nothing, np.empty(0, np.int64))

    def find(self, texts: Sequence[str]) -> "Matches":
        """Every place in some texts where an n-gram of the test sets stands."""
        found = ngrams(texts, self.size, "words", short=False)
        candidates = np.flatnonzero(self._buckets[found.hashes >> self._shift])
        rows = np.searchsorted(self._hashes, found.hashes[candidates])
        rows_in = np.minimum(rows, max(self.count - 1, 0))
        hit = self._hashes[rows_in] == found.hashes[candidates]  # without n-grams there are no candidates
        candidates, rows = candidates[hit], rows[hit]
        text_of = np.searchsorted(found.offsets, candidates, side="right") - 1
        grams = np.full(len(candidates), -1, np.int64)
        for number in np.unique(text_of).tolist():
            mine = np.flatnonzero(text_of == number)
            places = candidates[mine]
            where = np.stack((found.starts[places], found.ends[places]))
            grams[mine] = self._compare(texts[number], where, found.hashes[places], rows[mine])
        sure = grams >= 0
        places = candidates[sure]
        return Matches(grams[sure], text_of[sure], found.starts[places], found.ends[places])

    def _compare(
        self,
        text: str,
        where: npt.NDArray[np.int64],
        hashes: npt.NDArray[np.uint64],
        rows: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        table = (self._codes, self._places, self._hashes)
        return which_grams((codes_of(text), where, hashes, rows), table, folded_codes())

    def report(self, found: npt.NDArray[np.bool_]) -> dict[str, dict[str, Any]]:
        """For each test set, how much of it was found.

        Args:
            found: [count] whether each n-gram was.
        """
        report = {}
        here = found[self.grams]
        for number, name in enumerate(self.names):
            mine = self.owners[0] == number
            different = np.unique(self.grams[mine])
            touched = np.unique(self.owners[1, mine & here])
            counts: dict[str, Any] = {
                "documents": int(self.documents[number]),
                "documents_with_overlap": len(touched),
                "ngrams": int(mine.sum()),
                "ngrams_found": int(here[mine].sum()),
                "different_ngrams": len(different),
                "different_ngrams_found": int(found[different].sum()),
            }
            counts["share_of_ngrams"] = _share(counts["ngrams_found"], counts["ngrams"])
            counts["share_of_documents"] = _share(len(touched), counts["documents"])
            report[name] = counts
        return report


@dataclass(frozen=True)
class Matches:
    """Where n-grams of test sets stand in some texts, in order."""

    grams: npt.NDArray[np.int64]
    """[m] which n-gram."""
    texts: npt.NDArray[np.int64]
    """[m] in which text."""
    starts: npt.NDArray[np.int64]
    """[m] its first character there."""
    ends: npt.NDArray[np.int64]
    """[m] one past its last."""


def _share(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0


def codes_of(text: str) -> npt.NDArray[np.uint32]:
    """[c] code points of a text."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


@compiled
def same_words(
    one: npt.NDArray[np.uint32],
    other: npt.NDArray[np.uint32],
    folded: npt.NDArray[np.uint32],
) -> bool:
    """Whether two pieces of text, each beginning and ending with a word, hold the same words."""
    place, there = 0, 0
    while place < len(one) and there < len(other):
        first, second = folded[one[place]], folded[other[there]]
        if first != second:
            return False
        place += 1
        there += 1
        if first == 0:
            while folded[one[place]] == 0:
                place += 1
            while folded[other[there]] == 0:
                there += 1
    return place == len(one) and there == len(other)


@compiled
def number_grams(
    hashes: npt.NDArray[np.uint64],
    order: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    codes: npt.NDArray[np.uint32],
    folded: npt.NDArray[np.uint32],
    grams: npt.NDArray[np.int64],
    kept: npt.NDArray[np.int64],
) -> int:
    """Give equal n-grams one number.

    Args:
        hashes: [t] hashes.
        order: [t] places in ascending order of their hashes.
        places: [2, t] beginnings and ends in ``codes``.
        codes: code points of all texts.
        folded: code points in lower case.
        grams: [t], filled with numbers.
        kept: [t], filled with one place for each number.

    Returns:
        How many numbers there are.
    """
    count, run = 0, 0
    for position in range(len(order)):
        place = order[position]
        if position == 0 or hashes[place] != hashes[order[position - 1]]:
            run = count  # the first number of this hash
        mine = codes[places[0, place] : places[1, place]]
        number = -1
        for candidate in range(run, count):
            other = kept[candidate]
            if same_words(mine, codes[places[0, other] : places[1, other]], folded):
                number = candidate
                break
        if number < 0:
            number = count
            kept[count] = place
            count += 1
        grams[place] = number
    return count


@compiled
def which_grams(
    text: tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.int64]],
    table: tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], npt.NDArray[np.uint64]],
    folded: npt.NDArray[np.uint32],
) -> npt.NDArray[np.int64]:
    """Which n-gram of a table stands at some places of a text.

    Args:
        text: code points [c], beginnings and ends of the places [2, m], their hashes [m], and the first row
            of the table with that hash [m].
        table: code points of its texts, beginnings and ends of its n-grams [2, g], and their hashes [g],
            ascending.
        folded: code points in lower case.

    Returns:
        [m] rows of the table; -1 where only the hash is the same.
    """
    codes, where, hashes, rows = text
    their_codes, their_places, their_hashes = table
    found = np.full(len(rows), -1, np.int64)
    for place in range(len(rows)):
        row = rows[place]
        mine = codes[where[0, place] : where[1, place]]
        while row < len(their_hashes) and their_hashes[row] == hashes[place]:
            theirs = their_codes[their_places[0, row] : their_places[1, row]]
            if same_words(mine, theirs, folded):
                found[place] = row
                break
            row += 1
    return found
