"""Which URLs of media are allowed, and which addresses are public."""

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxembed.errors import ConfigError, MediaUrlError
from jaxembed.preprocessing.images.media_urls import (
    LONGEST_URL,
    AllowedAddresses,
    AllowedHosts,
    is_public_address,
    parse_media_network,
    parse_media_url,
    unmapped,
)

# Half of them neighbours of networks that are not public.
PUBLIC = """
8.8.8.8 100.63.255.255 100.128.0.1 172.15.0.1 172.32.0.1 192.0.1.1 223.255.255.255
2606:4700:4700::1111 2a00:1450:4001:80b::200e 2001:4860:4860::8888 ::ffff:8.8.8.8
"""
# Of networks; metadata of Alibaba, Azure, most clouds, Oracle, Amazon and Google; translated to
# IPv4, also to addresses that are public.
NOT_PUBLIC = """
0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 127.0.0.1 127.255.255.255 172.16.0.1 172.31.255.255 192.0.0.9
192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255
240.0.0.1 255.255.255.255 :: ::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 100::1 2001:20::1 2001:db8::1
2606:4700::1%2 3fff::1 5f00::1 fc00::1 fe80::1 fe80::1%eth0 fec0::1 ff02::1 ff0e::1
100.100.100.200 168.63.129.16 169.254.169.254 ::ffff:169.254.169.254 192.0.0.192 fd00:ec2::254
fd20:ce::254 ::127.0.0.1 ::8.8.8.8 ::ffff:0:8.8.8.8 64:ff9b::127.0.0.1 64:ff9b::8.8.8.8
64:ff9b:1::8.8.8.8 2001::1 2001:0:808:808:: 2002:7f00:1:: 2002:808:808::1
"""


@pytest.mark.parametrize("address", [*PUBLIC.split(), *NOT_PUBLIC.split()])
def test_which_addresses_are_public(address):
    assert is_public_address(ip_address(address)) == (address in PUBLIC.split())


@given(st.ip_addresses(v=4))
def test_ipv4_is_judged_the_same_when_mapped_into_ipv6(address):
    mapped = ip_address(f"::ffff:{address}")
    assert unmapped(mapped) == unmapped(address) == address
    assert is_public_address(mapped) == is_public_address(address)
    if is_public_address(address):
        assert address.is_global
        assert not address.is_multicast
        assert not address.is_private


# Networks that the operator names


@pytest.mark.parametrize(
    ("networks", "address", "allowed"),
    [
        ([], "10.0.0.1", False),
        (["10.0.0.0/8"], "10.0.0.1", True),
        (["10.0.0.0/8"], "::ffff:10.0.0.1", True),
        (["10.0.0.0/8"], "64:ff9b::10.0.0.1", False),  # NAT64
        (["10.0.0.0/8"], "11.0.0.1", True),  # public
        (["10.0.0.0/8"], "192.168.0.1", False),
        (["10.0.0.0/8"], "127.0.0.1", False),
        (["10.0.0.0/8"], "169.254.169.254", False),
        (["10.0.0.0/8", "192.168.0.0/16"], "192.168.0.1", True),
        (["10.0.0.5"], "10.0.0.5", True),
        (["10.0.0.5"], "10.0.0.6", False),
        (["127.0.0.1"], "127.0.0.1", True),
        (["127.0.0.1"], "0.0.0.0", False),  # which connects to the machine itself, too
        (["fd12:3456::/32"], "fd12:3456::1", True),
        (["fd12:3456::/32"], "fd12:3456::1%2", False),
        (["fd12:3456::/32"], "::ffff:10.0.0.1", False),
        (["169.254.0.0/16"], "169.254.1.1", True),
        (["169.254.0.0/16"], "169.254.169.254", False),  # metadata: only by its own address
        (["169.254.169.254"], "169.254.169.254", True),
        (["169.254.169.254/32"], "::ffff:169.254.169.254", True),
        (["100.64.0.0/10"], "100.64.0.1", True),
        (["100.64.0.0/10"], "100.100.100.200", False),
        (["fc00::/7"], "fd00:ec2::254", False),
        (["fc00::/7"], "fd20:ce::254", False),
        (["fc00::/7"], "fe80::1", False),
    ],
)
def test_a_named_network_admits_its_own_addresses_alone(networks, address, allowed):
    rule = AllowedAddresses([parse_media_network(one) for one in networks])
    assert rule(ip_address(address)) == allowed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10.0.0.1/8", "has host bits set"),
        ("10.0.0.0/33", "is not a network"),
        ("minio.internal", "is not a network"),
        ("", "is not a network"),
        ("10.0.0.0/8,192.168.0.0/16", "is not a network"),
        ("0.0.0.0/0", "is not within one of 10.0.0.0/8"),
        ("::/0", "is not within one of"),
        ("8.0.0.0/5", "is not within one of"),  # holds 10.0.0.0/8
        ("8.8.8.0/24", "public addresses need no flag"),
        ("0.0.0.0/8", "is not within one of"),
        ("::ffff:10.0.0.0/104", "is not within one of"),
        ("64:ff9b::/96", "is not within one of"),
        ("fe80::/10", "is not within one of"),
        ("224.0.0.0/4", "is not within one of"),
        ("168.63.129.16", "is not within one of"),
    ],
)
def test_a_network_that_cannot_be_named_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_media_network(text)


