"""`tie install`: puts a node on a machine, or into the image of one, out of the environment that runs it."""
