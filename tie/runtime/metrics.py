"""What the runtime counts, as Prometheus text: sums over all requests, nothing that one request carried."""

from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tie.runtime.blocks import PoolStatistics
from tie.runtime.images.image_encoder import Counts
from tie.runtime.plan import Plan
from tie.runtime.prefix_cache import Statistics

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class EngineMetrics:
    """The engine's registry. Updated by the step thread, read by any."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "tie_runtime_requests", "Requests ended, by outcome; canaries are kind=canary.", ["kind", "outcome"],
            registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter("tie_runtime_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.computed_tokens = Counter(
            "tie_runtime_computed_tokens", "Tokens that went through the model.", registry=registry
        )
        self.output_tokens = Counter("tie_runtime_output_tokens", "Tokens generated.", registry=registry)
        self.steps = Counter("tie_runtime_steps", "Steps of the engine.", registry=registry)
        self.preemptions = Counter("tie_runtime_preemptions", "Sequences that lost their blocks.", registry=registry)
        self.drafts = Counter(
            "tie_runtime_draft_tokens", "Tokens guessed ahead, by outcome.", ["outcome"], registry=registry
        )
        self.step_seconds = Histogram(
            "tie_runtime_step_seconds", "Length of a step.", buckets=_SECONDS, registry=registry
        )
        self.batch = Histogram("tie_runtime_batch_sequences", "Sequences in a step.", buckets=_ROWS, registry=registry)
        self.first_token_seconds = Histogram(
            "tie_runtime_first_token_seconds", "From arrival to the first token.", buckets=_SECONDS, registry=registry
        )
        self.running = Gauge("tie_runtime_running", "Sequences that hold blocks.", registry=registry)
        self.waiting = Gauge("tie_runtime_waiting", "Sequences that wait.", registry=registry)
        self.blocks = Gauge("tie_runtime_kv_blocks", "KV blocks, by state.", ["state"], registry=registry)
        self.moves = Gauge(
            "tie_runtime_kv_block_moves", "KV blocks handed out and returned so far; used is the difference.", ["way"],
            registry=registry,
        )  # fmt: skip
        self.prefix_hits = Counter(
            "tie_runtime_prefix_hits", "Sequences that began with blocks of the prefix pool.", registry=registry
        )
        self.prefix_tokens = Counter(
            "tie_runtime_prefix_tokens", "Tokens taken from the prefix pool instead of computed.", registry=registry
        )
        self.prefix_moves = Counter(
            "tie_runtime_prefix_block_moves", "Prefix blocks that came into the paged KV and went.", ["way"],
            registry=registry,
        )  # fmt: skip
        self.prefix_hot = Gauge("tie_runtime_prefix_hot_blocks", "Prefix blocks in the paged KV.", registry=registry)
        self.images = Counter(
            "tie_runtime_images", "Images of requests, by outcome: decoded, or why not.", ["outcome"], registry=registry
        )
        self.squares = Counter("tie_runtime_image_squares", "Squares of images encoded.", registry=registry)
        self._images = Counts()  # as last recorded
        self.prefix = Statistics()  # as last recorded
        self._drafted = self._accepted = 0

    def record_step(self, plan: Plan, seconds: float, *, running: int, waiting: int) -> None:
        """Counts a step, and shows how many sequences there are after it."""
        self.running.set(running)
        self.waiting.set(waiting)
        self.steps.inc()
        self.step_seconds.observe(seconds)
        self.batch.observe(len(plan.slices))
        self.computed_tokens.inc(plan.tokens)
        self.preemptions.inc(len(plan.preempted))

    def record_pool(self, statistics: PoolStatistics) -> None:
        """Shows the pool's ledger."""
        for state in ("total", "free", "used", "shared", "peak_used"):
            self.blocks.labels(state=state).set(getattr(statistics, state))
        self.moves.labels(way="handed_out").set(statistics.handed_out)
        self.moves.labels(way="returned").set(statistics.returned)

    def record_prefix(self, statistics: Statistics, hot: int) -> None:
        """Shows what the prefix cache has done so far."""
        before, self.prefix = self.prefix, replace(statistics)
        self.prefix_hits.inc(self.prefix.hits - before.hits)
        self.prefix_tokens.inc(self.prefix.tokens - before.tokens)
        self.prefix_moves.labels(way="loaded").inc(self.prefix.loads - before.loads)
        self.prefix_moves.labels(way="evicted").inc(self.prefix.evictions - before.evictions)
        self.prefix_hot.set(hot)

    def record_drafts(self, drafted: int, accepted: int) -> None:
        """Shows how many tokens have been guessed so far, and how many of them came true."""
        if drafted > self._drafted:
            self.drafts.labels(outcome="accepted").inc(accepted - self._accepted)
            self.drafts.labels(outcome="rejected").inc(drafted - accepted - (self._drafted - self._accepted))
            self._drafted, self._accepted = drafted, accepted

    def record_images(self, counts: Counts) -> None:
        """Shows how many images have been looked at so far."""
        now = Counts(counts.decoded, dict(counts.refused), counts.squares, counts.passes)
        before, self._images = self._images, now
        self.images.labels(outcome="decoded").inc(now.decoded - before.decoded)
        for code, count in now.refused.items():
            self.images.labels(outcome=code).inc(count - before.refused.get(code, 0))
        self.squares.inc(now.squares - before.squares)

    def text(self) -> str:
        """The registry in Prometheus' text format."""
        return generate_latest(self._registry).decode()
