"""TLS towards NATS, from files: which authority is believed, and what proves this client where servers ask for that."""

from __future__ import annotations

import ssl
from pathlib import Path


class TlsFilesError(Exception):
    """A file that cannot be used. `setting`: which of `ca_file`, `cert_file`, `key_file`; `remedy` for people."""

    def __init__(self, setting: str, remedy: str) -> None:
        super().__init__(f"{setting}: {remedy}")
        self.setting = setting
        self.remedy = remedy


def client_context(ca_file: Path | None, cert_file: Path | None, key_file: Path | None) -> ssl.SSLContext | None:
    """None where no file is named: servers that ask for TLS are then believed as the system's authorities say. Without
    `ca_file` those authorities count. Raises TlsFilesError."""
    if ca_file is None and cert_file is None and key_file is None:
        return None
    if (cert_file is None) != (key_file is None):
        missing, there = ("cert_file", "key_file") if cert_file is None else ("key_file", "cert_file")
        raise TlsFilesError(missing, f"must be named too, since {there} is")
    try:
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except OSError as error:  # an SSLError is one
        raise TlsFilesError("ca_file", f"{ca_file} holds no certificates that can be read ({_why(error)})") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if cert_file is not None and key_file is not None:
        try:
            context.load_cert_chain(str(cert_file), str(key_file), password=_no_password)
        except (OSError, ValueError) as error:
            detail = f"{cert_file} and {key_file} are no certificate and its key ({_why(error)})"
            raise TlsFilesError("cert_file", detail) from None
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted")  # instead of a question on the terminal


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not PEM"
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
