"""The keys of a deployment: who may talk to an engine, and whose signatures it believes.

A folder has the engine's own ``key.pem`` and ``certificate.pem``, and in ``trusted/`` the certificates of its peers.
A certificate is self-signed, and trusted because it lies there: no authority vouches for it and it never ends by
itself. TLS is Python's ``ssl``, Ed25519 that of the package ``cryptography``.
"""

import errno
import os
import ssl
import stat
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.errors import HandoffError, Reason, SettingsError

if TYPE_CHECKING:  # imported where it is used: a third of kvferry's time to import, and most engines have no keys
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.x509 import Certificate

KEY, CERTIFICATE, TRUSTED = "key.pem", "certificate.pem", "trusted"
MAX_FILE_BYTES = 1 << 20
SIGNER_BYTES = 8
"""Bytes of the signer's fingerprint before a signature: they only say with which key to check it."""
SIGNATURE_PATTERN = r"^([0-9a-f]{144})?\Z"
"""Of a signature in hexadecimal, or of none."""
_PURPOSE = b"kvferry: signed outside of TLS\0"
"""Before all signed data, so that a signature of one use is none of another."""
_REMEDY = 'Make a folder with "kvferry keys new FOLDER", and name it in the setting "keys" or with --keys.'
_TRUSTED_REMEDY = "Copy the other engine's certificate.pem there again, or remove the file."


class Keys:
    """The key, the certificate and the allow-list of one folder, read once.

    ``fingerprint`` names the own certificate, ``trusted`` maps the fingerprint of each certificate of the allow-list
    to its file (``trusted/*.pem``), ``unread`` names the other files there. The own certificate is always trusted: the
    ranks of an engine report to their scheduler with it.

    Raises :class:`SettingsError`: permission-denied for a key that other users can read, or where other users can
    change a file of the folder, or put another in its place; invalid-setting for a folder that is not complete.
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
        others = (path for path in (self.folder / TRUSTED).glob("[!.]*") if path.suffix != ".pem")
        self.unread = tuple(sorted(str(path) for path in others if path.is_file()))
        self.fingerprint = next(iter(certificates))
        if _raw(certificates[self.fingerprint][1]) != _raw(self._private.public_key()):
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
    certificate = _self_signed(key).public_bytes(encoding)
    try:
        for path in (folder / KEY, folder / CERTIFICATE):
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / TRUSTED).mkdir(mode=0o755, exist_ok=True)
        _write_new(folder / KEY, key.private_bytes(encoding, form, serialization.NoEncryption()), 0o600)
        _write_new(folder / CERTIFICATE, certificate, 0o644)
    except FileExistsError as error:
        raise SettingsError(
            Reason.INVALID_SETTING, f"{error.filename} exists.", "Name another folder: no key is overwritten."
        ) from None
    except OSError as error:
        raise _unfit(folder, f"cannot be made: {error.strerror}") from error
    return Keys(folder)


def fingerprint_of(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate (DER) in hexadecimal, as ``openssl x509 -fingerprint -sha256`` computes it.

    >>> fingerprint_of(b"")[:8]
    'e3b0c442'
    """
    return sha256(certificate).hexdigest()


def _self_signed(key: "Ed25519PrivateKey") -> "Certificate":
    from datetime import datetime

    from cryptography import x509

    # Names are unique: OpenSSL looks a certificate up by its name.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"kvferry {_raw(key.public_key()).hex()[:32]}")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
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
    """Return the certificates of a file, in DER, with their keys."""
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


def _signer(fingerprint: str) -> bytes:
    return bytes.fromhex(fingerprint)[:SIGNER_BYTES]


def _raw(key: "Ed25519PublicKey") -> bytes:
    return key.public_bytes_raw()


def _unfit(path: Path, what: str) -> SettingsError:
    remedy = _TRUSTED_REMEDY if path.parent.name == TRUSTED else _REMEDY
    return SettingsError(Reason.INVALID_SETTING, f"keys: {path} {what}.", remedy)
