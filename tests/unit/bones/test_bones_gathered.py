"""What is kept gathered between steps changes nothing: the same logits as without, whoever comes, goes or guesses."""

import random

import torch

from tie.bones.executor import Batch, SequenceSlice

BLOCK = 4


class Player:
    """Random sequences that decode, end, come back and guess, on one executor."""

    def __init__(self, executor, *, residences, seed):
        self.executor = executor
        self.residences = residences
        self.dice = random.Random(seed)  # noqa: S311 - no secret
        self.free = list(range(executor.num_blocks))
        self.tables, self.filled, self.names = {}, {}, 0
        self.logits = []

    def slice(self, key, count, logits):
        start = self.filled[key]
        table = self.tables[key]
        while len(table) * BLOCK < start + count:
            table.append(self.free.pop())
        tokens = [self.dice.randrange(50) for _ in range(count)]
        self.filled[key] = start + count
        return SequenceSlice(tokens, start, list(table), logits, key if self.residences else None)

    def step(self):
        slices = []
        if len(self.tables) < 4 and self.dice.random() < 0.3:
            self.names += 1
            self.tables[self.names], self.filled[self.names] = [], 0
            slices.append(self.slice(self.names, self.dice.randrange(1, 12), 1))
        for key in [key for key in self.tables if key != self.names or not slices]:
            if self.filled[key] > 58 or self.dice.random() < 0.02:
                self.free += self.tables.pop(key)[::-1]  # the next one may well get the very same table
            elif self.dice.random() < 0.05:
                slices.append(self.slice(key, 3, 3))
                self.filled[key] -= self.dice.randrange(3)  # some guesses failed
            elif self.dice.random() < 0.97:
                slices.append(self.slice(key, 1, 1))
        if slices:
            self.logits.append(self.executor.forward(Batch(tuple(slices))))


def test_logits_are_the_same_as_without(make_executor):
    kept = 0
    for seed in range(10):
        players = [
            Player(make_executor(num_blocks=80, block_tokens=BLOCK), residences=residences, seed=seed)
            for residences in (True, False)
        ]
        for _ in range(160):
            for player in players:
                player.step()
            kept += any(entry.storage is not None for entry in players[0].executor._attention._gathered._next.values())
            assert not players[1].executor._attention._gathered._next
        for ours, plain in zip(*(player.logits for player in players), strict=True):
            assert torch.allclose(ours, plain, atol=1e-4)
    assert kept > 100


def test_a_group_stays_whoever_comes_and_goes_beside_it(make_executor):
    """Two decode on; beside them another one in every other step, shorter or longer than they are."""
    both = [make_executor(num_blocks=400, block_tokens=BLOCK) for _ in range(2)]
    tables = {key: list(range(20 * key, 20 * key + 20)) for key in range(4)}
    lengths = {0: 12, 1: 30, 2: 3, 3: 40}
    for executor, named in zip(both, (True, False), strict=True):
        for key, length in lengths.items():
            executor.forward(Batch((SequenceSlice([1] * length, 0, tables[key], 1, key if named else None),)))
    for step in range(20):
        guest = 2 + step % 2
        decoding = [0, 1, guest] if step > 6 else [0, 1]
        logits = [
            executor.forward(
                Batch(
                    tuple(
                        SequenceSlice([step], lengths[key], tables[key], 1, key if named else None) for key in decoding
                    )
                )
            )
            for executor, named in zip(both, (True, False), strict=True)
        ]
        assert torch.allclose(*logits, atol=1e-4)
        lengths = {key: length + (key in decoding) for key, length in lengths.items()}
        if step > 6:
            kept = both[0]._attention._gathered._next
            assert kept[(0, 1)].storage is not None
            assert kept[(0, 1)].times == step + 1


def test_no_more_is_kept_than_may_be(make_executor):
    executor = make_executor(num_blocks=4, block_tokens=BLOCK)  # half of it is less than the room for growth
    for start in range(8):
        executor.forward(Batch((SequenceSlice([1], start, [0, 1], 1, 7),)))
    assert all(entry.storage is None for entry in executor._attention._gathered._next.values())
