"""Plain count model of suffix decoding, the rules of arctic-inference 0.1.1.

No trees: an occurrence is a place in a token list, a count is a number of places.
For a context and a match length p the places are those where the last p context
tokens occur; the draft follows the most frequent next token among them, the
probability of a token is the share of the places that continue with it (a place at
the end of a list continues with nothing but is counted), and the places that went
another way drop out. Equal counts have no rule here: `allowed` returns the outcome
of every order among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

OWN, MEMORY = 0, 1

Place = tuple[int, int]  # (document, index of the next token)


@dataclass(frozen=True)
class Draft:
    """One outcome of a draft: what is proposed, from where, and how sure."""

    tokens: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()
    score: float = 0.0
    match_len: int = 0
    source: int = OWN


@dataclass(frozen=True)
class Rules:
    """Limits of one draft, named as in the CPU implementation."""

    max_tree_depth: int = 24
    max_spec_tokens: int = 16
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1

    def limit(self, match_len: int) -> int:
        """Most draft tokens after a match of `match_len` tokens."""
        scaled = match_len * self.max_spec_factor + self.max_spec_offset + 1e-6
        below = self.max_tree_depth - match_len
        return max(0, min(self.max_spec_tokens, int(scaled), below))


@dataclass
class Documents:
    """Token lists in order of arrival, with the places of each single token."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    places: dict[int, dict[Place, None]] = field(default_factory=dict)

    def add(self, doc: int, new: Sequence[int]) -> None:
        """Append to a document, creating it if need be."""
        seq = self.tokens.setdefault(doc, [])
        for tok in new:
            seq.append(tok)
            self.places.setdefault(tok, {})[(doc, len(seq))] = None

    def remove(self, doc: int) -> None:
        """Forget a document."""
        for i, tok in enumerate(self.tokens.pop(doc, [])):
            del self.places[tok][(doc, i + 1)]

    def matches(self, context: Sequence[int]) -> Iterator[tuple[int, list[Place]]]:
        """Yield (p, places after the last p context tokens), p = 1, 2, ...

        Stops at the first p without a place; the whole context is never a match.
        """
        found: list[Place] = []
        for p in range(1, len(context)):
            tok = context[-p]
            if p == 1:
                found = list(self.places.get(tok, {}))
            else:
                found = [
                    (doc, nxt)
                    for doc, nxt in found
                    if nxt >= p and self.tokens[doc][nxt - p] == tok
                ]
            if not found:
                return
            yield p, found

    def outcomes(
        self, places: list[Place], limit: int, min_prob: float
    ) -> Iterator[tuple[tuple[int, ...], tuple[float, ...], np.float32]]:
        """Yield every draft from `places` that some order of equal counts gives."""
        stack = [(places, (), (), np.float32(1.0), np.float32(0.0))]
        while stack:
            alive, toks, probs, prob, score = stack.pop()
            votes: Counter[int] = Counter()
            if len(toks) < limit:
                for doc, nxt in alive:
                    seq = self.tokens[doc]
                    if nxt < len(seq):
                        votes[seq[nxt]] += 1
            top = max(votes.values(), default=0)
            prob = np.float32(prob * np.float32(top / len(alive)))
            if top == 0 or prob < np.float32(min_prob):
                yield toks, probs, score
                continue
            # What is put on the stack last is taken first: of tokens seen once the
            # oldest, of tokens seen more often the one seen last.
            last = {
                self.tokens[doc][nxt]: i
                for i, (doc, nxt) in enumerate(alive)
                if nxt < len(self.tokens[doc])
            }
            for tok in sorted(votes, key=last.__getitem__, reverse=top == 1):
                if votes[tok] == top:
                    kept = [
                        (doc, nxt + 1)
                        for doc, nxt in alive
                        if nxt < len(self.tokens[doc]) and self.tokens[doc][nxt] == tok
                    ]
                    stack.append(
                        (
                            kept,
                            (*toks, tok),
                            (*probs, float(prob)),
                            prob,
                            np.float32(score + prob),
                        )
                    )

    def best(self, context: Sequence[int], rules: Rules) -> list[Draft]:
        """Return one draft per match length: ties by age."""
        return [
            Draft(t, pr, float(s), p)
            for p, places in self.matches(context)
            for t, pr, s in [
                next(self.outcomes(places, rules.limit(p), rules.min_token_prob))
            ]
        ]

    def all_outcomes(self, context: Sequence[int], rules: Rules) -> list[list[Draft]]:
        """Return, per match length, all drafts over the orders of equal counts."""
        return [
            [
                Draft(t, pr, float(s), p)
                for t, pr, s in self.outcomes(
                    places, rules.limit(p), rules.min_token_prob
                )
            ]
            for p, places in self.matches(context)
        ]


class SuffixModel:
    """Own history of each request and the responses of all of them.

    Args:
        rules: limits of a draft.
        max_cached_requests: responses kept, oldest request out first; 0 = no memory
            across requests.
    """

    def __init__(self, rules: Rules, max_cached_requests: int = 10000) -> None:
        self.rules = rules
        self.max_cached_requests = max_cached_requests
        self.own: dict[int, Documents] = {}
        self.memory = Documents()
        self.cached: list[int] = []

    def start(self, request: int, prompt: Sequence[int]) -> None:
        """Begin a request; the oldest cached response leaves when all are taken."""
        self.own[request] = Documents()
        self.own[request].add(0, prompt)
        if self.max_cached_requests > 0:
            while len(self.cached) >= self.max_cached_requests:
                self.memory.remove(self.cached.pop(0))
            self.cached.append(request)

    def add(self, request: int, tokens: Sequence[int]) -> None:
        """Append response tokens; they become visible to every request at once."""
        self.own[request].add(0, tokens)
        if request in self.cached:
            self.memory.add(request, tokens)

    def stop(self, request: int) -> None:
        """End a request; its response stays in the memory."""
        del self.own[request]

    def draft(self, request: int, context: Sequence[int]) -> Draft:
        """Return the best draft; ties by age."""
        best = Draft()
        for source, docs in ((OWN, self.own[request]), (MEMORY, self.memory)):
            mine = Draft()
            for cand in docs.best(context, self.rules):
                if cand.score >= mine.score:
                    mine = cand
            if source == OWN or mine.score > best.score:
                best = Draft(
                    mine.tokens, mine.probs, mine.score, mine.match_len, source
                )
        return best

    def allowed(self, request: int, context: Sequence[int]) -> list[Draft]:
        """Return every best draft that some order of equal counts gives.

        The orders at different nodes are independent, so an outcome can win if each
        other match length has some outcome that does not beat it.
        """
        per_source = [
            docs.all_outcomes(context, self.rules)
            for docs in (self.own[request], self.memory)
        ]
        lows = [
            [min(d.score for d in outcomes) for outcomes in lengths]
            for lengths in per_source
        ]
        result = []
        for source, lengths in enumerate(per_source):
            other = max(lows[1 - source], default=0.0)
            for i, outcomes in enumerate(lengths):
                longer = max(lows[source][i + 1 :], default=-1.0)
                shorter = max(lows[source][:i], default=0.0)
                for d in outcomes:
                    wins = d.score > longer and d.score >= shorter
                    wins_source = d.score >= other if source == OWN else d.score > other
                    if wins and wins_source:
                        result.append(
                            Draft(d.tokens, d.probs, d.score, d.match_len, source)
                        )
        return result or [Draft()]
