"""The scheduler's promises over more than 100,000 plans.

Random requests, families, ends, cancels, drafts, forced tokens and paces, in pools that are too small. A played memory
remembers which token each position of each block was computed for, so that a table which names a wrong, lost or
overwritten block is found at the next step that reads it.
"""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tie.runtime.blocks import BlockPool
from tie.runtime.scheduler import LEAST, Limits, Plan, Scheduler
from tie.runtime.sequence import Phase, Priority, Sequence

PLANS = 100_000
MAX_LENGTH = 40
BLOCK_TOKENS = 4


class World:
    """A scheduler, a memory, and a model whose every token is known beforehand."""

    def __init__(self, dice: random.Random, limits: Limits, blocks: int) -> None:
        self.dice = dice
        self.pool = BlockPool(blocks, BLOCK_TOKENS)
        self.scheduler = Scheduler(limits, self.pool)
        self.memory = [[-1] * BLOCK_TOKENS for _ in range(blocks)]
        self.committed = [0] * blocks  # leading positions that count as computed
        self.generations = [0] * blocks
        self.everything: list[Sequence] = []
        self.answers: dict[Sequence, list[int]] = {}
        self.plans = 0

    def arrive(self, prompt: int, output: int, priority: Priority, choices: int = 1) -> list[Sequence]:
        ids = tuple(self.dice.randrange(1000) for _ in range(prompt))
        family = [Sequence(ids, max_length=prompt + output, priority=priority) for _ in range(choices)]
        for entry in family:
            entry.family = tuple(family) if choices > 1 else ()
            self.answers[entry] = [self.dice.randrange(1000) for _ in range(output)]
            self.scheduler.submit(entry)
        self.everything += family
        return family

    def step(self, pace: int | None = None) -> tuple[Plan, list[Sequence]]:
        """One step; gives the plan and the sequences that got a token."""
        for entry in self.scheduler.decoding():
            entry.draft = self.draft(entry)
        plan = self.scheduler.plan(None if pace is None else lambda _decodes, _beside, _prompts: pace)
        self.plans += 1
        self.check(plan, pace)
        for copy in plan.copies:
            self.forget_reused(copy.target)
            self.memory[copy.target] = list(self.memory[copy.source])
        for part in plan.slices:
            self.compute(part)
        self.scheduler.computed(plan)
        spoke = [part.sequence for part in plan.slices if part.logits]
        for part in plan.slices:
            self.answer(part)
            self.commit(part.sequence)
        return plan, spoke

    def draft(self, entry: Sequence) -> tuple[int, ...]:
        right = self.answers[entry][len(entry.output) :][: self.dice.randrange(6)]
        return (*right[:-1], -5) if right and self.dice.random() < 0.5 else tuple(right)

    def check(self, plan: Plan, pace: int | None) -> None:
        limits = self.scheduler.limits
        first = [entry for entry in self.scheduler.decoding() if entry.priority is not Priority.BATCH]
        assert plan.tokens <= limits.step_tokens
        if pace is not None and first:
            assert plan.tokens <= max(pace, len(first) + LEAST)
        assert len({id(part.sequence) for part in plan.slices}) == len(plan.slices)
        running = [entry for entry in self.everything if entry.phase is Phase.RUNNING]
        assert sum(entry.priority is not Priority.CANARY for entry in running) <= limits.max_running
        # The ledger: every block that is not free is in a table; one in several tables is shared by a family, and full.
        holders = Counter(block for entry in running for block in entry.blocks)
        statistics = self.pool.statistics()
        assert len(holders) == statistics.used == statistics.total - self.pool.free
        assert statistics.shared == sum(count > 1 for count in holders.values())
        assert all(count == 1 or self.committed[block] == BLOCK_TOKENS for block, count in holders.items())
        planned = {id(part.sequence) for part in plan.slices}
        assert all(id(entry) in planned for entry in first)
        for part in plan.slices:
            entry = part.sequence
            assert entry.phase is Phase.RUNNING
            assert part.start == entry.computed
            assert 1 <= part.known <= entry.remaining
            assert part.start + part.count <= min(entry.max_length, len(entry.blocks) * BLOCK_TOKENS)
            assert part.logits == (1 + len(part.draft) if part.known == entry.remaining else 0)
            assert part.draft == entry.draft[: len(part.draft)]
            assert len(entry.blocks) == len(set(entry.blocks))

    def forget_reused(self, block: int) -> None:
        if self.generations[block] != self.pool.generation(block):
            self.generations[block] = self.pool.generation(block)
            self.committed[block] = 0

    def compute(self, part) -> None:
        """Writes a slice; before, all that it reads must be there, and nothing that counts may be written again."""
        entry = part.sequence
        tokens = [*entry.tokens(0, part.start + part.known), *part.draft]
        for index, block in enumerate(entry.blocks):
            self.forget_reused(block)
            known = tokens[index * BLOCK_TOKENS : min(part.start, (index + 1) * BLOCK_TOKENS)]
            assert self.memory[block][: len(known)] == known
        for position in range(part.start, part.start + part.count):
            block, offset = entry.blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            assert self.pool.writable(block)
            assert offset >= self.committed[block], "a position is written twice"
            self.memory[block][offset] = tokens[position]

    def answer(self, part) -> None:
        """What the engine does with logits: a token, one more for each right guess, and perhaps forced ones."""
        entry = part.sequence
        if not part.logits:
            return
        answer = self.answers[entry]
        for guess in (*part.draft, None):
            entry.output.append(answer[len(entry.output)])
            if entry.full or entry.output[-1] != guess:
                break
            entry.computed += 1
        if not entry.full and self.dice.random() < 0.1:  # a grammar forces some
            entry.output += answer[len(entry.output) :][: self.dice.randrange(1, 6)]
        if entry.full:
            self.scheduler.finish(entry)

    def commit(self, entry: Sequence) -> None:
        for index, block in enumerate(entry.blocks):
            filled = min(BLOCK_TOKENS, max(0, entry.computed - index * BLOCK_TOKENS))
            self.committed[block] = max(self.committed[block], filled)

    def unfinished(self) -> bool:
        return any(entry.phase is not Phase.FINISHED for entry in self.everything)

    def check_end(self) -> None:
        ledger = self.pool.statistics()
        assert ledger.used == 0
        assert ledger.handed_out == ledger.returned
        assert self.scheduler.running == self.scheduler.waiting == 0


