"""Paged attention by flashinfer's kernels (Ye et al. 2025, arXiv 2501.01005).

Before each pass a wrapper plans: it takes the page tables and shares the work among the multiprocessors. All layers
then run with that plan. A wrapper made for CUDA graphs keeps the plan in memory that never moves, with a fixed number
of sequences, so that a captured pass may be planned anew and replayed.

Both kinds of wrapper use the "fa2" kernels with tensor cores: one kernel, compiled once, for any number of query heads
to a key head. Without `flashinfer-jit-cache` it is compiled on the node when it is first used, which needs nvcc.
"""

from typing import Final

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from tie.bones.config import ModelConfig
from tie.bones.cuda.attention import Attend
from tie.bones.cuda.numbers import Ints32, PageTable
from tie.bones.errors import InputError

HEAD_DIMS: Final = (64, 128, 256)
"""What the kernels are made for."""

DTYPES: Final = (torch.bfloat16, torch.float16)

_LAYOUT: Final = "HND"  # a page is [kv head][token][dim]
_BACKEND: Final = "fa2"
# Where parts of a long context are merged: query heads * tiles * rows of a tile * head_dim floats at most, which is
# 20 MiB for each query head of a key head on a GPU with 150 multiprocessors.
_WORKSPACE_BYTES: Final = 256 * 1024 * 1024


class FlashInfer:
    """A `Kernel`. See `tie.bones.cuda.attention`.

    Args:
        config: of the model.
        block_tokens: tokens of a page.
        dtype: of queries, keys and values.
        device: the GPU.

    Raises:
        InputError: there is no kernel for the model's heads, or for the dtype.
    """

    def __init__(self, config: ModelConfig, block_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        if config.head_dim not in HEAD_DIMS:
            raise InputError(f"flashinfer has kernels for heads of {HEAD_DIMS} dimensions, not {config.head_dim}")
        if dtype not in DTYPES:
            raise InputError("flashinfer's kernels compute in bf16")
        self._device = device
        # What both wrappers plan with beside the tables. Theirs is the number of tokens before a row that it sees.
        self._shape = {
            "num_qo_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "page_size": block_tokens,
            "window_left": config.sliding_window - 1 if config.sliding_window else -1,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        self._head_dim = config.head_dim
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)  # one pass at a time
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(self._workspace, _LAYOUT, backend=_BACKEND)

    def plan(self, table: PageTable, pages: Tensor) -> Attend:
        """See `Kernel`. The plan holds until the next one."""
        self._prefill.plan(
            _host(table.row_starts),
            _host(table.page_starts),
            pages,
            _host(table.last_lengths),
            head_dim_qk=self._head_dim,
            causal=True,
            **self._shape,
        )
        return self._run_prefill

    def decoder(self, sequences: int, most_pages: int) -> "FlashInferDecoder":
        """See `Kernel`."""

        def numbers(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self._device)

        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            _LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=numbers(sequences + 1),
            paged_kv_indices_buffer=numbers(sequences * most_pages),
            paged_kv_last_page_len_buffer=numbers(sequences),
            backend=_BACKEND,
        )
        return FlashInferDecoder(wrapper, {"head_dim": self._head_dim, **self._shape})

    def _run_prefill(self, queries: Tensor, cache: Tensor) -> Tensor:
        outputs = torch.empty_like(queries)
        self._prefill.run(queries, cache, out=outputs)
        return outputs


class FlashInferDecoder:
    """A `Decoder`: a wrapper that was made for CUDA graphs, and what it plans with."""

    def __init__(self, wrapper: BatchDecodeWithPagedKVCacheWrapper, shape: dict[str, object]) -> None:
        self._wrapper = wrapper
        self._shape = shape

    def update(self, table: PageTable, pages: Tensor) -> None:
        """See `Decoder`."""
        self._wrapper.plan(_host(table.page_starts), pages, _host(table.last_lengths), **self._shape)

    def __call__(self, queries: Tensor, cache: Tensor) -> Tensor:
        """See `Attend`."""
        outputs = torch.empty_like(queries)
        self._wrapper.run(queries, cache, out=outputs)
        return outputs


def _host(numbers: Ints32) -> Tensor:
    """For the planner, which runs on the host: from the device it would have to fetch them."""
    return torch.from_numpy(numbers)
