"""tie-cache-stored, which holds sealed entries that it cannot open, and its client. docs/store.md."""
