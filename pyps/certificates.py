"""Certificates for servers and workers, and the authority that signs them: small files in one folder."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pyps.roles import Role, role_in
from pyps_wire.errors import InvalidArgument

# Of the authority's certificate; after that all certificates must be made again.
AUTHORITY_DAYS = 3650
# Characters of a common name in X.509.
NAME_MAX = 64
# How far clocks may differ.
_CLOCKS = timedelta(hours=1)
# Of callers, the highest last.
ROLES = tuple(role.word for role in Role if role)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

# A certificate with its key.
Signed: TypeAlias = tuple[ec.EllipticCurvePrivateKey, x509.Certificate]


@dataclass(frozen=True)
class Certificate:
    """What a certificate says; its role is "CA", "server", or a caller's."""

    role: str
    names: tuple[str, ...]
    since: datetime
    until: datetime


class Authority:
    """Signs certificates with `ca.key` in its folder; ends that trust `ca.crt` trust them."""

    def __init__(self, folder: Path, *, create: bool = False):
        """Read the authority. If it is missing, make one if `create` is set, else raise InvalidArgument."""
        self._folder = folder
        self._unwritten: dict[str, Signed] = {}
        if create and not (folder / "ca.crt").exists():
            key = ec.generate_private_key(ec.SECP256R1())
            name = _named("pyps CA")
            until = datetime.now(UTC) + timedelta(days=AUTHORITY_DAYS)
            builder = _builder(name, key.public_key(), issuer=name, until=until)
            usage = dict.fromkeys(_USAGES, False) | {"key_cert_sign": True, "crl_sign": True}
            builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
            self._key, self._certificate = key, builder.sign(key, SHA256())
            # Written with the first certificate: a refusal leaves no file.
            self._unwritten = {"ca": (key, self._certificate)}
            return
        self._certificate = _read(folder / "ca.crt")
        try:
            read = load_pem_private_key((folder / "ca.key").read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidArgument(f"the CA's key {folder / 'ca.key'} cannot be read: {reason}") from None
        assert isinstance(read, ec.EllipticCurvePrivateKey)
        self._key = read

    def make_server(self, hosts: Sequence[str], *, days: int) -> Path:
        """Make `server.crt` and `server.key` for servers with these names or addresses, and for loopback.

        As a caller's certificate it is an operator's: commands on the server's machine need no other.
        """
        names = [_host(host) for host in dict.fromkeys((*hosts, *_LOOPBACK))]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        # The extension has the whole names.
        subject = _named(hosts[0][:NAME_MAX], role=ROLES[-1])
        return self._make("server", subject, usages, names, days=days)

    def make_worker(self, name: str, *, role: str = "worker", days: int) -> Path:
        """Make `NAME.crt` and `NAME.key` for a caller of that name and role."""
        if not _NAME.fullmatch(name) or name in ("ca", "server"):
            raise InvalidArgument(
                f"the worker's name is {name!r}; expected letters, digits, . _ and -, not 'ca' or 'server'"
            )
        if len(name) > NAME_MAX:
            raise InvalidArgument(
                f"the worker's name has {len(name)} characters, and a certificate holds {NAME_MAX} at most"
            )
        if role not in ROLES:
            raise InvalidArgument(f"--role is {role!r}; expected {', '.join(ROLES[:-1])} or {ROLES[-1]}")
        return self._make(name, _named(name, role=role), [ExtendedKeyUsageOID.CLIENT_AUTH], [], days=days)

    def _make(
        self,
        stem: str,
        subject: x509.Name,
        usages: Iterable[x509.ObjectIdentifier],
        hosts: Sequence[x509.GeneralName],
        *,
        days: int,
    ) -> Path:
        now, end = datetime.now(UTC), self._certificate.not_valid_after_utc
        # Rounded up: a new CA has all of its days.
        days_max = -((now - end) // timedelta(days=1))
        if days > days_max:
            raise InvalidArgument(
                f"--days is {days}, but the CA is valid for {max(days_max, 0)} more, and its certificates no longer"
            )
        until = min(now + timedelta(days=days), end)
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(subject, key.public_key(), issuer=self._certificate.subject, until=until)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(signer, critical=False)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        self._write({**self._unwritten, stem: (key, builder.sign(self._key, SHA256()))})
        self._unwritten = {}
        return self._folder / f"{stem}.crt"

    def _write(self, made: Mapping[str, Signed]) -> None:
        """Write the certificate and the key of each, for their owner alone; InvalidArgument if a file exists."""
        contents: dict[Path, bytes] = {}
        for stem, (key, certificate) in made.items():
            private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            contents[self._folder / f"{stem}.key"] = private
            contents[self._folder / f"{stem}.crt"] = certificate.public_bytes(Encoding.PEM)
        if there := [str(path) for path in contents if path.exists()]:
            raise InvalidArgument(
                f"{' and '.join(there)} would be overwritten: move them away first, or name another --folder"
            )
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, content in contents.items():
            try:
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(content)
            except OSError as error:
                raise InvalidArgument(f"{path} cannot be written: {error.strerror}") from None


def describe(path: Path) -> Certificate:
    """Return what the certificate in a file says; InvalidArgument if there is none."""
    found = _read(path)
    names = [attribute.value for attribute in found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    role = role_in(found.subject.rfc4514_string()).word
    kinds: dict[type, Any] = {type(extension.value): extension.value for extension in found.extensions}
    if (constraints := kinds.get(x509.BasicConstraints)) and constraints.ca:
        role = "CA"
    elif ExtendedKeyUsageOID.SERVER_AUTH in kinds.get(x509.ExtendedKeyUsage, ()):
        role = "server"
    names = [name.value for name in kinds.get(x509.SubjectAlternativeName, ())] or names
    since, until = found.not_valid_before_utc, found.not_valid_after_utc
    return Certificate(role, tuple(dict.fromkeys(map(str, names))), since, until)


_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, *, issuer: x509.Name, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(datetime.now(UTC), until) - _CLOCKS)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _named(name: str, *, role: str = "") -> x509.Name:
    units = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role)] if role else []
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name), *units])


def _host(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    if not _NAME.fullmatch(host):
        raise InvalidArgument(f"--host is {host!r}; expected the name or the address of a server, without a port")
    return x509.DNSName(host)


def _read(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it holds no certificate in PEM"
        raise InvalidArgument(f"the certificate {path} cannot be read: {reason}") from None
