"""llama.cpp through llama-cpp-python's low-level interface: the GGUF as it is, all sequences in one batch.

The high-level class of the package runs one sequence at a time, so the batch is made here, as llama.cpp's own
`batched-bench` makes it.
"""

from collections.abc import Sequence

import llama_cpp as llama
import numpy as np
from measuring import job, report

_UBATCH = 512


class Batched:
    """A model with room for so many sequences of so many tokens."""

    def __init__(self, path: str, threads: int, sequences: int, tokens: int) -> None:
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx = sequences * tokens
        params.n_batch = max(sequences * tokens, _UBATCH)
        params.n_ubatch = _UBATCH
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._model or not self._context:
            raise SystemExit("llama.cpp does not take the model")
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(params.n_batch, 0, 1)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> int:
        """See `measuring.Generate`."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        newest = self._decode(rows)
        for step in range(1, tokens):
            length = len(prompts[0]) + step - 1
            newest = self._decode([(token, length, sequence, True) for sequence, token in enumerate(newest)])
        return tokens * len(prompts)

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


def main() -> None:
    asked = job()
    longest = max(len(asked["prompts"][0]) + asked["max_tokens"], len(asked["long_prompt"]) + 1)
    model = Batched(asked["gguf"], asked["threads"], max(asked["streams"]), longest)
    report(f"llama.cpp ({llama.__version__} of its package)", asked, model.generate)


if __name__ == "__main__":
    main()
