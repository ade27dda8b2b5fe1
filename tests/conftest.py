"""For all tests: nothing depends on how busy the machine is."""

import os

from hypothesis import settings

# Two OpenMP threads that spin for one another on two busy cores run ten times slower than two that sleep. Read when
# torch is first imported, by a test or by a process that it starts.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# What a test starts with a fork of its own (subprocess's preexec_fn) would run gRPC's threads anew until it is another
# program, and end with them. Read when gRPC is first imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# Property tests have no deadline per example.
settings.register_profile("tie", deadline=None)
settings.load_profile("tie")
