"""tie-status-probe: the AFM Runtime's health and recycle interface, inside its container.

The probe is the container's critical process: when it exits, the container ends. So a recycle is a drain and an exit.
"""
