"""tie-status-probe: the runtime's health and recycle interface."""
