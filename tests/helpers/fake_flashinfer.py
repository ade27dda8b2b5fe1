"""flashinfer's two wrappers on the CPU, as their documentation describes them, for what stands in front of them.

https://docs.flashinfer.ai/api/attention.html: page tables in compressed rows, `HND` pages, a causal mask that is
aligned to the end of each sequence, a window that counts the tokens to the left; in graph mode the tables are copied
into the buffers that the caller gave, and a run reads nothing else.
"""

import torch


class _Wrapper:
    def __init__(self, workspace, layout):
        assert layout == "HND"
        assert workspace.dtype == torch.uint8
        assert not workspace.any()

    def _planned(self, shape, window, dtypes):
        heads, kv_heads, _, _ = shape
        assert heads % kv_heads == 0
        self._shape = shape
        self._window = window
        self._dtypes = dtypes

    def _attend(self, queries, cache, tables, out):
        row_starts, page_starts, pages, last = tables
        heads, kv_heads, dim, page = self._shape
        assert (queries.dtype, cache.dtype) == self._dtypes
        assert queries.shape[1:] == (heads, dim)
        assert cache.shape[1:] == (2, kv_heads, page, dim)
        assert queries.is_contiguous()
        assert cache.stride(-1) == 1
        assert len(queries) == row_starts[-1]
        assert len(pages) == page_starts[-1]
        for index in range(len(last)):
            rows = slice(int(row_starts[index]), int(row_starts[index + 1]))
            mine = pages[int(page_starts[index]) : int(page_starts[index + 1])].long()
            length = (len(mine) - 1) * page + int(last[index])
            assert 0 < int(last[index]) <= page
            # [2, kv_heads, tokens, dim], each key head as often as it has query heads
            both = cache[mine].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
            keys, values = both.repeat_interleave(heads // kv_heads, 1)
            count = rows.stop - rows.start
            scores = queries[rows].float().transpose(0, 1) @ keys.transpose(-1, -2) * dim**-0.5
            before = torch.arange(length - count, length)[:, None] - torch.arange(length)
            hidden = before < 0
            if self._window >= 0:
                hidden |= before > self._window
            scores.masked_fill_(hidden, -torch.inf)
            out[rows] = (scores.softmax(-1) @ values).transpose(0, 1).to(out.dtype)
        return out


def _tables(*tables):
    assert all(table.dtype == torch.int32 for table in tables)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        super().__init__(float_workspace_buffer, kv_layout)
        assert backend == "fa2"

    def plan(  # noqa: PLR0917
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
        num_qo_heads, num_kv_heads, head_dim_qk, page_size, *,
        causal=False, window_left=-1, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        assert causal
        _tables(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._planned(shape, window_left, (q_data_type, kv_data_type))
        self._tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)

    def run(self, q, paged_kv_cache, *, out):
        return self._attend(q, paged_kv_cache, self._tables, out)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False, *,
        paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer, backend="auto",
    ):  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout)
        assert (use_cuda_graph, use_tensor_cores, backend) == (True, True, "fa2")
        assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        self._starts, self._pages, self._last = (
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        _tables(self._starts, self._pages, self._last)

    def plan(  # noqa: PLR0917
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        window_left=-1, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        _tables(indptr, indices, last_page_len)
        assert len(last_page_len) == len(self._last), "the batch size is fixed"
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._planned(shape, window_left, (q_data_type, kv_data_type))
        self._starts.copy_(indptr)
        self._pages[: len(indices)].copy_(indices)
        self._last.copy_(last_page_len)

    def run(self, q, paged_kv_cache, *, out):
        rows = torch.arange(len(self._last) + 1)
        tables = (rows, self._starts, self._pages[: self._starts[-1]], self._last)
        return self._attend(q, paged_kv_cache, tables, out)
