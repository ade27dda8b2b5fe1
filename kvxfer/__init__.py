"""kvxfer: buffers in shared memory and the channel that passes them between processes.

Stands alone: imports nothing of the suite.
"""