def test_promises_hold_over_many_plans():
    total = 0

    @settings(max_examples=2000, database=None)
    @given(full_worlds(), st.integers(1, 24))
    def run(full, arrivals):
        nonlocal total
        world, pace = full
        dice, hurried = world.dice, pace is not None
        cancelled = set()
        while arrivals or world.unfinished():
            while arrivals and dice.random() < 0.4:
                arrivals -= 1
                priority = dice.choice([Priority.INTERACTIVE, Priority.INTERACTIVE, Priority.BATCH, Priority.CANARY])
                prompt = dice.randrange(1, MAX_LENGTH - 12)
                choices = 1 if priority is Priority.CANARY else dice.choice([1, 1, 2, 4])
                world.arrive(prompt, dice.randrange(1, 13), priority, choices)
            if world.everything and dice.random() < 0.02:
                entry = dice.choice(world.everything)
                cancelled.add(entry)
                world.scheduler.finish(entry)
            world.step(dice.randrange(1, 30) if hurried else None)
            total += 1
            assert world.plans < 4000, "something never finishes"
        world.check_end()
        assert all(entry.output == world.answers[entry] for entry in world.everything if entry not in cancelled)

    run()
    print(f"{total} plans")
    assert total >= PLANS


@st.composite
def full_worlds(draw) -> tuple["World", int | None]:
    """A world with little room, and a pace."""
    max_running = draw(st.integers(1, 8))
    limits = Limits(max_running + draw(st.integers(1, 20)), max_running, 1000)
    world = World(random.Random(draw(st.integers(0, 2**32))), limits, draw(st.integers(10, 30)))  # noqa: S311
    return world, draw(st.none() | st.integers(1, 20))


PROMPT, OUTPUT = st.integers(1, MAX_LENGTH - 12), st.integers(1, 12)


