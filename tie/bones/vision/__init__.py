"""The vision encoder: squares of pixels to vectors that stand in a prompt in the place of tokens."""
