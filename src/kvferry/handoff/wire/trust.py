"""Whom an engine talks to: at which addresses, and with which keys.

First come hosts: how names and addresses are checked and looked up. :class:`Keys` are the key of an engine and the
certificates that it trusts. :class:`Trust` joins both: an engine connects to this machine, to the hosts of the setting
``allowed_hosts``, and to hosts that come from a trusted engine. What a request or a router names is checked as an
address, after the name has been looked up, and the connection goes to that address.
"""

import errno
import os
import re
import socket
import ssl
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.errors import HandoffError, KVFerryError, Reason, SettingsError
from kvferry.transport.protocol import any_addresses, bare, plain_address

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.x509 import Certificate


MAX_ADDRESSES = 8
"""Addresses of one name that are tried."""
MAX_HOST_LENGTH = 255
LAST_PORT = 65535
EVERY_INTERFACE = "*"
"""Where an engine listens, in the place of a host."""
KEY, CERTIFICATE, TRUSTED = "key.pem", "certificate.pem", "trusted"
MAX_FILE_BYTES = 1 << 20
SIGNER_BYTES = 8
"""Bytes of the signer's fingerprint before a signature: they only say with which key to check it."""
SIGNATURE_PATTERN = r"^([0-9a-f]{144})?\Z"
"""Of a signature in hexadecimal, or of none."""
REMEMBERED_SECONDS = 10.0
"""How long the addresses of a name of ``allowed_hosts`` are not looked up again."""
_HOST = re.compile(r"\[[0-9A-Za-z._:%-]+\]|[0-9A-Za-z._:%-]+")
_NUMBERS = re.compile(r"[0-9.]+")
_PURPOSE = b"kvferry: signed outside of TLS\0"
"""Before all signed data, so that a signature of one use is none of another."""


def check_host(host: str) -> None:
    """Raise ``ValueError`` unless this is a name or an address alone, an IPv6 address in brackets or not.

    Decoders check every host that a peer or a request names so, and an engine its own settings. Nothing is looked up:
    this machine may not know a name that its peers know.

    >>> [check_host(host) for host in ("prefill-0.example", "10.0.0.1", "fd00::1", "[fd00::1]")]
    [None, None, None, None]
    >>> check_host("127.0.0.1:5600")
    Traceback (most recent call last):
    ValueError: '127.0.0.1:5600' is no host: it has a colon and is no IPv6 address
    """
    if why := _why_no_host(host):
        raise ValueError(f"{host[:MAX_HOST_LENGTH]!r} is no host: {why}")


def _why_no_host(host: str) -> str:
    """Return why this is no name and no address; empty for one."""
    if not 1 <= len(host) <= MAX_HOST_LENGTH:
        return f"it has {len(host)} characters, a host has 1 to {MAX_HOST_LENGTH}"
    if "://" in host:
        return "it is a URL"
    if ":" in host and not is_numeric(host):
        return "it has a colon and is no IPv6 address"
    if _HOST.fullmatch(host) is None:
        return "a name has ASCII letters, digits, '.', '-' and '_' only, and an address digits and '.' or ':'"
    if is_numeric(host):
        return ""
    if "%" in host or host.startswith("["):
        return "it is no IPv6 address"
    try:
        if _NUMBERS.fullmatch(host):
            socket.inet_aton(host)
        host.encode("idna")  # as every look-up does
    except OSError:
        return "it is no IPv4 address"
    except UnicodeError:
        return "each part of a name has 1 to 63 characters"
    return ""


def host_meant(text: str) -> str | None:
    """Return the host in a URL, or before a port; None where there is none.

    >>> host_meant("http://10.0.0.1"), host_meant("[fd00::1]:5600"), host_meant("prefill 0")
    ('10.0.0.1', '[fd00::1]', None)
    """
    place = text.strip().rpartition("://")[2].partition("/")[0].rpartition("@")[2]
    for host in (place, place.rpartition(":")[0]):
        if not _why_no_host(host):
            return host
    return None


