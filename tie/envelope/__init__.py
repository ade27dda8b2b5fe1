"""The sealed request and response between a user's device and a node (format: docs/envelope.md)."""
