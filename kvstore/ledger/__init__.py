"""The bookkeeping of sessions: which exist, where they are stored, which are pinned or evicted.

When a session's turn ends:

1. the store claims the session (``index``) and hands over a record and new blobs;
2. ``writing`` writes them to the fastest tier (``stack``), the blobs first, the record last;
3. the index lists the session from then on, and counts which blobs it shares with others;
4. ``writing`` copies the blobs and the record to each slower tier, on one thread per tier.

Between turns ``ledger``, which owns all of these, moves, pins and forgets sessions. ``deletions``
repeats deletions until each tier has done them, and ``notices`` reports sessions that expired or
were evicted. On a return ``stack`` finds a good copy of each blob, ``ledger`` promotes it, and
``profiles`` fetches the learned arrays of another server's codec.
"""
