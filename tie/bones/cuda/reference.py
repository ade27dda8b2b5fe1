"""Paged attention that gathers pages and calls torch's scaled dot product attention: on any device, in any dtype.

The kernels are compared with it. It is slow: each layer copies all that its sequences hold, and a `ReferenceDecoder`
all that they might.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tie.bones.config import ModelConfig
from tie.bones.cuda.attention import Attend
from tie.bones.cuda.numbers import PageTable


class Reference:
    """A `Kernel`. See `tie.bones.cuda.attention`.

    Args:
        config: of the model.
        block_tokens: tokens of a page.
        device: where.
    """

    def __init__(self, config: ModelConfig, block_tokens: int, device: torch.device) -> None:
        self._config = config
        self._block_tokens = block_tokens
        self._device = device

    def plan(self, table: PageTable, pages: Tensor) -> Attend:
        """See `Kernel`: one call for each sequence."""
        sequences = []
        for index, last in enumerate(table.last_lengths.tolist()):
            first_row, end_row = table.row_starts[index : index + 2].tolist()
            first_page, end_page = table.page_starts[index : index + 2].tolist()
            length = (end_page - first_page - 1) * self._block_tokens + last
            positions = torch.arange(length - (end_row - first_row), length, device=self._device)
            mask = _seen(positions, length, self._config.sliding_window)
            sequences.append((slice(first_row, end_row), pages[first_page:end_page].long(), mask))

        def attend(queries: Tensor, cache: Tensor) -> Tensor:
            outputs = torch.empty_like(queries)
            for rows, blocks, mask in sequences:
                keys, values = _gathered(cache, blocks[None])[..., : mask.shape[-1], :]
                # [1, heads, rows, dim]
                mine = queries[rows].transpose(0, 1)[None]
                out = scaled_dot_product_attention(mine, keys, values, attn_mask=mask, enable_gqa=True)
                outputs[rows] = out[0].transpose(0, 1)
            return outputs

        return attend

    def decoder(self, sequences: int, most_pages: int) -> "ReferenceDecoder":
        """See `Kernel`."""
        return ReferenceDecoder(self._config, sequences, most_pages, self._block_tokens, self._device)


class ReferenceDecoder:
    """A `Decoder`: every table has the longest possible length, and what is not in use is masked.

    Args:
        config: of the model.
        sequences: how many.
        most_pages: of each of them.
        block_tokens: tokens of a page.
        device: where.
    """

    def __init__(
        self, config: ModelConfig, sequences: int, most_pages: int, block_tokens: int, device: torch.device
    ) -> None:
        self._window = config.sliding_window
        self._block_tokens = block_tokens
        self._blocks = torch.zeros(sequences, most_pages, dtype=torch.int64, device=device)
        self._lengths = torch.ones(sequences, dtype=torch.int64, device=device)

    def update(self, table: PageTable, pages: Tensor) -> None:
        """See `Decoder`."""
        for index, last in enumerate(table.last_lengths.tolist()):
            first, end = table.page_starts[index : index + 2].tolist()
            self._blocks[index, : end - first] = pages[first:end]
            self._blocks[index, end - first :] = pages[first]
            self._lengths[index] = (end - first - 1) * self._block_tokens + last

    def __call__(self, queries: Tensor, cache: Tensor) -> Tensor:
        """See `Attend`."""
        gathered = _gathered(cache, self._blocks)
        # [sequences, 1, 1, keys]
        mask = _seen(self._lengths - 1, gathered.shape[-2], self._window)[:, None, None]
        # A former sequence may have left anything behind the last token, and zero times infinity is not a number.
        keys, values = gathered.masked_fill_(~mask.transpose(-1, -2), 0)
        return scaled_dot_product_attention(queries[:, :, None], keys, values, attn_mask=mask, enable_gqa=True)[:, :, 0]


def _gathered(cache: Tensor, blocks: Tensor) -> Tensor:
    """Keys and values, `[2, sequences, kv_heads, tokens, dim]`, of `blocks` `[sequences, pages]`."""
    return cache[blocks].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)


def _seen(positions: Tensor, keys: int, window: int | None) -> Tensor:
    """Which keys each position attends to, `[positions, keys]`."""
    before = positions[:, None] - torch.arange(keys, device=positions.device)
    return before >= 0 if window is None else (before >= 0) & (before < window)