def parse_place(text: str) -> tuple[str, int]:
    """Return the host and port of ``host:port``, an IPv6 address in brackets. Raises ``ValueError``.

    >>> parse_place("prefill-0:5600"), parse_place("[::1]:5600")
    (('prefill-0', 5600), ('[::1]', 5600))
    >>> parse_place("prefill-0")
    Traceback (most recent call last):
    ValueError: 'prefill-0' is no host:port: no port from 1 to 65535 follows a last colon
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= LAST_PORT):
        raise ValueError(f"{text!r} is no host:port: no port from 1 to {LAST_PORT} follows a last colon")
    check_host(host)
    if is_ipv6(host) and not host.startswith("["):
        raise ValueError(f"{text!r} is no host:port: an IPv6 address before a port is in brackets")
    return host, int(port)


def is_wildcard(host: str) -> bool:
    """Return whether listening on ``host`` means every interface; no peer can connect to such an address.

    >>> [is_wildcard(host) for host in ("0.0.0.0", "0", "[::]", "::ffff:0.0.0.0", "*", "127.0.0.1", "::1", "prefill-0")]
    [True, True, True, True, True, False, False, False]
    """
    with suppress(OSError):
        return socket.inet_aton(host) == bytes(4)
    return host == EVERY_INTERFACE or (is_numeric(host) and plain_address(bare(host)).is_unspecified)


def is_loopback(host: str) -> bool:
    """Return whether only processes of this host can connect to ``host``; of names only ``localhost`` is known.

    >>> [is_loopback(host) for host in ("127.9.9.9", "[::1]", "::ffff:127.0.0.1", "localhost", "0.0.0.0", "prefill-0")]
    [True, True, True, True, False, False]
    """
    return host == "localhost" or (is_numeric(host) and plain_address(bare(host)).is_loopback)


def is_numeric(host: str) -> bool:
    """Return whether the host is an address, not a name.

    >>> is_numeric("[::1]"), is_numeric("127.0.0.1"), is_numeric("localhost")
    (True, True, False)
    """
    try:
        ip_address(bare(host))
    except ValueError:
        return False
    return True


def is_ipv6(host: str) -> bool:
    return ":" in host


def in_url(host: str) -> str:
    """Return the host as it is written before a port.

    >>> in_url("::1"), in_url("prefill-0")
    ('[::1]', 'prefill-0')
    """
    return f"[{bare(host)}]" if is_ipv6(host) else host


def as_network(host: str) -> IPv4Network | IPv6Network | None:
    """Return an address or a network of ``allowed_hosts`` as a network, None for a name.

    >>> as_network("10.0.0.0/8"), as_network("[::1]"), as_network("prefill-0")
    (IPv4Network('10.0.0.0/8'), IPv6Network('::1/128'), None)
    """
    try:
        return ip_network(bare(host), strict=False)
    except ValueError:
        return None


def nothing_listens(addresses: Sequence[str], port: int, timeout_seconds: float) -> bool:
    """Return whether each of these addresses of one host refuses a connection to ``port``.

    An address that does not answer says nothing.
    """
    for address in addresses:
        try:
            socket.create_connection((address, port), timeout_seconds).close()
        except ConnectionRefusedError:
            continue
        except OSError:
            return False
        return False
    return True


def look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a host, on the caller's thread. Raises :class:`HandoffError` (peer-unreachable)."""
    try:
        found = any_addresses(host, port)
    except (OSError, ValueError) as error:
        raise HandoffError(
            Reason.PEER_UNREACHABLE,
            f"the host {host!r} cannot be looked up: {error}.",
            'Set "advertised_host" on that engine to an address or a name that this machine knows.',
        ) from error
    return list(dict.fromkeys(found))[:MAX_ADDRESSES]


