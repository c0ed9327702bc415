"""Sessions as ordered blob keys: which exist, where they are stored, which are pinned or evicted.

When a session's turn ends:

1. the store claims the session (``index``) and hands over a record and new blobs;
2. ``writing`` writes them to the fastest tier (``stack``), blobs first, the record last;
3. the index knows the session from then on, and which blobs it shares with others;
4. ``writing`` brings both to each slower tier, on a thread of its own.

Between turns ``ledger``, which holds all of these, moves, pins and forgets sessions. ``deletions``
are repeated until each tier has answered, and ``notices`` report sessions that expired or were
evicted. On a return ``stack`` finds a good copy of each blob, ``ledger`` promotes it, and
``profiles`` fetches what a codec of another server learned.
"""
