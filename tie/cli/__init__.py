"""The `tie` command."""
