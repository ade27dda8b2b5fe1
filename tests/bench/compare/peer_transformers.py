"""Hugging Face transformers: the dequantized weights in bfloat16, `generate` with its own cache."""

from collections.abc import Sequence

import torch
import transformers
from measuring import job, report


def main() -> None:
    asked = job()
    torch.set_num_threads(asked["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(asked["hf"], dtype=torch.bfloat16).eval()

    def generate(prompts: Sequence[Sequence[int]], tokens: int) -> None:
        ids = torch.tensor([list(prompt) for prompt in prompts])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )

    report(f"transformers {transformers.__version__}, bf16", asked, generate)


if __name__ == "__main__":
    main()
