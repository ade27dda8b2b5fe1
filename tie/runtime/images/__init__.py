"""Images of requests: from a file's bytes to an array of pixels that the model's encoder takes (docs/images.md)."""
