"""The settings of the gateway. Only ``launch`` composes them and reads the environment."""

from __future__ import annotations

import ipaddress
from typing import Annotated, ClassVar, Literal

import msgspec

from gateway.keys import Limits, read_numbers

MOST_PORT = 65535
Port = Annotated[int, msgspec.Meta(ge=0, le=MOST_PORT)]

ANY_MODEL = "*"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The gateway's address, the keys of its callers, and its limits in bytes and seconds."""

    host: str = "127.0.0.1"
    port: Port = 8080  # 0 = any free one
    # Lines "tenant:sha256 of the key in hex"; ``thermocline keys new`` makes them. Without any line
    # no key is needed, and all callers are one tenant, "local".
    api_keys: tuple[str, ...] = ()
    api_keys_file: str = ""
    # Keys of the same form whose holders see and manage all tenants. At /v1 such a caller is the
    # tenant that its line names.
    admin_keys: tuple[str, ...] = ()
    admin_keys_file: str = ""
    # A header that names the user for whom a key's holder asks, such as X-OpenWebUI-User-Id: each
    # user is a tenant of its own, TENANT/USER. "" = none. The holder of a key can name any user of
    # that key, so set this only if you trust your callers to name the right user.
    trust_user_header: Annotated[
        str, msgspec.Meta(pattern=r"^([A-Za-z0-9-]{1,64})?$", examples=["X-OpenWebUI-User-Id"])
    ] = ""
    # HOST:PORT of the admins' own address; no caller is an admin at any other. "" = admins use the
    # same address as all other callers.
    admin_address: Annotated[
        str, msgspec.Meta(pattern=r"^([^\s:]+:[1-9]\d{0,4})?$", examples=["127.0.0.1:9000"])
    ] = ""
    # A unix socket (0600) for admins: a process that may open it is an admin, without a key. "" =
    # none.
    admin_socket: str = ""
    # Names that the Host header may have, against DNS rebinding: a web page could otherwise reach
    # this server under the page's own name. (): on loopback the loopback names; elsewhere any name
    # if keys are needed, else addresses and names without a dot.
    allowed_hosts: tuple[str, ...] = ()
    # Web origins whose pages may call, besides this server's own, such as https://ui.example.
    allowed_origins: tuple[
        Annotated[
            str,
            msgspec.Meta(pattern=r"^[a-z][a-z0-9+.-]*://[^/\s]+$", examples=["https://ui.example"]),
        ],
        ...,
    ] = ()
    # "auto": open on loopback or if no key is needed anywhere, else a key is needed.
    metrics_access: Literal["auto", "open", "key"] = "auto"
    # Further names for the served model, for clients whose model name cannot be changed; "*" = any.
    model_aliases: tuple[str, ...] = ()
    # The longest answer of a chat, in tokens, where its request sets no limit; 0 = as long as the
    # context has room. Small models may never end an answer by themselves.
    default_max_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    # The limits of each key whose own line sets none, in the form of such a line:
    # "requests_per_minute=60 sessions=100"; see ``keys.Limits``. "" = no limits.
    key_limits: str = ""
    # Show each session with the first words of its user, to its tenant and to admins. The words
    # are kept in this process only, as long as the session.
    session_titles: bool = False
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1024, le=1 << 30)] = 8 << 20
    # Networks of proxies, which speak for many clients: their connections are limited only in
    # total, not per address.
    trusted_proxies: tuple[str, ...] = ("127.0.0.0/8", "::1/128")
    # Let an engine that sees images fetch them from the URLs that clients name. It can reach every
    # host that its machine can reach; vLLM's --allowed-media-domains limits the servers.
    remote_images: bool = False
    # Where spans of turns are sent, such as http://localhost:4318/v1/traces; "" = nowhere. It needs
    # the extra ``otlp``.
    otlp_endpoint: Annotated[
        str,
        msgspec.Meta(pattern=r"^(https?://\S+)?$", examples=["http://localhost:4318/v1/traces"]),
    ] = ""
    # Write the reasoning of earlier turns into prompts, if the template has a switch for that.
    keep_reasoning: bool = False
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    # Room for each tenant's stored responses, conversations and chat completions; those unused for
    # longest are removed first. 0 bytes: nothing is stored.
    stored_bytes: Annotated[int, msgspec.Meta(ge=0)] = 256 << 20
    stored_days: Annotated[float, msgspec.Meta(gt=0)] = 30.0  # since the last use

    # The following are no settings: one value serves everybody. Tests override them in a subclass.
    #
    # Bytes of all request bodies together, each from its first byte until its engine is called;
    # beyond it 503. One tenant's may take three quarters of it. 16 bodies of ``max_body_bytes``.
    max_bodies_bytes: ClassVar[int] = 128 << 20
    # Connections open at once; 0 = as many as the limit of open files leaves, at most
    # MAX_CONNECTIONS.
    max_connections: ClassVar[int] = 0
    # An IPv6 /64 counts as one address. A browser or an agent opens far fewer; a proxy that needs
    # more belongs in ``trusted_proxies``.
    max_connections_per_address: ClassVar[int] = 512
    # Time for a request's head (at most HEAD_TIMEOUT_S) and again for its body: enough for 8 MiB at
    # 1.2 Mbit/s.
    body_timeout_s: ClassVar[float] = 60.0
    # Longer than the minute that load balancers keep a connection, so that they close it first.
    keep_alive_s: ClassVar[int] = 65
    request_timeout_s: ClassVar[float] = 3600.0  # for a whole answer; load balancers' usual value
    client_stall_s: ClassVar[float] = 120.0  # a client that reads nothing for this long is cut
    # Clients give up on silent streams (Claude Code warns after 20 s, so that two of these fit): a
    # stream in Anthropic's dialect gets a ping after this long, any other gets a comment while its
    # model is loaded.
    sign_of_life_s: ClassVar[float] = 8.0
    # How long a request waits for an engine that died and is being restarted; a small model is
    # ready again by then.
    engine_wait_s: ClassVar[float] = 30.0

    def means_served(self, name: str, served: str) -> bool:
        """Return whether ``name`` is ``served``, a model's own name, or one of the aliases."""
        return name == served or name in self.model_aliases or ANY_MODEL in self.model_aliases

    @property
    def usual_limits(self) -> Limits:
        """The limits of keys whose own lines set none."""
        return Limits(**read_numbers(self.key_limits, Limits._fields))

    def __post_init__(self) -> None:
        try:
            _ = self.usual_limits
        except ValueError as error:
            raise ValueError(f"key_limits holds {error}") from error
        for network in self.trusted_proxies:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(f"trusted_proxies: {error}") from error
        if self.admin_port > MOST_PORT:
            raise ValueError(
                f"admin_address: {self.admin_port} is no port; they end at {MOST_PORT}"
            )

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
        """Return whether ``server``, of an ASGI scope, is the admins' unix socket."""
        path, port = server or ("", 0)
        return bool(path) and (path, port) == (self.admin_socket, None)

    def is_for_admins(self, server: tuple[str, int | None] | None) -> bool:
        """Return whether ``server``, of an ASGI scope, is the admins' own socket or port."""
        port = server[1] if server else None
        return self.is_admin_socket(server) or (bool(port) and port == self.admin_port)
