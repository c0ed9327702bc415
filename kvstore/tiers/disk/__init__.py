"""The disk tier: blobs in an LMDB file, in a budget of real file pages and a folder with one owner.

``disk_tier`` implements ``Tier``; ``folder`` owns and verifies the files, ``lmdb_blobs`` lays blobs
out in LMDB, ``call_guard`` keeps ``close`` from unmapping the file under a reader, and ``budget``
computes how many bytes of blobs a file holds.
"""