# URLs


@pytest.mark.parametrize(
    ("text", "host", "port", "target", "authority"),
    [
        ("https://a.test", "a.test", 443, "/", "a.test"),
        ("HTTPS://A.Test:443/Cat.png", "a.test", 443, "/Cat.png", "a.test"),
        ("https://a.test:80/", "a.test", 80, "/", "a.test:80"),
        ("http://a.test./x", "a.test", 80, "/x", "a.test"),
        ("http://a.test?q=1#fragment", "a.test", 80, "/?q=1", "a.test"),
        ("http://a.test/ä%20b", "a.test", 80, "/%C3%A4%20b", "a.test"),
        ("http://a.test/?q=ä&r={}|^", "a.test", 80, "/?q=%C3%A4&r={}|^", "a.test"),
        ("http://bücher.test/", "xn--bcher-kva.test", 80, "/", "xn--bcher-kva.test"),
        ("http://BÜCHER。test\uff0e/", "xn--bcher-kva.test", 80, "/", "xn--bcher-kva.test"),
        ("http://a_b.test/", "a_b.test", 80, "/", "a_b.test"),
        ("http://8.8.8.8:8080/", "8.8.8.8", 8080, "/", "8.8.8.8:8080"),
        ("http://[2606:4700:0:0::1]:8080/", "2606:4700::1", 8080, "/", "[2606:4700::1]:8080"),
    ],
)
def test_a_url_is_taken_apart(text, host, port, target, authority):
    url = parse_media_url(text)
    assert (url.host, url.port, url.target, url.authority) == (host, port, target, authority)
    assert parse_media_url(url.text) == url


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "expected http:// or https://"),
        ("a.test/cat.png", "expected http"),
        ("file:///etc/passwd", "expected http"),
        ("data:image/gif;base64,QQ==", "expected http"),
        ("http://a.test:0/", "host or port is malformed"),
        ("http://a.test:65536/", "host or port is malformed"),
        ("http://a.test:\uff18\uff10/", "host or port is malformed"),
        ("http://a.test:80:80/", "host or port is malformed"),
        ("http://::1/", "host or port is malformed"),
        ("http://127%2e0%2e0%2e1/", "host or port is malformed"),
        ("http://[fe80::1%25eth0]/", "host or port is malformed|not a URL"),
        ("http://[::1/", "not a URL"),
        ("http://[a.test]/", "host or port is malformed|not a URL"),
        ("http://[127.0.0.1]/", "neither a name nor an address|not a URL"),
        ("http://a℀b.test/", "not a URL"),  # NFKC has a slash in it
        ("http://a.test../", "neither a name nor an address"),
        ("http://a$b.test/", "neither a name nor an address"),
        (f"http://{'a' * 64}.test/", "neither a name nor an address"),
        (f"http://{'a.' * 130}test/", "neither a name nor an address"),
        (f"http://{'ü.' * 130}test/", "neither a name nor an address"),
        ("http://a.test\ud800/", "neither a name nor an address|not a URL"),
        ("http://a.test/\ud800", "not a URL"),
        ("http://@a.test/", "user name or password"),
        ("http://a.test\\@b.test/", "backslash"),
        ("http:\\\\a.test/", "backslash"),
        ("http://a.test/ ", "blank"),
        ("http://a.te\tst/", "control character"),
        ("http://a.test/\r\nHost: b.test", "control character"),
        ("http://a.test/" + "x" * LONGEST_URL, f"longer than {LONGEST_URL} characters"),
        # what C's inet_aton and browsers read as 127.0.0.1
        ("http://2130706433/", "its host is a number"),
        ("http://0x7f000001/", "its host is a number"),
        ("http://017700000001/", "its host is a number"),
        ("http://127.1/", "its host is a number"),
        ("http://127.0.0.0x1/", "its host is a number"),
        ("http://0/", "its host is a number"),
        ("http://a.test.1/", "its host is a number"),
    ],
)
def test_what_is_no_url_of_a_name_or_an_address_is_refused(text, rule):
    with pytest.raises(MediaUrlError, match=rule):
        parse_media_url(text)


