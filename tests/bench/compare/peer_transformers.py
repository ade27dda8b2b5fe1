"""Hugging Face transformers: the dequantized weights in bfloat16, `generate` with its own cache."""

import time
from collections.abc import Sequence

import torch
import transformers
from measuring import Heard, job, report


def main() -> None:
    asked = job()
    torch.set_num_threads(asked["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(asked["hf"], dtype=torch.bfloat16).eval()

    def generate(prompts: Sequence[Sequence[int]], tokens: int, heard: Heard) -> None:
        def come(ids: torch.Tensor, _scores: object, **_others: object) -> torch.Tensor:
            for prompt in range(len(ids)):
                heard(prompt, time.perf_counter(), 1)
            return torch.zeros(len(ids), dtype=torch.bool)  # whether to stop

        ids = torch.tensor([list(prompt) for prompt in prompts])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[come],
            )

    report(f"transformers {transformers.__version__}, bf16", asked, generate)


if __name__ == "__main__":
    main()
