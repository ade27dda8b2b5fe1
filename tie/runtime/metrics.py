"""What the runtime counts, as Prometheus text: sums over all requests, nothing that one request carried."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tie.runtime.blocks import PoolStatistics

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
        self.prompt_tokens = Counter("tie_runtime_prompt_tokens", "Prompt tokens computed.", registry=registry)
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
        self._drafted = self._accepted = 0

    def record_pool(self, statistics: PoolStatistics) -> None:
        """Shows the pool's ledger."""
        for state in ("total", "free", "used", "shared", "peak_used"):
            self.blocks.labels(state=state).set(getattr(statistics, state))
        self.moves.labels(way="handed_out").set(statistics.handed_out)
        self.moves.labels(way="returned").set(statistics.returned)

    def record_drafts(self, drafted: int, accepted: int) -> None:
        """Shows how many tokens have been guessed so far, and how many of them came true."""
        if drafted > self._drafted:
            self.drafts.labels(outcome="accepted").inc(accepted - self._accepted)
            self.drafts.labels(outcome="rejected").inc(drafted - accepted - (self._drafted - self._accepted))
            self._drafted, self._accepted = drafted, accepted

    def text(self) -> str:
        """The registry in Prometheus' text format."""
        return generate_latest(self._registry).decode()
