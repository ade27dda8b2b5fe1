"""tie-model-owner: holds the weights so that a restart of the runtime costs seconds."""
