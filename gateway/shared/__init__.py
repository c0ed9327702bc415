"""Shares sessions between all gateways on one Redis: lists them by last use, and deletes them.

    KEY     identifies the servers' common secret without revealing it; TENANT is a keyed hash

    thermocline:sessions:1:KEY:models                     names of models that have rows
    thermocline:sessions:1:KEY:{TENANT}:index             sorted set: hashes (MARK) by last use
    thermocline:sessions:1:KEY:{TENANT}:row:MARK          a sealed ``SessionRow``
    thermocline:sessions:1:KEY:{TENANT}:deleted:MARK      a sealed ``Tombstone``
    thermocline:sessions:1:KEY                            channel: sealed ``Deleted`` messages

A gateway writes a session's row when a turn of it has ended at this gateway, and when its tier
changes. All keys of a tenant lie in one slot of a cluster, no key shows a name, and each value has
a time to live. Values are encrypted with AES-256-GCM and bound to their keys, so a value that was
forged, changed or moved counts as missing. Without Redis each gateway continues with its own
sessions.
"""
