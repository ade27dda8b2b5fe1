"""The executor for an NVIDIA GPU.

The same interface as `tie.bones.executor.Executor`, and the same model: what differs is where the weights and the KV
pool are, which kernel attends, and that decoding replays captured graphs. A step goes to the device as one copy of
numbers and comes back as one copy of logits.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tie.bones.batch import Batch, Rows, lay_out
from tie.bones.config import ModelConfig
from tie.bones.cuda.attention import Kernel, PagedAttention, Pass
from tie.bones.cuda.decode import DecodeStep, captured, decode_sizes
from tie.bones.cuda.numbers import Upload, inputs, number
from tie.bones.cuda.pool import DevicePool
from tie.bones.cuda.reference import Reference
from tie.bones.errors import DeviceError, InputError
from tie.bones.llama import Llama

_DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16}
_OLDEST: Final = (8, 0)  # compute capability: what computes in bfloat16

# What is computed in the middle of a prompt, where nobody wants logits: some kernels cannot be launched for no rows.
_FIRST_ROW: Final = np.zeros(1, dtype=np.int64)

Floats = npt.NDArray[np.float32]


class CudaExecutor:
    """Runs a model on one device. Not thread-safe, save for `read_block` and `write_block`.

    Args:
        config: of the model.
        tensors: the weights, under Hugging Face's names, matrices of `dtype`; copied to the device.
        num_blocks: blocks of the KV pool.
        block_tokens: tokens of a block.
        dtype: "bf16", or with the reference "f32": of weights, keys and values.
        most_decoding: sequences; a batch that decodes no more of them replays a graph.
        device: "cuda", or "cpu", where nothing is captured, to test the rest.
        kernel: "flashinfer", or "reference", which is slow and runs everywhere.
        graphs: without them every batch takes the way of a mixed one.

    Raises:
        InputError: an argument is impossible, or there is no kernel for the model.
        WeightsError: the tensors are not those of the model.
        DeviceError: there is no such GPU, or not enough memory on it.
        ModuleNotFoundError: flashinfer is not installed.
    """

    name = "cuda"
    vision = None  # models that take images are not for a GPU yet

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        *,
        num_blocks: int,
        block_tokens: int,
        dtype: str = "bf16",
        most_decoding: int = 32,
        device: str = "cuda",
        kernel: str = "flashinfer",
        graphs: bool = True,
    ) -> None:
        if dtype not in _DTYPES:
            raise InputError(f"the dtype must be one of {', '.join(_DTYPES)}")
        if most_decoding < 1:
            raise InputError("at least one sequence must decode")
        self.config = config
        self.layout_id = f"{self.name}-{dtype}"
        self._device = _checked(device)
        try:
            self._pool = DevicePool(
                config, num_blocks=num_blocks, block_tokens=block_tokens, dtype=_DTYPES[dtype], device=self._device
            )
            self._kernel = _kernel(kernel, config, self._pool, _DTYPES[dtype], self._device)
            attention = PagedAttention(config, self._pool)
            self._model = Llama[Pass](config, tensors, attention, _DTYPES[dtype], self._device)
            self._upload = Upload(4096, self._device)
            self._logits = self._host_logits(most_decoding)
            self._steps: dict[int, DecodeStep] = {}
            self._runs: dict[int, Callable[[], Tensor]] = {}
            if graphs:
                self._prepare(most_decoding)
        except torch.OutOfMemoryError as error:
            raise DeviceError("the GPU has no memory for the weights and as many blocks of the KV pool") from error

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.config.vocab_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool."""
        return self._pool.num_blocks

    @property
    def block_tokens(self) -> int:
        """Tokens that a block holds."""
        return self._pool.block_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes that a block takes, over all layers."""
        return self._pool.block_bytes

    def read_block(self, block: int, target: memoryview) -> None:
        """Copies a block out, `[layer][K, V][kv head][token][dim]`, into as many bytes as it has. From any thread.

        Raises:
            InputError: no such block.
        """
        self._pool.read_block(block, target)

    def write_block(self, block: int, source: memoryview) -> None:
        """Copies a block in, as `read_block` gave it. From any thread.

        Raises:
            InputError: no such block.
        """
        self._pool.write_block(block, source)

    def forward(self, batch: Batch) -> Floats:
        """Computes a batch: copies blocks, files keys and values of every row, returns the logits that are asked for.

        Returns:
            `[sum of slice.logits, vocab_size]`, in batch order. The next call overwrites them.

        Raises:
            InputError: the batch cannot be carried out; nothing was changed.
        """
        rows = lay_out(batch, self.config, num_blocks=self.num_blocks, block_tokens=self.block_tokens)
        with torch.inference_mode():
            for source, target in batch.copies:
                self._pool.copy(source, target)
            # Decoding slices come first, so the last one tells of all.
            size = self._size(len(rows.spans)) if rows.spans[-1].count == 1 else None
            logits = self._mixed(rows) if size is None else self._decode(rows, size)
            return self._download(logits[: len(rows.wanted)])

    def _mixed(self, rows: Rows) -> Tensor:
        if not len(rows.wanted):
            rows = replace(rows, wanted=_FIRST_ROW)
        numbers = number(rows, self.block_tokens)
        sent = self._upload.send(numbers.packed)
        told = inputs(sent, numbers.rows, numbers.wanted)
        attend = self._kernel.plan(numbers.table, sent[4 * numbers.rows + numbers.wanted :])
        return self._model.forward(told.tokens, told.positions, told.wanted, Pass(told, attend))

    def _decode(self, rows: Rows, size: int) -> Tensor:
        self._steps[size].fill(rows)
        return self._runs[size]()

    def _size(self, sequences: int) -> int | None:
        """The smallest step that has room for them."""
        return min((size for size in self._steps if size >= sequences), default=None)

    def _prepare(self, most_decoding: int) -> None:
        with torch.inference_mode():
            most_pages = -(-self.config.context_tokens // self.block_tokens)
            for size in decode_sizes(most_decoding):
                self._steps[size] = DecodeStep(
                    self._model, self._kernel, self._pool, size=size, most_pages=most_pages, device=self._device
                )
            if self._device.type == "cuda":
                self._runs = captured(self._steps.values())
            else:
                self._runs = {size: step.run for size, step in self._steps.items()}

    def _download(self, logits: Tensor) -> Floats:
        """Logits on the host, once the device is through with all of the step."""
        if len(logits) > len(self._logits):
            self._logits = self._host_logits(2 * len(logits))
        self._logits[: len(logits)].copy_(logits, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        found: Floats = self._logits[: len(logits)].numpy()
        return found

    def _host_logits(self, rows: int) -> Tensor:
        shape = (rows, self.config.vocab_size)
        return torch.empty(shape, dtype=torch.float32, pin_memory=self._device.type == "cuda")


def _checked(name: str) -> torch.device:
    if name not in ("cuda", "cpu"):
        raise InputError("the device must be cuda or cpu")
    if name == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError("there is no GPU that PyTorch can use")
        if torch.cuda.get_device_capability() < _OLDEST:
            raise DeviceError("the GPU is older than compute capability 8.0, and does not compute in bfloat16")
    return torch.device(name)


def _kernel(name: str, config: ModelConfig, pool: DevicePool, dtype: torch.dtype, device: torch.device) -> Kernel:
    match name:
        case "flashinfer":
            # Only where it is asked for: it comes with the extra `cuda`, and its import alone takes seconds.
            from tie.bones.cuda.flashinfer import FlashInfer

            return FlashInfer(config, pool.block_tokens, dtype, device)
        case "reference":
            return Reference(config, pool.block_tokens, device)
        case _:
            raise InputError("the kernel must be flashinfer or reference")
