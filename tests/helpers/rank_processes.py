"""Ranks of a model in processes of their own, for tests: they read models and batches, as JSON, from their input.

`Ranks` is the side of the test, which is rank 0; run as a program this file is another rank.
"""

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tie.bones.batch import Batch, SequenceSlice
from tie.bones.config import ModelConfig
from tie.bones.parallel import Links, RankExecutor
from tie.bones.split import Split

TIMEOUT_S = 60.0  # of an exchange: others may have the machine


class Ranks:
    """The other ranks of a split."""

    def __init__(self, tensor: int, pipeline: int) -> None:
        self.split = Split(tensor, pipeline)
        self.folder = tempfile.TemporaryDirectory(prefix="ranks")
        self.models = 0
        self.links: list[Links] = []
        self.others = [
            subprocess.Popen(
                [sys.executable, __file__, str(tensor), str(pipeline), str(rank)], stdin=subprocess.PIPE, text=True
            )
            for rank in range(1, self.split.world_size)
        ]

    def open(
        self, config: ModelConfig, tensors: Mapping[str, torch.Tensor], *, timeout: float = TIMEOUT_S, **options: Any
    ) -> RankExecutor:
        """An executor over all ranks; it takes the place of the one before."""
        self.models += 1
        model = Path(self.folder.name) / str(self.models)
        kept = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(kept, f"{model}.safetensors")
        self.tell({"model": str(model), "config": dataclasses.asdict(config), "timeout": timeout, "options": options})
        self.links.append(Links(self.split, timeout=timeout))
        executor = RankExecutor(config, tensors, self.links[-1], announce=self._announce, **options)
        self.links[-1].meet(model)
        return executor

    def tell(self, message: dict[str, Any]) -> None:
        line = json.dumps(message) + "\n"
        for other in self.others:
            assert other.stdin is not None
            other.stdin.write(line)
            other.stdin.flush()

    def _announce(self, batch: Batch) -> None:
        slices = [
            [list(map(int, part.tokens)), part.start, list(map(int, part.blocks)), part.logits, part.residence]
            for part in batch.slices
        ]
        self.tell({"slices": slices, "copies": batch.copies})

    def close(self) -> None:
        for other in self.others:
            assert other.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has died, and was told something since
                other.stdin.close()
            other.wait(TIMEOUT_S)
        self.folder.cleanup()


def main() -> None:
    split = Split(*map(int, sys.argv[1:]))
    executor = None
    for line in sys.stdin:
        message = json.loads(line)
        if model := message.get("model"):
            config = ModelConfig.from_json(json.dumps(message["config"]))
            links = Links(split, timeout=message["timeout"])
            tensors = safetensors.torch.load_file(f"{model}.safetensors")
            executor = RankExecutor(config, tensors, links, **message["options"])
            links.meet(Path(model))
            continue
        assert executor is not None
        slices = tuple(SequenceSlice(*fields) for fields in message["slices"])
        executor.forward(Batch(slices, tuple(map(tuple, message["copies"]))))


if __name__ == "__main__":
    main()
