"""Sessions as ordered blob keys: which there are, where they rest, who is pinned, who leaves.

One for both kinds of store. A session's turn ends:

1. the store claims the session (``claims``) and hands over a record and new blobs;
2. ``committer`` writes them to the fastest tier (``stack``), blobs first, the record last;
3. ``index`` knows the session from then on, and which blobs it shares with others;
4. ``write_behind`` brings both to each slower tier, on a thread of its own.

Between turns ``upkeep`` moves, pins (``pins``) and forgets sessions, and reports those that ran
out or were evicted (``eviction_notices``). On return ``reading`` finds a good copy of each blob and
brings it near. ``ledger`` holds all of them.
"""
