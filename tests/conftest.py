"""For all tests: property tests have no deadline per example, for no test may depend on how busy the machine is."""

from hypothesis import settings

settings.register_profile("tie", deadline=None)
settings.load_profile("tie")
