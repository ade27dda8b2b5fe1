"""llama.cpp through llama-cpp-python's low-level interface: the GGUF as it is, all sequences in one batch.

The high-level class of the package runs one sequence at a time, so the batch is made here, as llama.cpp's own
`batched-bench` makes it. `peer_llama_cpp.py JOB bf16` converts the weights to bfloat16 first.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import llama_cpp as llama
import numpy as np
from measuring import Heard, job, report

_UBATCH = 512


class Batched:
    """A model; with room for as many sequences and tokens as the last call needed."""

    def __init__(self, path: str, threads: int) -> None:
        llama.llama_backend_init()
        self._threads = threads
        self._model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        if not self._model:
            raise SystemExit("llama.cpp does not take the model")
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._room = (0, 0)
        self._context = self._batch = None

    def _make_room(self, sequences: int, tokens: int) -> None:
        if self._room[0] == sequences and self._room[1] >= tokens:
            return
        if self._context:
            llama.llama_batch_free(self._batch)
            llama.llama_free(self._context)
        params = llama.llama_context_default_params()
        params.n_ctx = sequences * tokens
        params.n_batch = max(sequences * tokens, _UBATCH)
        params.n_ubatch = _UBATCH
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self._threads
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp has no room for the context")
        self._batch = llama.llama_batch_init(params.n_batch, 0, 1)
        self._room = (sequences, tokens)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, heard: Heard) -> None:
        """See `measuring.Generate`."""
        self._make_room(len(prompts), len(prompts[0]) + 64 * (tokens // 64 + 1))
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for length in range(len(prompts[0]), len(prompts[0]) + tokens):
            newest = self._decode(rows)
            for sequence in range(len(prompts)):
                heard(sequence, time.perf_counter(), 1)
            rows = [(token, length, sequence, True) for sequence, token in enumerate(newest)]

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Computes rows of (token, position, sequence, wanted); the likeliest token of each wanted row."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wanted
        if code := llama.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode gave {code}")
        return [
            int(np.ctypeslib.as_array(llama.llama_get_logits_ith(self._context, index), (self._vocab,)).argmax())
            for index, row in enumerate(rows)
            if row[3]
        ]


def converted(path: str) -> str:
    """The same weights in bfloat16, in a file beside the original's copy."""
    target = str(Path(sys.argv[1]).with_name("bf16.gguf"))
    if not Path(target).exists():
        params = llama.llama_model_quantize_default_params()
        params.ftype = llama.LLAMA_FTYPE_MOSTLY_BF16
        params.allow_requantize = True
        if llama.llama_model_quantize(path.encode(), target.encode(), params):
            raise SystemExit("llama.cpp cannot convert the model")
    return target


def main() -> None:
    asked = job()
    wide = sys.argv[2:] == ["bf16"]
    model = Batched(converted(asked["gguf"]) if wide else asked["gguf"], asked["threads"])
    report("llama.cpp, bf16" if wide else "llama.cpp, as stored", asked, model.generate)


if __name__ == "__main__":
    main()
