"""Which warnings are no errors in tests that run inside vLLM's environment: those of others.

torch and vLLM warn of themselves while they are imported, in each release of something else. What
lines of ours cause is an error there, too.
"""

from __future__ import annotations

from typing import Final

FOREIGN: Final = r"default:::(?!(engines|gateway|kvstore|launch|scheduler|tests|thermocline)\.)"
