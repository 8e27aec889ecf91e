"""For all unit tests: a property may take as long as the machine needs, since a busy one is no wrong one."""

from hypothesis import settings

settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
