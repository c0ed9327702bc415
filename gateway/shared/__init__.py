"""Sessions of all gateways on one Redis: a row of each, by last use, and deletions.

    {KEY}   names the servers' common secret without revealing it; {TENANT} is a keyed hash

    thermocline:sessions:1:KEY:models                     names of models that have rows
    thermocline:sessions:1:KEY:{TENANT}:index             sorted set: marks of sessions by last use
    thermocline:sessions:1:KEY:{TENANT}:row:MARK          a sealed ``SessionRow``
    thermocline:sessions:1:KEY:{TENANT}:deleted:MARK      a sealed ``Tombstone``
    thermocline:sessions:1:KEY                            channel: a sealed ``Deleted`` for each

A gateway writes a session's row when a turn of it has ended here, and when its tier changes. All
keys of a tenant lie in one slot of a cluster, no key shows a name, and each value has a time to
live. Values are encrypted with AES-256-GCM and bound to their names, so one that was made up,
changed or moved counts as missing. Without Redis each gateway goes on with its own sessions.
"""
