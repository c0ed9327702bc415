"""The keys of stored objects on a Redis server. Those of a tenant lie in one slot of a cluster.

thermocline:stored:2:{tenant}:entry:KIND:ID   head, body, session and number of an entry
                             :items:KIND:ID   its items by id
                             :order:KIND:ID   their ids in order
                             :list:KIND:TAG   ids of the entries with a tag, by number
                             :tags            the tags of each entry by "KIND:ID"
                             :used            "KIND:ID" by the time of last use; 0: deleted
                             :session:ID      "KIND:ID" of a session's entries by number
                             :owner:ITEM      "KIND:ID" of the entries that have an item
                             :sizes, :total   bytes of each entry by "KIND:ID", and of all
                             :seq             the last number
"""

from __future__ import annotations

_SPACE = "thermocline:stored:2"
OLDER = "thermocline:stored:{*"  # pattern of the keys of releases that sealed nothing

# A script that notes in each of several owner keys who has an item, until when: one command, where
# two for each item take long.
OWN = """
for _, key in ipairs(KEYS) do
    redis.call("ZADD", key, ARGV[1], ARGV[2])
    redis.call("PEXPIRE", key, ARGV[3])
end
"""


class Keys:
    """The names of one tenant's keys."""

    def __init__(self, tenant: str) -> None:
        self._prefix = f"{_SPACE}:{{{tenant}}}"
        self.used = f"{self._prefix}:used"
        self.total = f"{self._prefix}:total"
        self.sizes = f"{self._prefix}:sizes"
        self.tags = f"{self._prefix}:tags"
        self.seq = f"{self._prefix}:seq"

    def entry(self, name: str) -> str:
        return f"{self._prefix}:entry:{name}"

    def items(self, name: str) -> str:
        return f"{self._prefix}:items:{name}"

    def order(self, name: str) -> str:
        return f"{self._prefix}:order:{name}"

    def list(self, kind: str, tag: bytes) -> str:
        return f"{self._prefix}:list:{kind}:{tag.hex()}"

    def session(self, session: str) -> str:
        return f"{self._prefix}:session:{session}"

    def owner(self, item: str) -> str:
        return f"{self._prefix}:owner:{item}"


def text(said: bytes) -> str:
    """Read an id; what is none becomes one that nothing has."""
    return said.decode(errors="replace")


def split(name: str) -> tuple[str, str]:
    kind, _, id = name.partition(":")
    return kind, id