class Keys:
    """The key, the certificate and the allow-list of one folder, read once.

    ``fingerprint`` names the own certificate, ``trusted`` maps the fingerprint of each certificate of the allow-list
    to its file (``trusted/*.pem``), ``unread`` names the other files there. The own certificate is always trusted: the
    ranks of an engine report to their scheduler with it.

    Raises :class:`SettingsError`: permission-denied for a key that other users can read, or where other users can
    change a file of the folder, or put another in its place; invalid-setting for a folder that is not complete, and
    for an own certificate that has expired, which every peer would refuse.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        own, trusted = self.folder / CERTIFICATE, self.folder / TRUSTED
        self._private = _read_key(self.folder / KEY)
        _refuse_writable([self.folder / KEY, own, trusted])
        certificates: dict[str, tuple[bytes, Ed25519PublicKey, Path]] = {}
        allowed = sorted(trusted.glob("*.pem"))
        _refuse_writable(allowed)
        for path in [own, *allowed]:
            for der, key in _read_certificates(path):
                certificates.setdefault(fingerprint_of(der), (der, key, path))
        _refuse_expired(own)
        others = (path for path in trusted.glob("[!.]*") if path.suffix != ".pem")
        self.unread = tuple(sorted(str(path) for path in others if path.is_file()))
        self.fingerprint = next(iter(certificates))
        if certificates[self.fingerprint][1].public_bytes_raw() != self._private.public_key().public_bytes_raw():
            raise _unfit(own, f"is not the certificate of {KEY}")
        self.trusted = {fingerprint: path for fingerprint, (_, _, path) in certificates.items()}
        self._signers = {_signer(fingerprint): (fingerprint, key) for fingerprint, (_, key, _) in certificates.items()}
        self._trusted_data = b"".join(der for der, _, _ in certificates.values())
        self.server_context = self._context(ssl.PROTOCOL_TLS_SERVER)
        self.server_context.num_tickets = 0  # no session outlives its connection
        self.client_context = self._context(ssl.PROTOCOL_TLS_CLIENT)

    def sign(self, data: bytes) -> bytes:
        """Return a signature of ``data`` by the own key: 72 bytes, of which the first 8 name the key."""
        return _signer(self.fingerprint) + self._private.sign(_PURPOSE + data)

    def check(self, data: bytes, signature: bytes) -> str:
        """Return the fingerprint of the trusted certificate whose key signed ``data``.

        Raises :class:`HandoffError` (permission-denied) where none did.
        """
        from cryptography.exceptions import InvalidSignature

        signer = signature[:SIGNER_BYTES]
        if signer not in self._signers:
            raise HandoffError(
                Reason.PERMISSION_DENIED,
                f"no trusted key has the name {signer.hex() or '(none)'} that a signature gives.",
                f"Copy the signer's certificate into {self.folder / TRUSTED}, or give all engines one folder.",
            )
        fingerprint, key = self._signers[signer]
        try:
            key.verify(signature[SIGNER_BYTES:], _PURPOSE + data)
        except InvalidSignature:
            raise HandoffError(
                Reason.PERMISSION_DENIED,
                f"the key {signer.hex()} has not signed this data: it was changed on its way, or is not from that "
                "engine.",
                "Let routers and proxies pass it on unchanged. One that writes remote_host or remote_port itself must "
                "write the same text as the engine: its advertised_host (or host) and its port; 'localhost' is another "
                "text than '127.0.0.1'.",
            ) from None
        return fingerprint

    def check_peer(self, certificate: bytes | None) -> str:
        """Return the fingerprint of a peer's certificate (DER), which TLS has found to be the peer's.

        Raises :class:`HandoffError` (permission-denied) unless the allow-list has exactly this certificate: TLS would
        also take one that a certificate of the list has signed.
        """
        found = "" if certificate is None else fingerprint_of(certificate)
        if found not in self.trusted:
            raise HandoffError(
                Reason.PERMISSION_DENIED,
                f"certificate: the peer has {found[:16] or 'none'}, which this side, {self.fingerprint[:16]}, does not "
                "trust.",
                f"Copy the peer's certificate into {self.folder / TRUSTED} if it is an engine of this deployment.",
            )
        return found

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # a certificate names a key, not a host
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cadata=self._trusted_data)
            context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY)
        except (ssl.SSLError, OSError) as error:
            raise _unfit(self.folder, f"does not serve for TLS: {error}") from error
        return context


def make_keys(folder: Path) -> Keys:
    """Make a new key and its certificate in ``folder``, and return them. Nothing is overwritten.

    Raises :class:`SettingsError` (invalid-setting) where the folder has a key or a certificate, or cannot be made.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    try:
        for path in (folder / KEY, folder / CERTIFICATE):
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / TRUSTED).mkdir(mode=0o755, exist_ok=True)
        _write_new(folder / KEY, key.private_bytes(encoding, form, serialization.NoEncryption()), 0o600)
        _write_new(folder / CERTIFICATE, _self_signed(key).public_bytes(encoding), 0o644)
    except FileExistsError as error:
        raise SettingsError(
            Reason.INVALID_SETTING, f"{error.filename} exists.", "Name another folder: no key is overwritten."
        ) from None
    except OSError as error:
        raise _unfit(folder, f"cannot be made: {error.strerror}") from error
    return Keys(folder)


