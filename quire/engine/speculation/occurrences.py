"""Where the n-grams of one token list have occurred, to find the places that match the end of a sequence.

`suffix` and `prediction` use it: an index of the request's own tokens, of earlier requests' outputs, or of a predicted
text. It grows with its list and never shrinks, so the list's owner must bound the list.
"""

from __future__ import annotations

from collections.abc import Sequence

LONG, SHORT = 3, 2  # tokens of the two kinds of n-grams
MAX_PLACES = 12  # last occurrences kept per long n-gram
MAX_MATCH = 32  # tokens compared backwards from a place


class Occurrences:
    """The places behind each n-gram of `tokens`, in order of appearance."""

    def __init__(self, tokens: Sequence[int]):
        self.tokens = tokens
        self.length = 0  # tokens whose n-grams are in the index: those that end before this place
        self._long: dict[tuple[int, ...], list[int]] = {}
        self._short: dict[tuple[int, ...], int] = {}  # n-gram -> its last place

    def extend(self, limit: int) -> bool:
        """Index up to `limit` more tokens. True if every n-gram before the list's end is in the index."""
        tokens, last = self.tokens, len(self.tokens)
        stop = min(last, self.length + limit)
        for place in range(max(self.length, SHORT), stop):
            self._short[tokens[place - 2], tokens[place - 1]] = place
            if place < LONG:
                continue
            places = self._long.setdefault((tokens[place - 3], tokens[place - 2], tokens[place - 1]), [])
            places.append(place)
            if len(places) > MAX_PLACES:
                del places[0]
        self.length = max(self.length, stop)
        return stop == last

    def find(self, end: Sequence[int]) -> list[tuple[int, int]]:
        """Return the places whose tokens before them match the end of `end`, each with the number that match.

        A long n-gram must match, or where none does, a short one.
        """
        if len(end) < SHORT:
            return []
        places = self._long.get(tuple(end[-LONG:]), ()) if len(end) >= LONG else ()
        if places:
            return [(place, self._match(end, place)) for place in places]
        place = self._short.get(tuple(end[-SHORT:]))
        return [] if place is None else [(place, SHORT)]

    def _match(self, end: Sequence[int], place: int) -> int:
        tokens, num = self.tokens, len(end)
        most = min(MAX_MATCH, num, place)
        count = LONG
        while count < most and tokens[place - 1 - count] == end[num - 1 - count]:
            count += 1
        return count
