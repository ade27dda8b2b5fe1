"""Model bundles: manifest, weights readers, tokenizer, chat template."""
