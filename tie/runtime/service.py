"""Puts the runtime together: bundle, weights, executor, engine and the two sockets beside Triton's.

Everything of the AFM Runtime that does not know Triton; `triton_model` puts Triton in front of it.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from kvxfer.header import buffer_bytes
from kvxfer.pool import BufferPool
from tie.assets.bundle import Bundle, open_bundle
from tie.assets.images import Placeholders
from tie.assets.manifest import TOKENIZER_FILE, Manifest
from tie.assets.tokenizer import load_tokenizer
from tie.bones.config import ModelConfig
from tie.daemon import log
from tie.daemon.config import NodeConfig, RuntimeConfig
from tie.daemon.errors import ConfigError, PeerError, RefusedError
from tie.daemon.layout import layout_for
from tie.proto import engine_pb2, runtime_pb2
from tie.runtime.blocks import BlockPool
from tie.runtime.control_server import ControlServer
from tie.runtime.engine import Engine
from tie.runtime.executors import make_executor
from tie.runtime.grammar_compiler import GrammarCompiler
from tie.runtime.images.factory import make_image_encoder
from tie.runtime.images.request_images import RequestImages
from tie.runtime.jobs import Job, Sink
from tie.runtime.kv_blocks import Format, Kept
from tie.runtime.kv_server import KvServer
from tie.runtime.kv_transfer import Limits as TransferLimits
from tie.runtime.kv_transfer import Transfers
from tie.runtime.owner_client import Weights, attach
from tie.runtime.prefix_cache import PrefixCache
from tie.runtime.prefixes import Prefixes, WarmError
from tie.runtime.ranked_executor import parts_of
from tie.runtime.ranks import Ranks
from tie.runtime.request import Bounds, Request, RequestRefusedError, check
from tie.runtime.scheduler import Limits
from tie.runtime.step_executor import Executor

_WARM_S: Final = 120.0


class RuntimeService:
    """A running engine with its control and kv sockets.

    Args:
        config: the node's.
        instance_id: random per start; how others tell this runtime from its predecessor.
        on_failure: called when the executor has failed and the process must go.

    Raises:
        TieError: the bundle is damaged, the owner does not answer, or serves another model.
    """

    def __init__(self, config: NodeConfig, instance_id: str, *, on_failure: Callable[[], None]) -> None:
        runtime = config.runtime
        self.instance_id = instance_id
        self._bundle = open_bundle(Path(config.model.bundle))
        manifest = self._bundle.manifest
        layout = layout_for(runtime)
        # First: they load their libraries while the owner is asked.
        self._ranks = Ranks(config) if runtime.ranks > 1 else None
        self._weights = attach(
            config.sockets.owner, layout, timeout=config.probe.start_deadline_s, progress=lambda _done, _total: None
        )
        if (self._weights.model, self._weights.release) != (manifest.model, manifest.release):
            raise ConfigError("the model owner serves another model than this node's bundle")
        model = ModelConfig.from_json(self._weights.config_json)
        ranked = self._ranks.executor if self._ranks else None
        self._executor = make_executor(runtime, model, self._weights, layout, ranked=ranked)
        self._image_encoder = make_image_encoder(manifest, self._executor)
        format_ = _format(manifest, self._executor)
        prefix = self._prefix = PrefixCache(BlockPool(self._executor.num_blocks, self._executor.block_tokens))
        self.prefixes = Prefixes(
            config.sockets.owner,
            manifest,
            format=format_,
            parts=parts_of(self._executor),
            most_blocks=prefix.pool.total // 2,  # see Keeping
            on_ready=lambda trie, pool: prefix.open(trie, pool, self._executor),
        )
        with ThreadPoolExecutor(1, thread_name_prefix="prefix-restore") as beside:
            restoring = beside.submit(self.prefixes.restore)
            self._grammars = GrammarCompiler(
                self._bundle.read(TOKENIZER_FILE).decode(), model.vocab_size, manifest.tokenizer.end_of_turn_ids
            )
            self.engine = _engine(
                runtime, self._bundle, model, self._executor, self._grammars, prefix=prefix, on_failure=on_failure
            )
            restoring.result()
        self.engine.start()
        log.event("runtime.started", instance_id=instance_id, model=manifest.model, executor=self._executor.layout_id)
        self._transfers = _transfers(runtime, format_, self._executor, self.engine.bounds)
        self._kv = KvServer(
            config.sockets.kv,
            runtime_pb2.KvHello(
                instance_id=instance_id,
                model=manifest.model,
                release=manifest.release,
                layout_id=self._executor.layout_id,
                block_tokens=self._executor.block_tokens,
                block_bytes=self._executor.block_bytes,
            ),
            self._transfers,
        )
        self._control = ControlServer(config.sockets.engine, self._handle)
        if self._ranks:
            self._ranks.follow(on_failure)

    @property
    def weights(self) -> Weights:
        """What the owner handed over."""
        return self._weights

    def submit(self, request: Request, sink: Sink) -> Job:
        """Takes a request, with the transfers that its tickets stand for, into the engine."""
        restoring = keep = images = None
        if request.images and self._image_encoder and self.engine.bounds.placeholders:
            images = RequestImages(request, self.engine.bounds.placeholders, self._image_encoder.look)
        if request.import_ticket:
            restoring = self._transfers.restore(request.import_ticket, request.prompt_length)
        if request.export_ticket:
            keep = self._transfers.keeper(request.export_ticket)
        return self.engine.submit(request, sink, restoring=restoring, images=images, keep=keep)

    def close(self, *, drain_s: float) -> None:
        """Drains for at most `drain_s` seconds and ends the engine; kv.sock goes last: that is the death notice."""
        self.engine.drain(drain_s)
        idle = threading.Event()
        # At the drain's own deadline what is left fails; one more second for that.
        for _ in range(int((drain_s + 1) / 0.02)):
            status = self.engine.status()
            if status.running + status.waiting == 0:
                break
            idle.wait(0.02)
        if self.engine.stop(timeout=5):
            self.prefixes.close()
            if self._ranks:
                self._ranks.close()
        self._grammars.close()
        if self._image_encoder:
            self._image_encoder.close()
        self._control.close()
        self._transfers.close()
        self._kv.close()

    def _handle(self, request: engine_pb2.EngineRequest) -> engine_pb2.EngineReply:
        error = ""
        kind = request.WhichOneof("kind")
        if kind == "drain":
            self.engine.drain(request.drain.deadline_ms / 1000)
        elif kind == "warm":
            error = self._warm(request.warm.prompt_index)
        elif kind != "status":
            error = "unknown request"
        return engine_pb2.EngineReply(status=self._status(), error=error)

    def _status(self) -> engine_pb2.EngineStatus:
        status = self.engine.status()
        return engine_pb2.EngineStatus(
            instance_id=self.instance_id,
            model=self._bundle.manifest.model,
            release=self._bundle.manifest.release,
            executor=self._executor.layout_id,
            state=status.state,
            running=status.running,
            waiting=status.waiting,
            steps=status.steps,
            max_batch_seen=status.max_batch_seen,
            last_step_age_s=status.last_step_age_s,
            metrics=self._metrics(),
            owner_generation=self._weights.generation,
            prefix=engine_pb2.Prefix(
                state=self.prefixes.state.value,
                restored=self.prefixes.restored,
                blocks=len(self.prefixes.trie),
                hot_blocks=self._prefix.hot,
                hits=self._prefix.statistics.hits,
                tokens=self._prefix.statistics.tokens,
            ),
        )

    def _metrics(self) -> str:
        if self._image_encoder:
            self.engine.metrics.record_images(self._image_encoder.counts)
        return self.engine.metrics.text()

    def _warm(self, index: int) -> str:
        """Has one registered system prompt in the prefix pool; a static error text, or ""."""
        if index >= len(self._bundle.manifest.system_prompts):
            return "no such prompt"
        try:
            self.prefixes.warm(index, self._compute)
        except WarmError as error:
            return str(error)
        except (PeerError, RefusedError) as error:
            log.failure("prefix.warm-failed", error)
            return "the model owner did not take the prefix pool"
        return ""

    def _compute(self, prompt: Sequence[int]) -> Kept:
        """Prefills a registered prompt, like a request of its own.

        Raises:
            WarmError: the prompt does not fit, or the engine did not answer.
        """
        message = runtime_pb2.GenerateRequest(token_ids=prompt, max_tokens=1)
        blocks: Future[Kept | None] = Future()
        try:
            self.engine.submit(check(message, self.engine.bounds), _Unheard(), keep=blocks.set_result)
            kept = blocks.result(timeout=_WARM_S)
        except RequestRefusedError:
            raise WarmError("the prompt does not fit the model") from None
        except TimeoutError:
            blocks.add_done_callback(_let_go)
            raise WarmError("warming took too long") from None
        if kept is None:
            raise WarmError("the engine refused the prompt")
        return kept


class _Unheard:
    """Takes the events of a request whose answer nobody wants."""

    def emit(self, event: runtime_pb2.GenerateEvent, *, last: bool) -> None:
        pass


def _let_go(late: "Future[Kept | None]") -> None:
    kept = late.result()
    if kept:
        kept.release()


def _format(manifest: Manifest, executor: Executor) -> Format:
    return Format(
        model=manifest.model,
        release=manifest.release,
        layout=executor.layout_id,
        block_tokens=executor.block_tokens,
        block_bytes=executor.block_bytes,
    )


def _transfers(runtime: RuntimeConfig, format_: Format, executor: Executor, bounds: Bounds) -> Transfers:
    spare_blocks = runtime.transfer_spare_tokens // executor.block_tokens
    return Transfers(
        format_,
        executor,
        TransferLimits(
            sequence_blocks=bounds.max_length // executor.block_tokens,
            total_bytes=runtime.transfer_bytes,
            import_s=runtime.import_deadline_s,
            request_s=runtime.export_request_s,
            export_s=runtime.export_deadline_s,
        ),
        BufferPool(buffer_bytes(executor.block_bytes, spare_blocks), runtime.transfer_spares if spare_blocks else 0),
    )


def _engine(
    runtime: RuntimeConfig,
    bundle: Bundle,
    model: ModelConfig,
    executor: Executor,
    grammars: GrammarCompiler,
    *,
    prefix: PrefixCache,
    on_failure: Callable[[], None],
) -> Engine:
    if runtime.step_tokens <= runtime.max_running:
        raise ConfigError(
            "runtime.step_tokens must exceed runtime.max_running: every sequence gets a token in each step"
        )
    pool = prefix.pool
    context = min(runtime.context_tokens or model.context_tokens, model.context_tokens)
    tokenizer = load_tokenizer(bundle)
    return Engine(
        executor,
        pool,
        Limits(step_tokens=runtime.step_tokens, max_running=runtime.max_running, max_waiting=runtime.max_waiting),
        Bounds(
            vocab_size=model.vocab_size,
            max_length=min(context, pool.total * pool.block_tokens),
            placeholders=Placeholders.of(bundle.manifest, tokenizer),
        ),
        tokenizer=tokenizer,
        end_ids=frozenset(bundle.manifest.tokenizer.end_of_turn_ids),
        grammars=grammars,
        speculation=runtime.speculation == "auto",
        on_failure=on_failure,
        prefix=prefix,
    )