def test_a_message_quotes_no_password_and_no_long_url():
    with pytest.raises(MediaUrlError) as caught:
        parse_media_url("http://user:secret@a.test/")
    assert "secret" not in str(caught.value)
    with pytest.raises(MediaUrlError) as caught:
        parse_media_url("ftp://a.test/" + "x" * 5000)
    assert len(str(caught.value)) < 200


def test_a_relative_url_is_that_of_its_base():
    own = "https://a.test:8443"
    wanted = {"/b": f"{own}/b", "b?c": f"{own}/x/b?c", "../b": f"{own}/b", "?c": f"{own}/x/y?c"}
    wanted |= {"//b.test/c": "https://b.test/c", "http://b.test": "http://b.test/"}
    base = parse_media_url(f"{own}/x/y?z")
    for location, text in wanted.items():
        assert parse_media_url(location, "a redirect", base).text == text


@given(st.text(st.sampled_from("htps:/@\\#?[]%.。x01 7a-_ü\t\uff11℀"), max_size=30))
def test_any_text_is_a_safe_url_or_refused(text):
    for whole in (text, f"http://{text}", f"http://a.test{text}", f"http://{text}a.test/"):
        try:
            url = parse_media_url(whole)
        except MediaUrlError:
            continue
        assert url.scheme in ("http", "https")
        assert url.text.isascii()
        assert url.text.isprintable()
        assert not set(" @\\%") & set(url.authority)
        assert parse_media_url(url.text) == url


# Allowed hosts


@pytest.mark.parametrize(
    ("host", "text"),
    [
        *(("a.test", "http://a.test/"), ("A.Test.", "https://a.tesT./")),
        *(("*.a.test", "http://b.a.test/"), ("*.a.test:8443", "https://b.a.test:8443/")),
        *(("bücher.test", "http://xn--bcher-kva.test/"), ("8.8.8.8", "http://8.8.8.8/")),
        ("2606:4700::1", "http://[2606:4700:0::1]/"),
        ("[2606:4700::1]:8443", "http://[2606:4700::1]:8443/"),
    ],
)
def test_allowed_hosts(host, text):
    AllowedHosts([host]).check(parse_media_url(text), "it")


@pytest.mark.parametrize(
    ("hosts", "text", "rule"),
    [
        ([], "http://a.test/", "this server does not fetch URLs; --allow-media-urls allows"),
        (["a.test"], "http://b.test/", "its host is not one of those"),
        (["a.test"], "http://xa.test/", "its host is not one"),
        (["a.test"], "http://a.test.b.test/", "its host is not one"),
        (["*.a.test"], "http://a.test/", "its host is not one"),
        (["*.a.test"], "http://ba.test/", "its host is not one"),
        (["8.8.8.8"], "http://[::ffff:8.8.8.8]/", "its host is not one"),
        (["a.test"], "http://\u0430.test/", "its host is not one"),  # a Cyrillic letter
        (
            ["a.test"],
            "http://a.test:8080/",
            "its port is not allowed: --allow-media-urls allows, for each host, ports 80 and 443",
        ),
        (["a.test:8443"], "https://a.test/", "its port is not allowed"),
        (["a.test:8443", "b.test"], "https://b.test:8443/", "its port is not allowed"),
    ],
)
def test_hosts_and_ports_that_are_not_allowed(hosts, text, rule):
    with pytest.raises(MediaUrlError, match=f"^it cannot be fetched: {rule}"):
        AllowedHosts(hosts).check(parse_media_url(text), "it")


NO_HOSTS = """
* *. a.*.test *a.test *.*.test http://a.test a.test/x user@a.test a.test:0 a.test:http *.8.8.8.8
*.::1 127.1 a.test,b.test [::1 :80 :::
"""


@pytest.mark.parametrize("host", ["", "a b", *NO_HOSTS.split()])
def test_what_names_no_host_is_no_setting(host):
    with pytest.raises(ConfigError, match=r"--allow-media-urls .*; expected a host"):
        AllowedHosts([host])
