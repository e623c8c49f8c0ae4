"""Decides which URLs of media may be fetched, and from which addresses. Opens no connection.

The rules are those against server-side request forgery: a client must not reach through the server
what only the server can reach.
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

FLAG = "--allow-media-urls"
NETWORK_FLAG = "--allow-media-network"
WEB_PORTS = (80, 443)
LONGEST_URL = 8192  # characters
_DEFAULT_PORTS = {"http": 80, "https": 443}

# Control characters, blanks and backslashes: parsers of URLs differ in what they make of them.
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")
_AUTHORITY = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^][:@%]+))(?::(?P<port>[0-9]{1,5}))?"
)
_NAME = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_NUMERIC = re.compile(r"(.*\.)?([0-9]+|0x[0-9a-f]*)")  # what some resolvers read as an address

# IANA's special-purpose registries and what else is public in form alone. `is_global` differs by
# the version of Python, and is true of multicast, of 192.0.0.9 and of IPv4 inside IPv6.
_GLOBAL_V6 = ip_network("2000::/3")  # all of IPv6 that is assigned as global unicast
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

# The networks in which NETWORK_FLAG may admit addresses. Ranges of IPv6 that hold an IPv4 address
# are missing, because one such network holds metadata addresses in a second form.
_NAMEABLE = [
    ip_network(network)
    for network in (
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",  # shared; some clouds give it to pods
        "127.0.0.0/8",
        "169.254.0.0/16",
        "::1/128",
        "fc00::/7",
    )
]
# Addresses at which clouds give credentials to any process of the machine. A network admits one
# only if it is that one address.
_METADATA = frozenset(
    ip_address(address)
    for address in (
        "169.254.169.254",  # most clouds
        "169.254.170.2",  # Amazon's credentials of a container
        "169.254.170.23",  # and of a pod
        "169.254.0.23",  # Tencent
        "100.100.100.200",  # Alibaba
        "fd00:ec2::254",  # Amazon
        "fd00:ec2::23",  # Amazon's credentials of a pod
        "fd20:ce::254",  # Google
        "fd00:c1::a9fe:a9fe",  # Oracle
    )
)


def parse_media_network(text: str) -> Network:
    """Parse a network whose addresses media may be fetched from, such as 10.1.0.0/16. An address
    without a prefix length is a network of one.

    Raises ConfigError if the text is no network, or one outside the private, shared, loopback and
    link-local ranges.
    """
    try:
        network = ip_network(text)
    except ValueError as error:
        raise ConfigError(
            f"{NETWORK_FLAG} {text!r} is not a network ({error}); expected a CIDR such as "
            "10.1.0.0/16 or fd12:3456::/32"
        ) from error
    alike = [one for one in _NAMEABLE if one.version == network.version]
    if not any(network.subnet_of(one) for one in alike):  # pyright: ignore[reportArgumentType]
        ranges = ", ".join(map(str, _NAMEABLE))
        raise ConfigError(
            f"{NETWORK_FLAG} {text} is not within one of {ranges}; public addresses need no flag, "
            "and others are never fetched from"
        )
    return network


class AllowedAddresses:
    """The addresses that media may be fetched from: public ones, and those of some networks, which
    `parse_media_network` gives.

    A metadata address of a cloud is allowed only by a network of this one address.
    """

    def __init__(self, networks: Sequence[Network] = ()):
        self._networks = tuple(networks)

    def __call__(self, address: Address) -> bool:
        """Whether the address is allowed. IPv4 that is mapped into IPv6 is judged as IPv4."""
        address = unmapped(address)
        if is_public_address(address):
            return True
        if isinstance(address, IPv6Address) and address.scope_id:
            return False
        found = [network for network in self._networks if address in network]
        if address in _METADATA:
            return any(network.num_addresses == 1 for network in found)
        return bool(found)


def is_public_address(address: Address) -> bool:
    """Whether an address is one of the public internet, which anybody may connect to.

    Private, shared, loopback, link-local, multicast, reserved and unspecified ones are not, nor
    IPv6 that holds an IPv4 address (NAT64, 6to4, Teredo). IPv4 that is mapped into IPv6 is judged
    as IPv4. A NAT64 with a prefix of its own cannot be told from other public addresses.
    """
    address = unmapped(address)
    if isinstance(address, IPv6Address) and (address not in _GLOBAL_V6 or address.scope_id):
        return False
    if not address.is_global or address.is_multicast:
        return False
    return not any(address in network for network in _NOT_PUBLIC)


def unmapped(address: Address) -> Address:
    """The IPv4 address if it is mapped into IPv6 (::ffff:0:0/96), else the address itself."""
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped


@dataclass(frozen=True)
class MediaUrl:
    """A URL of http or https, taken apart.

    `host` is a name in lower-case ASCII without a dot at its end, or an address in its canonical
    form, which `address` has too. `target` is the path and query as a request line has them.
    """

    scheme: str
    host: str
    port: int
    target: str
    address: Address | None

    @property
    def authority(self) -> str:
        """The host, and the port unless it is the scheme's own, as the header Host has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def text(self) -> str:
        """The whole URL, without a fragment."""
        return f"{self.scheme}://{self.authority}{self.target}"