def fingerprint_of(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate (DER) in hexadecimal, as ``openssl x509 -fingerprint -sha256`` does."""
    return sha256(certificate).hexdigest()


def _self_signed(key: "Ed25519PrivateKey") -> "Certificate":
    from datetime import datetime

    from cryptography import x509

    # Names are unique: OpenSSL looks a certificate up by its name.
    public = key.public_key()
    common_name = f"kvferry {public.public_bytes_raw().hex()[:32]}"
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])
    builder = x509.CertificateBuilder(name, name, public, x509.random_serial_number())
    # The allow-list says how long a certificate is trusted. RFC 5280 has this date for one that does not end.
    builder = builder.not_valid_before(datetime(2000, 1, 1)).not_valid_after(datetime(9999, 12, 31, 23, 59, 59))
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    return builder.sign(key, None)


def _write_new(path: Path, data: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with open(descriptor, "wb") as file:
        file.write(data)


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise _unfit(path, f"cannot be read: {error.strerror}") from error


def _read_key(path: Path) -> "Ed25519PrivateKey":
    """Return the private key: its owner alone may read it, where root owns it the group too, as secrets are mounted."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read(path)
    about = path.stat()
    allowed = 0o740 if about.st_uid == 0 else 0o700
    if stat.S_IMODE(about.st_mode) & ~allowed or about.st_uid not in (0, os.geteuid()):
        raise SettingsError(
            Reason.PERMISSION_DENIED,
            f"keys: other users can read or change {path} (mode {stat.S_IMODE(about.st_mode):04o}, owner "
            f"{about.st_uid}).",
            f"Run 'chmod 600 {path}' as the engine's user. If somebody may have read the key, make a new one.",
        )
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _unfit(path, "is no private key in PEM format without a password") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _unfit(path, "is no Ed25519 key")
    return key


def _refuse_writable(paths: Iterable[Path]) -> None:
    """Refuse files and folders that other users can change, or replace: as OpenSSH does, up to the root.

    A path that does not exist is left out. Raises :class:`SettingsError` (permission-denied).
    """
    folders: dict[Path, None] = {}
    for path in paths:
        if path.exists():
            _refuse_writable_one(path.resolve(), stat.S_IWGRP | stat.S_IWOTH)
        # A link lies in another folder than its file: Kubernetes mounts secrets so.
        for found in (path.parent.resolve() / path.name, path.resolve()):
            folders |= dict.fromkeys(found.parents)
    for folder in folders:
        # Where the sticky bit is set, other users add files, but neither remove nor rename those that are there.
        is_sticky = folder.stat().st_mode & stat.S_ISVTX
        _refuse_writable_one(folder, 0 if is_sticky else stat.S_IWGRP | stat.S_IWOTH)


def _refuse_writable_one(path: Path, refused_bits: int) -> None:
    about = path.stat()
    if about.st_mode & refused_bits or about.st_uid not in (0, os.geteuid()):
        raise SettingsError(
            Reason.PERMISSION_DENIED,
            f"keys: other users can change {path} (mode {stat.S_IMODE(about.st_mode):04o}, owner {about.st_uid}), and "
            "with it whom this engine trusts.",
            f"Run 'chmod go-w {path}', let it belong to the engine's user or to root, or keep the keys in another "
            "folder.",
        )


def _read_certificates(path: Path) -> list[tuple[bytes, "Ed25519PublicKey"]]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import Encoding

    data = _read(path)
    try:
        certificates = x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise _unfit(path, "has no certificate in PEM format") from error
    found = []
    for certificate in certificates:
        key = certificate.public_key()
        if not isinstance(key, Ed25519PublicKey) or certificate.issuer != certificate.subject:
            raise _unfit(path, "has a certificate that is not self-signed with Ed25519")
        found.append((certificate.public_bytes(Encoding.DER), key))
    return found


def _refuse_expired(path: Path) -> None:
    """Refuse an own certificate, the first of its file, that no peer accepts today. Raises :class:`SettingsError`."""
    from datetime import UTC, datetime

    from cryptography import x509

    own, now = x509.load_pem_x509_certificates(_read(path))[0], datetime.now(UTC)
    if not own.not_valid_before_utc <= now <= own.not_valid_after_utc:
        valid = f"from {own.not_valid_before_utc:%Y-%m-%d %H:%M} to {own.not_valid_after_utc:%Y-%m-%d %H:%M}"
        raise _unfit(path, f"is valid {valid} UTC, and it is {now:%Y-%m-%d %H:%M}")


def _signer(fingerprint: str) -> bytes:
    return bytes.fromhex(fingerprint)[:SIGNER_BYTES]


def _unfit(path: Path, what: str) -> SettingsError:
    remedy = 'Make a folder with "kvferry keys new FOLDER", and name it in the setting "keys" or with --keys.'
    if path.parent.name == TRUSTED:
        remedy = "Copy the other engine's certificate.pem there again, or remove the file."
    return SettingsError(Reason.INVALID_SETTING, f"keys: {path} {what}.", remedy)


class Trust:
    """The keys of an engine, and where it connects.

    ``allowed_hosts`` are names, addresses and networks. ``anywhere`` lifts the restriction.

    >>> trust = Trust(allowed_hosts=["10.1.0.0/16"])
    >>> trust.addresses("10.1.2.3", 5600, is_trusted=False), trust.addresses("127.0.0.1", 5600, is_trusted=False)
    (['10.1.2.3'], ['127.0.0.1'])
    >>> trust.addresses("10.2.0.1", 5600, is_trusted=True)
    ['10.2.0.1']
    """

    def __init__(self, keys: Keys | None = None, allowed_hosts: Sequence[str] = (), *, anywhere: bool = False) -> None:
        self.keys = keys
        self._anywhere = anywhere
        self._allowed_hosts = tuple(allowed_hosts)
        self._names = frozenset(bare(host).lower() for host in allowed_hosts if as_network(host) is None)
        self._networks = [network for host in allowed_hosts if (network := as_network(host)) is not None]
        self._remembered: dict[str, tuple[float, frozenset[str]]] = {}

    def known_address(self, host: str, is_trusted: bool) -> str | None:
        """Return the address of a host where nothing must be looked up, else None."""
        if is_numeric(host) and (is_trusted or self._anywhere or self._is_in_network(bare(host))):
            return bare(host)
        return None

    def addresses(self, host: str, port: int, is_trusted: bool) -> list[str]:
        """Return the addresses of a host to which this engine may connect. Looks names up, on the caller's thread.

        ``is_trusted`` says that a trusted engine has named the host, or this engine itself. Raises
        :class:`HandoffError`: permission-denied where there is no such address, peer-unreachable for an unknown name.
        """
        found = look_up(host, port)
        if is_trusted or self._anywhere or bare(host).lower() in self._names:
            return found
        if allowed := [address for address in found if self._is_allowed(address)]:
            return allowed
        raise self._refusal(host, found)

    def addresses_named_by_peers(self, host: str, port: int) -> list[str]:
        """Return as :meth:`addresses` for a host that a peer's message names: with keys, peers are trusted engines."""
        return self.addresses(host, port, is_trusted=self.keys is not None)

    def refuse_numeric(self, host: str) -> None:
        """Refuse an address to which this engine does not connect, where no look-up is needed to see it. A name passes.

        Raises :class:`HandoffError` (permission-denied).
        """
        # A name of "allowed_hosts" may stand for the address.
        if is_numeric(host) and not self._names and self.known_address(host, is_trusted=False) is None:
            raise self._refusal(host, [bare(host)])

    def _refusal(self, host: str, addresses: Sequence[str]) -> HandoffError:
        return HandoffError(
            Reason.PERMISSION_DENIED,
            f"host: {host!r} is at {', '.join(addresses)}; this engine connects to this machine and to "
            f'"allowed_hosts", which has {", ".join(self._allowed_hosts) or "no host"}.',
            'If an engine of this deployment is there, add its host to "allowed_hosts".',
        )

    def _is_allowed(self, address: str) -> bool:
        return self._is_in_network(address) or any(address in self._addresses_of(name) for name in self._names)

    def _is_in_network(self, address: str) -> bool:
        found = plain_address(address)
        return found.is_loopback or any(found.version == each.version and found in each for each in self._networks)

    def _addresses_of(self, name: str) -> frozenset[str]:
        now = time.monotonic()
        until, addresses = self._remembered.get(name, (0.0, frozenset()))
        if now >= until:
            addresses = frozenset()
            with suppress(KVFerryError):  # a name of another engine may be unknown today
                addresses = frozenset(look_up(name, 0))
            self._remembered[name] = now + REMEMBERED_SECONDS, addresses
        return addresses


THIS_MACHINE = Trust()
"""Without keys, and to addresses of this machine only."""
