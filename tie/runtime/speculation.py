"""Speculation by prompt lookup: where the last tokens have occurred before, what followed then is the draft.

A draft is verified in one pass (Leviathan et al. 2023, arXiv 2211.17192; prompt lookup: Saxena 2023). The sampler's
randomness is a function of seed and position alone, so verifying means to sample each position as if it had been
reached step by step, and to go on while the draft agrees: the output is that of plain sampling, token for token.

Whether and how long to draft is decided anew for every step, from what has been measured: how often a sequence's drafts
came true, and what a step costs by its rows. A row is worth adding while the tokens that it is expected to bring cost
less than those of the rest of the step. So drafts stop by themselves where guesses fail or batches are large. Pure.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tie.runtime import sequence as sequences
from tie.runtime.step_cost import StepCost

LONGEST: Final = 24  # tokens of a draft
PLACES: Final = 8  # that are compared, of those where a text's last two tokens have occurred,
LONGEST_LOOK: Final = 32  # by so many tokens
PROBE: Final = 2  # tokens of a draft that is made only to see whether drafts come true by now
RETRY: Final = 32  # steps without a draft, though there was one to make, until such a probe
START: Final = 1.08  # how much faster a step must get by drafts before they begin, and
STOP: Final = 1.0  # before they go on
_WEIGHT: Final = 0.15  # of one guess in a sequence's rate
_PRIOR: Final = 0.6  # the rate of a sequence that has not guessed yet
_LARGEST: Final = 48  # rows of a step beyond which nothing is drafted


class Lookup:
    """An index of a growing text: where its last tokens have occurred before.

    Of the last few places where its last two tokens did, the one counts that agrees with the end of the text for
    longest: in a copy that is the place which is being copied, whatever phrase has just occurred somewhere else too.

    Args:
        tokens: what is known at first.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._last: dict[tuple[int, int], int] = {}  # pair → the place after its last occurrence
        self._before = [0]  # place → the one after the occurrence before of the pair that ends there; 0 for none
        self.extend(tokens)

    def __len__(self) -> int:
        """Tokens known."""
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Continues the text."""
        known, last, before = self._tokens, self._last, self._before
        for token in tokens:
            pair = (known[-1] if known else -1, token)  # -1 is no token
            known.append(token)
            before.append(last.get(pair, 0))
            last[pair] = len(known)

    def draft(self, most: int) -> tuple[int, ...]:
        """What followed there, at most `most` tokens; () where the text's end is new.

        Where that reaches the end of the text it goes on with itself: the text may be a loop.
        """
        places = list(self._places())
        if not places:
            return ()
        place = max(places, key=lambda place: (self._agreement(place), place))
        period = len(self._tokens) - place
        return tuple(self._tokens[place + index % period] for index in range(most))

    def _places(self) -> Iterator[int]:
        """After the last occurrences of the text's last two tokens, this one aside."""
        place = self._before[-1]
        for _ in range(PLACES):
            if not place:
                return
            yield place
            place = self._before[place]

    def _agreement(self, place: int) -> int:
        """How many tokens before `place` are those at the end of the text."""
        known, length = self._tokens, 2
        while length < min(place, LONGEST_LOOK) and known[place - 1 - length] == known[-1 - length]:
            length += 1
        return length


class Guesser:
    """One sequence's index, and how often its drafts come true.

    Args:
        tokens: of its prompt.
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        self.lookup = Lookup(tokens)
        self.rate = _PRIOR  # how likely a guess comes true where all before it did
        self.idle = 0  # steps since the last draft in which there was one to make

    def learn(self, accepted: int, drafted: int) -> None:
        """Takes the outcome of a draft: each accepted guess is a success, the first that failed a failure."""
        for guess in range(min(accepted + 1, drafted)):
            self.rate += _WEIGHT * (float(guess < accepted) - self.rate)


class Speculation:
    """Drafts for all sequences that decode. Owned by the step thread.

    Args:
        cost: of steps, by rows.

    Attributes:
        drafted: tokens guessed so far.
        accepted: those of them that came true.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._guessers: dict[sequences.Sequence, Guesser] = {}
        self._on = False
        self.drafted = 0
        self.accepted = 0

    def draft(self, decoding: Sequence[sequences.Sequence]) -> None:
        """Sets the draft of each sequence that is about to decode, most of them to nothing."""
        for sequence in decoding:
            sequence.draft = ()
        if len(decoding) >= _LARGEST:
            self._guessers = {}
            return
        self._guessers = {entry: self._guessers.get(entry) or Guesser(entry.prompt) for entry in decoding}
        drafts: list[tuple[int, ...]] = []
        for entry, guesser in self._guessers.items():
            seen = len(guesser.lookup) - len(entry.prompt)
            guesser.lookup.extend(entry.output[seen:])
            drafts.append(guesser.lookup.draft(LONGEST) if entry.remaining == 1 else ())
        if not any(drafts):
            return
        guessers = list(self._guessers.values())
        lengths, gain = best_lengths(
            [guesser.rate if draft else 0.0 for guesser, draft in zip(guessers, drafts, strict=True)], self._cost
        )
        self._on = gain >= (STOP if self._on else START)
        for entry, guesser, draft, length in zip(decoding, guessers, drafts, lengths, strict=True):
            wanted = length if self._on else 0
            if draft and not wanted:
                guesser.idle += 1
                wanted = PROBE if guesser.idle >= RETRY else 0
            if wanted:
                guesser.idle = 0
            entry.draft = draft[:wanted]

    def learn(self, sequence: sequences.Sequence, accepted: int, drafted: int) -> None:
        """Takes the outcome of a draft that was verified."""
        self.drafted += drafted
        self.accepted += accepted
        if guesser := self._guessers.get(sequence):
            guesser.learn(accepted, drafted)


def best_lengths(rates: Sequence[float], cost: StepCost) -> tuple[list[int], float]:
    """The draft lengths that give the most tokens per second, and how many times as fast that is as without drafts.

    Args:
        rates: for each sequence, how likely one guess comes true; 0 where there is no draft.
        cost: of steps, by rows.

    A guess counts only where all before it came true, so the k-th of a draft is worth rate ** k. The most valuable rows
    are added one by one; the best of all these counts wins.
    """
    alone = len(rates)
    lengths, best, gain = [0] * alone, [0] * alone, 1.0
    base = cost.seconds(alone)
    if base is None:
        return best, gain
    worth = sorted(((rate**k, index) for index, rate in enumerate(rates) for k in range(1, LONGEST + 1)), reverse=True)
    tokens = float(alone)
    for rows, (value, index) in enumerate(worth, alone + 1):
        seconds = cost.seconds(rows)
        if value <= 0.02 or rows > _LARGEST or seconds is None:
            break
        tokens += value
        lengths[index] += 1
        if (faster := tokens / alone * base / seconds) > gain:
            best, gain = list(lengths), faster
    return best, gain
