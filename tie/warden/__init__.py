"""EnsembleWarden: the keys of cached conversations, and the sealed entries that only they open. docs/warden.md."""
