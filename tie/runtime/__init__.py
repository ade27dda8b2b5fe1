"""The AFM Runtime: Triton's Python backend, scheduler, KV blocks, stops."""
