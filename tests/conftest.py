"""What holds for all tests."""

from __future__ import annotations

try:  # vLLM's environment has none
    from hypothesis import settings
except ImportError:
    pass
else:
    # A machine that is busy with something else must not fail a test.
    settings.register_profile("busy machine", deadline=None)
    settings.load_profile("busy machine")
