"""An engine over a small random model that takes images, with everything that looks at them."""

from contextlib import contextmanager

import msgspec
import numpy as np
import torch

from collecting import Collect
from tie.assets.images import Placeholders
from tie.assets.manifest import TOKENIZER_FILE
from tie.assets.tensors import load_index, read_rows
from tie.assets.tokenizer import load_tokenizer
from tie.bones.config import ModelConfig
from tie.bones.executor import Executor
from tie.runtime.blocks import BlockPool
from tie.runtime.engine import Engine
from tie.runtime.grammar_compiler import GrammarCompiler
from tie.runtime.images.factory import make_image_encoder
from tie.runtime.images.request_images import RequestImages
from tie.runtime.request import Bounds, check
from tie.runtime.scheduler import Limits

BLOCK_TOKENS = 8
MAX_LENGTH = 300
WAIT_S = 60


class Model:
    """A bundle's model in float32."""

    def __init__(self, bundle):
        self.bundle = bundle
        self.config = ModelConfig.from_json(msgspec.json.encode(bundle.manifest.architecture))
        stored = {name: np.memmap(bundle.path(name), np.uint8, "r") for name in bundle.manifest.weights}
        self.tensors = {}
        for tensor in load_index(bundle).tensors:
            raw = stored[tensor.file][tensor.offset : tensor.offset + tensor.bytes]
            values = read_rows(tensor, raw, 0, tensor.rows).copy()
            self.tensors[tensor.name] = torch.from_numpy(values).view(tensor.shape)
        self.tokenizer = load_tokenizer(bundle)
        self.placeholders = Placeholders.of(bundle.manifest, self.tokenizer)
        self.end_ids = bundle.manifest.tokenizer.end_of_turn_ids
        self.grammars = GrammarCompiler(bundle.read(TOKENIZER_FILE).decode(), self.config.vocab_size, self.end_ids)

    def executor(self, blocks=200):
        return Executor(self.config, self.tensors, num_blocks=blocks, block_tokens=BLOCK_TOKENS, dtype="f32", threads=1)

    @contextmanager
    def served(self, *, blocks=200, step_tokens=256, max_running=16):
        """An engine with a image_encoder, as the runtime has them."""
        executor = self.executor(blocks)
        image_encoder = make_image_encoder(self.bundle.manifest, executor)
        engine = Engine(
            executor,
            BlockPool(blocks, BLOCK_TOKENS),
            Limits(step_tokens=step_tokens, max_running=max_running, max_waiting=100),
            Bounds(self.config.vocab_size, MAX_LENGTH, self.placeholders),
            tokenizer=self.tokenizer,
            end_ids=frozenset(self.end_ids),
            grammars=self.grammars,
            speculation=False,
            on_failure=lambda: None,
        )
        engine.start()
        try:
            yield Served(engine, image_encoder)
        finally:
            assert engine.stop(WAIT_S)
            image_encoder.close()
        ledger = engine.pool.statistics()
        assert (ledger.used, ledger.handed_out) == (0, ledger.returned)


class Served:
    """Takes requests as the runtime's service does."""

    def __init__(self, engine, image_encoder):
        self.engine, self.image_encoder = engine, image_encoder

    def ask(self, message):
        request = check(message, self.engine.bounds)
        return self._submit(request, self.image_encoder.look)

    def ask_at_once(self, messages):
        """All of them together, when all images have been seen."""
        requests = [check(message, self.engine.bounds) for message in messages]
        looks = [self.image_encoder.look(request.images) if request.images else None for request in requests]
        for look in looks:
            if look:
                look.result(WAIT_S)
        ready = zip(requests, looks, strict=True)
        return [self._submit(request, lambda *_, look=look: look) for request, look in ready]

    def _submit(self, request, look):
        sink = Collect(WAIT_S)
        images = RequestImages(request, self.engine.bounds.placeholders, look) if request.images else None
        sink.job = self.engine.submit(request, sink, images=images)
        return sink
