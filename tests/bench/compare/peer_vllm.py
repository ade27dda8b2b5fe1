"""vLLM's CPU build: the dequantized weights in bfloat16, its engine without a server before it."""

import os
import time
from collections.abc import Sequence

from measuring import Heard, job, report


def main() -> None:
    asked = job()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{asked['threads'] - 1}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import vllm  # reads the environment when it is imported

    longest = max(len(task["prompts"][0]) + task["tokens"] + 1 for task in asked["tasks"])
    model = vllm.LLM(
        model=asked["hf"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=longest + 16,
        max_num_seqs=max(len(task["prompts"]) for task in asked["tasks"]),
        enable_prefix_caching=False,  # the same prompts come again in every round
    )

    def generate(prompts: Sequence[Sequence[int]], tokens: int, heard: Heard) -> None:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine, come = model.llm_engine, [0] * len(prompts)
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                number, so_far = int(output.request_id), len(output.outputs[0].token_ids)
                heard(number, time.perf_counter(), so_far - come[number])
                come[number] = so_far

    report(f"vLLM {vllm.__version__}, bf16", asked, generate)


if __name__ == "__main__":
    main()
