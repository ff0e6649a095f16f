"""TLS of all ports of a server."""

from __future__ import annotations

import ssl
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import grpc

from pyps import logs
from pyps.config import ConfigError, ServerConfig, flag_name
from pyps.service.security import stamp_of

# In quotes: only the type stubs know of it.
Configuration: TypeAlias = "grpc.ServerCertificateConfiguration"

# Keys that gRPC takes: RSA of this length or more, P-256 and P-384, which have these names in OpenSSL.
_RSA_BITS_MIN = 2048
_CURVES = ("secp256r1", "secp384r1")

log = logs.get("pyps.security")


class Tls:
    """A server's certificates, read again when their files change. May be used from any thread."""

    def __init__(self, *, cert: Path, key: Path, client_ca: Path | None):
        """With a `client_ca` each caller must show a certificate that it signed. ConfigError for unusable files."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._files = [path for path in (cert, key, client_ca) if path is not None]
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._stamp = stamp_of(*self._files)
        # When the newest certificate becomes valid, if that is yet to come.
        self._good_from: datetime | None = None
        self._loaded = self._load()
        if problem := self._out_of_date():
            log.warning("no caller will trust this server", reason=problem)

    @classmethod
    def of(cls, config: ServerConfig) -> Tls | None:
        """Return the TLS of a server's settings; None where they name no certificate."""
        if config.tls_cert is None or config.tls_key is None:
            return None
        return cls(cert=config.tls_cert, key=config.tls_key, client_ca=config.tls_client_ca)

    def context(self) -> ssl.SSLContext:
        """Return the context for a connection at a port without gRPC."""
        return self._newest()[0]

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC port, for all of its connections."""
        _, given = self._newest()

        def newer() -> Configuration | None:
            nonlocal given
            former, (_, given) = given, self._newest()
            return None if given is former else given

        # The stubs do not know that None means "as before".
        return grpc.dynamic_ssl_server_credentials(given, newer, self._client_ca is not None)  # type: ignore[arg-type]

    def _newest(self) -> tuple[ssl.SSLContext, Configuration]:
        with self._lock:
            stamp = stamp_of(*self._files)
            if stamp != self._stamp or (self._good_from is not None and self._good_from <= datetime.now(UTC)):
                self._stamp, self._good_from = stamp, None
                try:
                    loaded = self._load()
                    if problem := self._out_of_date():
                        raise ConfigError(problem)
                    self._loaded = loaded
                    log.info("the certificates have changed and are in force", file=self._cert)
                except ConfigError as error:
                    log.warning("the certificates stay as they were", reason=error)
            return self._loaded

    def _out_of_date(self) -> str:
        """Return what is wrong with the certificate's dates now; empty if nothing is."""
        # Only servers with certificates need cryptography.
        from cryptography import x509

        try:
            certificate = x509.load_pem_x509_certificate(self._cert.read_bytes())
        except (OSError, ValueError):
            # It has changed since it was loaded, or OpenSSL is less strict.
            return ""
        first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        now = datetime.now(UTC)
        if first <= now <= last:
            return ""
        validity = f"{flag_name('tls_cert')} {self._cert} is valid from {first} to {last} only"
        if now < first:
            self._good_from = first
            return f"{validity}: it takes effect then"
        return f"{validity}: make another (`pyps certs init`)"

    def _require_known_key(self, pem: bytes) -> None:
        """Raise ConfigError for a certificate whose key gRPC does not take; Python's ssl takes more."""
        from cryptography import x509
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

        key: object
        try:
            key = x509.load_pem_x509_certificate(pem).public_key()
        except ValueError:
            # OpenSSL is less strict.
            return
        except UnsupportedAlgorithm:
            key = None
        if isinstance(key, RSAPublicKey):
            kind, known = f"RSA of {key.key_size} bits", key.key_size >= _RSA_BITS_MIN
        elif isinstance(key, EllipticCurvePublicKey):
            kind, known = key.curve.name, key.curve.name in _CURVES
        else:
            kind, known = type(key).__name__.removesuffix("PublicKey") if key else "of an unknown kind", False
        if not known:
            raise ConfigError(
                f"{flag_name('tls_cert')} {self._cert} has a key that gRPC does not take ({kind}): expected RSA of "
                f"{_RSA_BITS_MIN} bits or more, P-256 or P-384: make another (`pyps certs init`)"
            )

    def _load(self) -> tuple[ssl.SSLContext, Configuration]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        field, path = "tls_cert", self._cert
        client_ca = None
        try:
            # Checks that the key is the certificate's, which gRPC does not.
            context.load_cert_chain(self._cert, self._key, password="")
            pair = self._key.read_bytes(), self._cert.read_bytes()
            self._require_known_key(pair[1])
            if self._client_ca is not None:
                field, path = "tls_client_ca", self._client_ca
                context.load_verify_locations(self._client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
                client_ca = self._client_ca.read_bytes()
        except OSError as error:
            reason = getattr(error, "reason", None) or error.strerror
            if isinstance(error, ssl.SSLError) and error.reason in (None, "NO_CERTIFICATE_OR_CRL_FOUND"):
                reason = "no PEM certificate or key is there, or one with a password"
            with_key = f" with --tls-key {self._key}" if field == "tls_cert" else ""
            raise ConfigError(
                f"{flag_name(field)} {path}{with_key} cannot be used ({reason}): expected PEM files, as "
                "`pyps certs` makes them"
            ) from None
        return context, grpc.ssl_server_certificate_configuration([pair], client_ca)