def roomy(seed: int, budget: int, blocks: int) -> World:
    return World(random.Random(seed), Limits(8 + budget, 8, 1000), blocks)  # noqa: S311


def keep_full(world: World, priority: Priority, most_prompt: int = MAX_LENGTH - 12) -> None:
    """More of a class always wait than can run."""
    waiting = sum(entry.phase is Phase.WAITING and entry.priority is priority for entry in world.everything)
    for _ in range(world.scheduler.limits.max_running + 2 - waiting):
        world.arrive(world.dice.randrange(1, most_prompt), world.dice.randrange(1, 13), priority)
    world.everything = [entry for entry in world.everything if entry.phase is not Phase.FINISHED]


@settings(max_examples=100)
@given(full_worlds(), PROMPT, OUTPUT)
def test_batch_ends_however_many_interactive_requests_come(full, prompt, output):
    world, pace = full
    keep_full(world, Priority.INTERACTIVE)
    (batch,) = world.arrive(prompt, output, Priority.BATCH)
    while batch.phase is not Phase.FINISHED:
        keep_full(world, Priority.INTERACTIVE)
        world.step(pace)
        assert world.plans < 2000


@settings(max_examples=100)
@given(full_worlds(), PROMPT, OUTPUT)
def test_interactive_ends_however_many_batch_requests_come(full, prompt, output):
    world, pace = full
    for _ in range(10):
        keep_full(world, Priority.BATCH)
        world.step(pace)
    (interactive,) = world.arrive(prompt, output, Priority.INTERACTIVE)
    began = world.plans
    while interactive.phase is not Phase.FINISHED:
        keep_full(world, Priority.BATCH)
        world.step(pace)
        # Those by right (at most one here that is older than it and never a guest) may hold it up, guests may not.
        assert world.plans - began < 200


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), budget=st.integers(4, 18), blocks=st.integers(30, 60), short=st.integers(1, 4))
def test_a_short_prompt_is_not_stuck_behind_a_flood_of_long_ones(seed, budget, blocks, short):
    world = roomy(seed, budget, blocks)
    for _ in range(30):
        world.arrive(MAX_LENGTH - 12, 12, Priority.INTERACTIVE)
    for _ in range(world.dice.randrange(1, 4)):
        world.step()
    (entry,) = world.arrive(short, 1, Priority.INTERACTIVE)
    for _ in range(5):
        world.step()
    assert entry.phase is Phase.FINISHED


@settings(max_examples=100)
@given(full_worlds(), OUTPUT)
def test_a_long_prompt_ends_however_many_short_ones_come(full, output):
    world, pace = full
    keep_full(world, Priority.INTERACTIVE, 4)
    (entry,) = world.arrive(MAX_LENGTH - 12, output, Priority.INTERACTIVE)
    while entry.phase is not Phase.FINISHED:
        keep_full(world, Priority.INTERACTIVE, 4)
        world.step(pace)
        assert world.plans < 1000


def test_a_family_computes_its_prompt_once():
    world = roomy(0, 20, 40)
    family = world.arrive(30, 6, Priority.INTERACTIVE, 4)
    computed = 0
    while not all(entry.output for entry in family):
        plan, _ = world.step()
        computed += sum(part.known for part in plan.slices)
    # 30 for all, one more for each of the other three; what the first has written meanwhile comes on top.
    assert computed <= 30 + 3 + len(family[0].output)
    statistics = world.pool.statistics()
    assert statistics.shared == 7
    while world.unfinished():
        world.step()
    world.check_end()


def test_a_preempted_fork_shares_the_prompt_again():
    world = roomy(0, 60, 15)
    family = world.arrive(24, 12, Priority.INTERACTIVE, 4)  # 6 blocks for the prompt, 3 more for each: 18
    while world.unfinished():
        before = {entry: entry.preemptions for entry in family}
        plan, _ = world.step()
        for part in plan.slices:
            if before[part.sequence] and part.start < 24:
                assert all(other.phase is not Phase.RUNNING for other in family if other is not part.sequence)
    assert sum(entry.preemptions for entry in family)
    world.check_end()
