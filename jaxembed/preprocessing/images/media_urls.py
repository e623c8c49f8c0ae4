"""Decides which media URLs may be fetched, and from which addresses. Opens no connection.

The rules prevent server-side request forgery: a client must not use the server to reach what only
the server can reach.
"""

import re
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from urllib.parse import quote, urljoin, urlsplit

from jaxembed.errors import ConfigError, MediaUrlError
from jaxembed.preprocessing.images.media import excerpt

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

URLS_FLAG = "--allow-media-urls"
NETWORK_FLAG = "--allow-media-network"
WEB_PORTS = (80, 443)
LONGEST_URL = 8192  # characters
_DEFAULT_PORTS = {"http": 80, "https": 443}

# Control characters, blanks and backslashes: URL parsers interpret them in different ways.
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")
_AUTHORITY = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^][:@%]+))(?::(?P<port>[0-9]{1,5}))?"
)
_NAME = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_NUMERIC = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)")  # names that some resolvers read as addresses

_GLOBAL_V6 = ip_network("2000::/3")  # all IPv6 networks that are assigned as global unicast
# Networks that are not public, from IANA's special-purpose registries and from clouds. Python's
# `is_global` is not enough: it differs between versions, and is true for multicast, 192.0.0.9 and
# IPv4 addresses inside IPv6.
_NOT_PUBLIC = [
    ip_network(network)
    for network in (
        "100.64.0.0/10",  # shared by customers of a provider, and of clouds for metadata
        "168.63.129.16/32",  # Azure's host of a virtual machine
        "192.0.0.0/24",  # protocol assignments, and Oracle's metadata
        "192.88.99.0/24",  # relays of 6to4
        "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: an IPv4 address inside
        "3fff::/20",  # documentation
    )
]

# NETWORK_FLAG may allow networks within these ranges. IPv6 ranges that embed IPv4 addresses are not
# among them, because they contain the metadata addresses in another form.
_NAMEABLE = [
    ip_network(network)
    for network in (
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",  # shared address space, which some clouds use for pods
        "127.0.0.0/8",
        "169.254.0.0/16",
        "::1/128",
        "fc00::/7",
    )
]
# Addresses at which clouds give credentials to any process of the machine. NETWORK_FLAG allows such
# an address only by a network of this single address.
_METADATA = frozenset(
    ip_address(address)
    for address in (
        "169.254.169.254",  # most clouds
        "169.254.170.2",  # Amazon's credentials of a container
        "169.254.170.23",  # Amazon's credentials of a pod
        "169.254.0.23",  # Tencent
        "100.100.100.200",  # Alibaba
        "fd00:ec2::254",  # Amazon
        "fd00:ec2::23",  # Amazon's credentials of a pod
        "fd20:ce::254",  # Google
        "fd00:c1::a9fe:a9fe",  # Oracle
    )
)


def parse_media_network(text: str) -> Network:
    """Parse a network that media may be fetched from, such as 10.1.0.0/16. An address without a
    prefix length is a network of one address.

    Raises ConfigError if the text is not a network, or is a network outside the private, shared,
    loopback and link-local ranges.
    """
    try:
        network = ip_network(text)
    except ValueError as error:
        raise ConfigError(
            f"{NETWORK_FLAG} {text!r} is not a network ({error}); expected a CIDR such as "
            "10.1.0.0/16 or fd12:3456::/32"
        ) from error
    allowed = [wide for wide in _NAMEABLE if wide.version == network.version]
    if not any(network.subnet_of(wide) for wide in allowed):  # pyright: ignore[reportArgumentType]
        ranges = ", ".join(map(str, _NAMEABLE))
        raise ConfigError(
            f"{NETWORK_FLAG} {text} is not within one of {ranges}; public addresses need no flag, "
            "and others are never fetched from"
        )
    return network


class AllowedAddresses:
    """Decides which addresses media may be fetched from: public addresses, and the addresses in
    `networks`, which are results of `parse_media_network`.

    A cloud's metadata address, which gives credentials, is allowed only by a network of this single
    address.
    """

    def __init__(self, networks: Sequence[Network] = ()):
        self._networks = tuple(networks)

    def __call__(self, address: Address) -> bool:
        """Return whether the address is allowed. IPv4 mapped into IPv6 is judged as IPv4."""
        address = unmapped(address)
        if is_public_address(address):
            return True
        if isinstance(address, IPv6Address) and address.scope_id:
            return False
        containing = [network for network in self._networks if address in network]
        if address in _METADATA:
            return any(network.num_addresses == 1 for network in containing)
        return bool(containing)


def is_public_address(address: Address) -> bool:
    """Return whether an address is on the public internet, where anybody may connect to it.

    Private, shared, loopback, link-local, multicast, reserved and unspecified addresses are not
    public. IPv6 addresses that embed an IPv4 address (NAT64, 6to4, Teredo) are not public either,
    but a NAT64 prefix that an operator chose is not recognized. An IPv4 address that is mapped into
    IPv6 is judged as IPv4.
    """
    address = unmapped(address)
    if isinstance(address, IPv6Address) and (address not in _GLOBAL_V6 or address.scope_id):
        return False
    is_special = address.is_multicast or any(address in network for network in _NOT_PUBLIC)
    return address.is_global and not is_special


def unmapped(address: Address) -> Address:
    """Return the IPv4 address if `address` is an IPv4 address mapped into IPv6 (::ffff:0:0/96), and
    `address` itself if not."""
    return getattr(address, "ipv4_mapped", None) or address


