"""gpuhealthd: the controller's source of truth about the GPUs."""