def parse_media_url(text: str, source: str | None = None, base: MediaUrl | None = None) -> MediaUrl:
    """Take a URL apart; one without a scheme or a host is relative to `base`.

    `source` stands for the URL in messages; None means to quote it.

    Raises MediaUrlError if it is not of http or https, has a user name or password, or a host that
    is neither a name nor an address in canonical form.
    """
    source = source or excerpt(text)
    if len(text) > LONGEST_URL:
        raise MediaUrlError(source, f"it is longer than {LONGEST_URL} characters")
    if _UNSAFE.search(text):
        raise MediaUrlError(source, "it has a blank, a control character or a backslash")
    try:
        parts = urlsplit(text if base is None else urljoin(base.text, text))
        path, query = (quote(part, safe=string.punctuation) for part in (parts.path, parts.query))
    except ValueError as error:
        raise MediaUrlError(source, "it is no URL") from error
    if parts.scheme not in _DEFAULT_PORTS:
        raise MediaUrlError(source, "wanted http:// or https://")
    if "@" in parts.netloc:
        unquoted = "the URL" if base is None else source  # to quote it would repeat the password
        raise MediaUrlError(unquoted, "it has a user name or password; send it without")
    host, port, address = _host_of(parts.netloc, source)
    target = f"{path or '/'}?{query}" if query else path or "/"
    return MediaUrl(parts.scheme, host, port or _DEFAULT_PORTS[parts.scheme], target, address)


class AllowedHosts:
    """The hosts that media may be fetched from.

    Each is a name, `*.suffix` for all names below a suffix but not the suffix itself, or an
    address; with `:port` it means that port alone, else `ports`.

    Raises ConfigError if one is none of these.
    """

    def __init__(self, hosts: Sequence[str], ports: Collection[int] = WEB_PORTS):
        self._ports = tuple(ports)
        self._rules: list[tuple[str, int | None]] = []  # the pattern of each, and its port if named
        for text in hosts:
            wanted = "wanted a host, *.suffix or an address, with :port or without"
            name = text.removeprefix("*.")
            try:
                is_bare = name.count(":") > 1 and name[0] != "["  # an address of IPv6
                authority = f"[{ip_address(name)}]" if is_bare else name
                host, port, address = _host_of(authority, name)
            except (MediaUrlError, ValueError) as error:
                raise ConfigError(f"{FLAG} of {text!r} names no host; {wanted}") from error
            if name != text and address is not None:
                raise ConfigError(f"{FLAG} of {text!r} has an address as its suffix; {wanted}")
            self._rules.append((host if name == text else f"*.{host}", port))

    def check(self, url: MediaUrl, source: str) -> None:
        """Raise MediaUrlError, which names `source`, unless the URL's host and port are allowed."""
        if not self._rules:
            raise MediaUrlError(
                source, f"this server fetches no URLs; {FLAG} names the hosts it may fetch from"
            )
        is_name = url.address is None
        found = [
            port
            for pattern, port in self._rules
            if url.host == pattern
            or (is_name and pattern.startswith("*.") and url.host.endswith(pattern[1:]))
        ]
        if not found:
            raise MediaUrlError(source, f"its host is none of those that {FLAG} names")
        if url.port not in {one for port in found for one in ([port] if port else self._ports)}:
            usual = " or ".join(map(str, self._ports))
            raise MediaUrlError(
                source, f"its port is not {usual}, nor one that {FLAG} names with its host"
            )


def _host_of(authority: str, source: str) -> tuple[str, int | None, Address | None]:
    """The host, its port and its address, each None where the authority has none.

    Raises MediaUrlError if the host is neither a name nor a canonical address.
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
        if len(name) > 254:  # checked first: Python's IDNA takes quadratic time
            raise ValueError("too long")
        name = name.encode("idna").decode("ascii").lower().removesuffix(".")  # RFC 3490
        if len(name) > 253 or not _NAME.fullmatch(name):
            raise ValueError("no name")
    except ValueError as error:  # UnicodeError is one
        raise MediaUrlError(source, "its host is neither a name nor an address") from error
    if not _NUMERIC.fullmatch(name):
        return name, port, None
    try:
        return name, port, IPv4Address(name)
    except ValueError as error:
        raise MediaUrlError(
            source, "its host is a number; wanted a name, or an address as 1.2.3.4"
        ) from error