@dataclass(frozen=True)
class MediaUrl:
    """A parsed URL of http or https.

    `host` is a name in lower-case ASCII without a dot at the end, or an address in canonical form.
    `address` is the parsed address, or None if the host is a name. `target` is the path and query
    as in an HTTP request line.
    """

    scheme: str
    host: str
    port: int
    target: str
    address: Address | None

    @property
    def authority(self) -> str:
        """The value of the Host header: the host, and the port unless it is the default."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def text(self) -> str:
        """The whole URL, without a fragment."""
        return f"{self.scheme}://{self.authority}{self.target}"


def parse_media_url(text: str, source: str | None = None, base: MediaUrl | None = None) -> MediaUrl:
    """Parse a URL. A URL without a scheme or a host is relative to `base`.

    `source` is what messages call the URL; by default they quote it.

    Raises MediaUrlError if the URL is too long or malformed, is not of http or https, has a user
    name or password, or has a host that is neither a name nor an address in canonical form.
    """
    source = source or excerpt(text)
    if len(text) > LONGEST_URL:
        raise MediaUrlError(source, f"it is longer than {LONGEST_URL} characters")
    if _UNSAFE.search(text):
        raise MediaUrlError(source, "it has a blank, a control character or a backslash")
    try:
        parts = urlsplit(text if base is None else urljoin(base.text, text))
        # percent-encode the characters that are not ASCII
        path, query = (quote(part, safe=string.punctuation) for part in (parts.path, parts.query))
    except ValueError as error:
        raise MediaUrlError(source, "it is not a URL") from error
    if parts.scheme not in _DEFAULT_PORTS:
        raise MediaUrlError(source, "expected http:// or https://")
    if "@" in parts.netloc:
        unquoted = "the URL" if base is None else source  # a quote would repeat the password
        raise MediaUrlError(unquoted, "it has a user name or password; send it without")
    host, port, address = _host_of(parts.netloc, source)
    target = f"{path or '/'}?{query}" if query else path or "/"
    return MediaUrl(parts.scheme, host, port or _DEFAULT_PORTS[parts.scheme], target, address)


class AllowedHosts:
    """The hosts and ports that media may be fetched from.

    A host is a name, an address, or `*.suffix`: all names that end in `.suffix`, but not `suffix`
    itself. `host:port` allows only this port of a host; a host without a port allows `ports`.
    """

    def __init__(self, hosts: Sequence[str], ports: Collection[int] = WEB_PORTS):
        """Parse `hosts`, such as "example.com:8443" or "*.example.com". Raises ConfigError for a
        text that is not a host."""
        self._ports = tuple(ports)
        self._rules: list[tuple[str, int | None]] = []  # name, address or *.suffix; port if given
        for text in hosts:
            expected = "expected a host, *.suffix or an address, with or without :port"
            name = text.removeprefix("*.")
            try:
                is_bare = name.count(":") > 1 and name[0] != "["  # IPv6 without brackets
                authority = f"[{ip_address(name)}]" if is_bare else name
                host, port, address = _host_of(authority, name)
            except (MediaUrlError, ValueError) as error:
                raise ConfigError(f"{URLS_FLAG} {text!r} is not a host; {expected}") from error
            if name != text and address is not None:
                raise ConfigError(f"{URLS_FLAG} {text!r} has an address as its suffix; {expected}")
            self._rules.append((host if name == text else f"*.{host}", port))

    def check(self, url: MediaUrl, source: str) -> None:
        """Raise MediaUrlError if the URL's host or port is not allowed. `source` is what the
        message calls the URL."""
        if not self._rules:
            raise MediaUrlError(
                source,
                f"this server does not fetch URLs; {URLS_FLAG} allows it for the hosts it names",
            )
        is_name = url.address is None
        named_ports = [  # the ports of the rules for this host; None for a rule without a port
            port
            for pattern, port in self._rules
            if url.host == pattern
            or (is_name and pattern.startswith("*.") and url.host.endswith(pattern[1:]))
        ]
        if not named_ports:
            raise MediaUrlError(source, f"its host is not one of those that {URLS_FLAG} allows")
        if url.port not in {p for port in named_ports for p in ([port] if port else self._ports)}:
            usual = " and ".join(map(str, self._ports))
            raise MediaUrlError(
                source,
                f"its port is not allowed: {URLS_FLAG} allows, for each host, ports {usual}, or "
                "instead the one that it names after the host",
            )


def _host_of(authority: str, source: str) -> tuple[str, int | None, Address | None]:
    """Parse an authority, `host[:port]`. Returns the host, the port (None if there is none), and
    the address (None if the host is a name).

    Raises MediaUrlError if the port is malformed, or if the host is neither a name nor an address
    in canonical form. `source` is what the message calls the URL.
    """
    match = _AUTHORITY.fullmatch(authority.removesuffix(":"))  # RFC 3986: a port may be empty
    port = int(match["port"]) if match and match["port"] else None
    if match is None or (port is not None and not 0 < port < 2**16):
        raise MediaUrlError(source, "its host or port is malformed")
    try:
        if match["v6"]:
            address = IPv6Address(match["v6"])
            return str(address), port, address
        name = match["name"]
        if len(name) > 254:  # check this first, because Python's IDNA takes quadratic time
            raise ValueError("too long")
        name = name.encode("idna").decode("ascii").lower().removesuffix(".")  # RFC 3490
        if len(name) > 253 or not _NAME.fullmatch(name):
            raise ValueError("no name")
    except ValueError as error:  # UnicodeError is a ValueError
        raise MediaUrlError(source, "its host is neither a name nor an address") from error
    if not _NUMERIC.fullmatch(name):
        return name, port, None
    try:
        return name, port, IPv4Address(name)
    except ValueError as error:
        raise MediaUrlError(
            source, "its host is a number; expected a name, or an address such as 1.2.3.4"
        ) from error
