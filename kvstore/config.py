"""Settings of the cold store. Frozen; read from the environment only by ``launch``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

import msgspec

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]

# The value of ``codec`` that chooses the densest preset that stays within the bound on this model
# and restores quickly.
AUTO: Final = "auto"


class StoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the cold store: the tiers and their budgets, the codecs, the limits.

    A tier with a budget of zero bytes is off. Redis is used when ``redis_url`` is given.
    """

    codec: str = AUTO
    # Modules that register custom codecs (``thermocline.register``), imported by name before any
    # codec is looked up, here and in engines.
    codec_modules: tuple[str, ...] = ()
    # A lossy codec is used only if it was measured on this very model and stayed within this bound:
    # KL of the next token, in nats, against the exact cache. See ``quality``.
    max_kl: Annotated[float, msgspec.Meta(ge=0)] = 0.01
    # Use the named codec even if it was not measured or is out of bounds.
    accept_loss: bool = False
    # Measure a model that was not measured yet, at its first start, while it serves.
    calibrate: bool = True
    # After that, continue to learn from more texts in idle moments. It takes minutes of idle time
    # and gives fewer bits or less loss.
    learn_on: bool = True
    ram_bytes: NonNegative = 2 << 30
    disk_bytes: NonNegative = 16 << 30
    # A file of random bytes. Data that leaves this process is sealed with it, and data that comes
    # back is trusted only by its seal. "" = not sealed; ``launch`` fills in the server's secret.
    secret_file: str = ""
    encrypt: bool = False  # also hide the content of data that leaves this process
    disk_path: str = ""  # "" = the cache folder that launch chooses
    redis_url: str = ""
    redis_deadline_s: PositiveSeconds = 2.0  # a call that takes longer counts as a miss
    # Bytes of hot KV that may wait for the codec; a save that exceeds it is skipped and counted.
    # On vLLM as many packed bytes may wait to be loaded; requests that exceed it wait in line. At
    # most a quarter of it is kept there between loads as memory to unpack into.
    save_queue_bytes: NonNegative = 1 << 30
    # Memory for the list of sessions; beyond it the longest unused are no longer listed.
    index_bytes: NonNegative = 256 << 20
    # A session that was not used for this long is dropped from every tier. 0 = never.
    ttl_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    # The rest are constants, since one value suits all servers. Tests override them in a subclass.
    #
    # A restore that takes longer is given up for a prefill.
    restore_deadline_s: ClassVar[float] = 20.0
    num_threads: ClassVar[int] = 0  # of the codec; 0 = cores - 1, at most 4
    # For ``auto``: a restore from the fastest tier may take this share of the prefill it saves, so
    # that a return waits much less than a first turn.
    restore_share: ClassVar[float] = 0.1
    # Blobs in Redis expire this long after they were last used, or after ``ttl_s`` if that is less.
    # Long enough for a session to return after a weekend, and the blobs of an engine that never
    # comes back are removed in the end.
    redis_ttl_s: ClassVar[float] = 7 * 86400.0
    # Packed bytes that may wait for each slower tier, about what a disk writes in a second. A save
    # that exceeds it skips that tier, is counted, and is delivered later. An empty queue takes a
    # save of any size; so does the queue of ``save_queue_bytes``.
    write_queue_bytes: ClassVar[int] = 256 << 20
