"""The contracts between processes, and their generated stubs."""
