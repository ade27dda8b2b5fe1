"""What every daemon shares: configuration, logs, RPC, life cycle, errors."""
