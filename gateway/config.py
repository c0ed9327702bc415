"""Settings of the HTTP side. Frozen; composed and read from the environment only by ``launch``."""

from __future__ import annotations

import ipaddress
from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.keys import Limits, read_numbers

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]

ANY_MODEL = "*"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The gateway's address, its callers, and the limits in bytes and seconds that it sets."""

    host: str = "127.0.0.1"
    port: Port = 8080  # 0 = any free one
    # Lines "tenant:sha256 of the key in hex"; ``thermocline keys new`` makes them. Without any line
    # no key is needed, and every caller is the one tenant "local".
    api_keys: tuple[str, ...] = ()
    api_keys_file: str = ""
    # Keys of the same form that see and manage all tenants; they are no callers of /v1 otherwise
    # than as the tenant that their line names.
    admin_keys: tuple[str, ...] = ()
    admin_keys_file: str = ""
    # A header that names the user for whom a key's holder asks, such as X-OpenWebUI-User-Id: each
    # is a tenant of its own within the key, TENANT/USER. "" = none. Whoever has a key can name any
    # user of that key, so it is for servers whose callers are trusted to tell their users apart.
    trust_user_header: Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9-]{1,64})?$")] = ""
    # "" = admins use the same address as all others. Else they have this one, HOST:PORT, and no
    # caller is an admin anywhere else.
    admin_address: Annotated[str, msgspec.Meta(pattern=r"^([^\s:]+:[1-9]\d{0,4})?$")] = ""
    # A unix socket (0600) besides: a process that may open it is an admin, without a key. "" =
    # none.
    admin_socket: str = ""
    # Names that the Host header may have. (): on loopback the loopback names; elsewhere any name if
    # keys are needed, else addresses and names without a dot. Otherwise a page in a browser could
    # reach this server under a name of the page's own (DNS rebinding).
    allowed_hosts: tuple[str, ...] = ()
    # Web origins whose pages may call, besides this server's own, such as https://ui.example.
    allowed_origins: tuple[
        Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9+.-]*://[^/\s]+$")], ...
    ] = ()
    # "auto": open on loopback or if no key is needed anywhere, else a key is needed.
    metrics_access: Literal["auto", "open", "key"] = "auto"
    # Further names for the served model, for clients whose model name cannot be changed; "*" = any.
    model_aliases: tuple[str, ...] = ()
    # The length of a chat's answer, in tokens, where its request names none; 0 = as the context has
    # room. Small models may never come to an end by themselves.
    default_max_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    # What each key may take whose line says nothing else, in the words of such a line:
    # "requests_per_minute=60 sessions=100"; see ``keys.Limits``. "" = any number of all.
    key_limits: str = ""
    # Show sessions by the first words of their users, to their tenant and to admins; these words
    # are kept in this process only, and go with their session.
    session_titles: bool = False
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1024, le=1 << 30)] = 8 << 20
    # Networks of proxies, which speak for many clients: only the total is for their connections.
    trusted_proxies: tuple[str, ...] = ("127.0.0.0/8", "::1/128")
    # Let an engine that sees images fetch them from the addresses that clients name. It can reach
    # every host that its machine can; vLLM's --allowed-media-domains limits which servers it may
    # ask.
    remote_images: bool = False
    # Where spans of turns are sent, such as http://localhost:4318/v1/traces; "" = nowhere. It needs
    # the extra ``otlp``.
    otlp_endpoint: Annotated[str, msgspec.Meta(pattern=r"^(https?://\S+)?$")] = ""
    # Write the reasoning of earlier turns into prompts, if the template has a switch for that.
    keep_reasoning: bool = False
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    # Responses, conversations and chat completions that clients have stored, for each tenant; those
    # that were not used for longest go first. 0 bytes: nothing is stored.
    stored_bytes: Annotated[int, msgspec.Meta(ge=0)] = 256 << 20
    stored_days: Annotated[float, msgspec.Meta(gt=0)] = 30.0  # since the last use

    # No settings: one value serves everybody. Tests have others, in a subclass.
    #
    # Bytes of all bodies together, from their first byte until their turn is called; beyond it 503.
    # One tenant's have at most three quarters of it. Sixteen of the largest that are usual.
    max_bodies_bytes: ClassVar[int] = 128 << 20
    # Open at once; 0 = what the limit of open files leaves, at most MAX_CONNECTIONS.
    max_connections: ClassVar[int] = 0
    # Of IPv6 a /64. Far more than a browser or an agent opens; a proxy is named as one.
    max_connections_per_address: ClassVar[int] = 512
    # For the head and for the body of a request, each; for a head at most HEAD_TIMEOUT_S. 8 MiB
    # come in this time over a line of 1.2 Mbit/s.
    body_timeout_s: ClassVar[float] = 60.0
    # Longer than the minute for which balancers keep a connection: they, not we, end it first.
    keep_alive_s: ClassVar[int] = 65
    request_timeout_s: ClassVar[float] = 3600.0  # the whole answer, as balancers' examples have it
    client_stall_s: ClassVar[float] = 120.0  # a reader that takes nothing for this long is cut
    # Clients give up on streams that show nothing: Claude Code warns after 20 s, so that two of
    # these fit. Anthropic's get a ping after this long, others a comment while a model is loaded.
    sign_of_life_s: ClassVar[float] = 8.0
    # How long a request waits for an engine that died and is being started again: a small model is
    # back by then.
    engine_wait_s: ClassVar[float] = 30.0

    def means_served(self, name: str, served: str) -> bool:
        """Say whether ``name`` means the model that is served as ``served``."""
        return name == served or name in self.model_aliases or ANY_MODEL in self.model_aliases

    @property
    def usual_limits(self) -> Limits:
        """The limits of keys whose lines say nothing else."""
        return Limits(**read_numbers(self.key_limits, Limits._fields))

    def __post_init__(self) -> None:
        _ = self.usual_limits  # ValueError gives the reason, as below
        for network in self.trusted_proxies:
            ipaddress.ip_network(network)  # ValueError gives the reason

    @property
    def admin_host(self) -> str:
        return self.admin_address.partition(":")[0]

    @property
    def admin_port(self) -> int:
        """The admins' own port; 0 if they have none."""
        return int(self.admin_address.partition(":")[2] or 0)

    @property
    def on_loopback(self) -> bool:
        return self.host in LOOPBACK

    def is_admin_socket(self, server: tuple[str, int | None] | None) -> bool:
        """Say whether ``server``, as ASGI names an address, is the admins' unix socket."""
        path, port = server or ("", 0)
        return bool(path) and (path, port) == (self.admin_socket, None)

    def is_for_admins(self, server: tuple[str, int | None] | None) -> bool:
        """Say whether ``server`` is an address of the admins alone, their socket or port."""
        port = server[1] if server else None
        return self.is_admin_socket(server) or (bool(port) and port == self.admin_port)
