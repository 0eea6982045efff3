"""BM25 over passages in memory."""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial

import numpy as np

K1, B = 1.5, 0.75
"""Saturation of repeated words, and how much the length of a passage counts."""


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class Bm25Index:
    """Ranks passages by the words that they share with a query.

    The score of a passage is the sum over the words of the query of idf * tf / (tf + K1 (1 - B + B * length / mean
    length)), with idf = ln(1 + (N - n + 0.5) / (n + 0.5)) of a word that n of N passages have: Robertson and Zaragoza,
    "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), in the form without negative weights of Lucene.
    """

    def __init__(self, passages: Sequence[str]) -> None:
        counts = [Counter(words_of(passage)) for passage in passages]
        lengths = np.array([each.total() for each in counts], dtype=np.float64)
        self._size = len(counts)
        relative = lengths / max(lengths.mean(), 1.0) if counts else lengths
        numbers: defaultdict[str, array[int]] = defaultdict(partial(array, "q"))
        times: defaultdict[str, array[int]] = defaultdict(partial(array, "q"))
        for number, count in enumerate(counts):
            for word, repeated in count.items():
                numbers[word].append(number)
                times[word].append(repeated)
        self._postings: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for word, found in numbers.items():
            at, tf = np.array(found), np.array(times[word], dtype=np.float64)
            idf = np.log(1 + (self._size - len(at) + 0.5) / (len(at) + 0.5))
            self._postings[word] = at, idf * tf / (tf + K1 * (1 - B + B * relative[at]))

    def scores(self, query: str) -> np.ndarray:
        """[N] of all passages."""
        scores = np.zeros(self._size)
        for word in words_of(query):
            if word in self._postings:
                at, weights = self._postings[word]
                scores[at] += weights
        return scores

    def best(self, query: str, most: int) -> list[int]:
        """The passages with the highest scores above 0, in order; among equals the first."""
        scores = self.scores(query)
        return [int(at) for at in np.argsort(-scores, kind="stable")[:most] if scores[at] > 0]
