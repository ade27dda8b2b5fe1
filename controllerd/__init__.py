"""tie-controllerd: supervises the inference stack and speaks for the node."""
