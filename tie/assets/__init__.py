"""Model bundles: weights, tokenizer, chat template and registered system prompts, with hashes.

`manifest`, `bundle`, `tokenizer` and `chat` are imported by every per-request process and stay light. What needs NumPy
(`tensors`, `gguf_reader`, `safetensors_reader`, `build`, `sample`) is for those who make bundles and the model owner.
"""
