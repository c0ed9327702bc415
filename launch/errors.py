"""The errors of a command that cannot be carried out.

LaunchError      its message is one sentence with the remedy; the command ends with exit code 1
+-- UsageError   the user asked for something that does not exist; exit code 2
"""

from __future__ import annotations


class LaunchError(Exception):
    pass


class UsageError(LaunchError):
    pass
