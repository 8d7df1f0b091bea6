"""NATS over TLS: believed by its authority's file, refused without it; with certificates of clients where asked for."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from support_nats import NatsServer, running_server
from tether import topology
from tether.bus import NatsBus, connect, connect_service
from tether.client.environment import load as load_client
from tether.errors import BusUnavailableError
from tether.settings import ConfigurationError, ServiceSettings, load
from tether.tls import TlsFilesError, client_context


@dataclass(frozen=True, slots=True)
class Pki:
    """Files: an authority, a server's and a client's certificate and key, and a stranger's."""

    folder: Path

    def __getitem__(self, name: str) -> Path:
        return self.folder / f"{name}.pem"


def _make(folder: Path, names: list[str], authority: str) -> None:
    now = datetime.datetime.now(datetime.UTC)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, authority)])
    for name in (authority, *names):
        own = name == authority
        key = authority_key if own else ec.generate_private_key(ec.SECP256R1())
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(authority_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=own, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
        )
        (folder / f"{name}.pem").write_bytes(
            builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
        (folder / f"{name}-key.pem").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    folder = tmp_path_factory.mktemp("pki")
    _make(folder, ["server", "client"], "authority")
    _make(folder, ["intruder"], "stranger")
    return Pki(folder)


def _server(pki: Pki, *, verify: bool) -> str:
    more = f'ca_file: "{pki["authority"]}", verify: true' if verify else ""
    return f'tls {{ cert_file: "{pki["server"]}", key_file: "{pki["server-key"]}", timeout: 20, {more} }}'


@pytest.fixture(scope="module", params=[False, True], ids=["server-only", "mutual"])
def tls_server(pki: Pki, request: pytest.FixtureRequest) -> Iterator[tuple[NatsServer, bool]]:
    with running_server(extra=_server(pki, verify=request.param)) as server:
        yield server, request.param


async def test_a_service_speaks_tls_as_its_settings_say(pki: Pki, tls_server: tuple[NatsServer, bool]) -> None:
    server, mutual = tls_server
    values = {"TETHER_NATS_URL": server.url, "TETHER_NATS_TLS_CA_FILE": str(pki["authority"])}
    if mutual:
        values["TETHER_NATS_TLS_CERT_FILE"] = str(pki["client"])
        values["TETHER_NATS_TLS_KEY_FILE"] = str(pki["client-key"])
    bus = await connect_service(load(ServiceSettings, values), "service", asyncio.Event())
    assert isinstance(bus, NatsBus)
    async with bus:
        await bus.barrier()
        assert bus.connected


async def test_a_service_survives_the_restart_of_a_server_with_tls(pki: Pki) -> None:
    with running_server(extra=_server(pki, verify=False)) as server:
        tls = client_context(pki["authority"], None, None)
        async with await connect(server.url, name="service", tls=tls) as bus:
            server.restart()
            async with asyncio.timeout(30):
                while bus.epoch == 1 or not bus.connected:  # noqa: ASYNC110 - the server decides
                    await asyncio.sleep(0.02)
            await bus.barrier()


async def test_who_is_not_believed_or_brings_nothing_does_not_get_in(
    pki: Pki, tls_server: tuple[NatsServer, bool]
) -> None:
    server, mutual = tls_server
    wrong = [client_context(pki["stranger"], None, None)]
    if mutual:
        wrong += [
            client_context(pki["authority"], None, None),
            client_context(pki["authority"], pki["intruder"], pki["intruder-key"]),
        ]
    for context in wrong:
        with pytest.raises(BusUnavailableError):
            await connect(server.url, name="x", tls=context, connect_timeout_s=1.5)


async def test_the_client_speaks_tls_as_its_environment_says(pki: Pki, tls_server: tuple[NatsServer, bool]) -> None:
    server, mutual = tls_server
    values = {"TETHER_CLIENT_URL": server.url, "TETHER_CLIENT_NATS_TLS_CA_FILE": str(pki["authority"])}
    if mutual:
        values["TETHER_CLIENT_NATS_TLS_CERT_FILE"] = str(pki["client"])
        values["TETHER_CLIENT_NATS_TLS_KEY_FILE"] = str(pki["client-key"])
    own = (pki["client"], pki["client-key"]) if mutual else (None, None)
    async with await connect(server.url, name="maker", tls=client_context(pki["authority"], *own)) as bus:
        await bus.ensure(topology.base())
        await bus.ensure(topology.tenant("default", max_bytes=16 << 20))
    transport = load_client(values).transport()
    try:
        assert (await transport.conversations(10, None)).conversations == []
    finally:
        await transport.close()


def test_files_that_cannot_be_used_are_named(pki: Pki, tmp_path: Path) -> None:
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("no certificate")
    for files, setting in (
        ((rubbish, None, None), "ca_file"),
        ((tmp_path / "missing", None, None), "ca_file"),
        ((None, pki["client"], None), "key_file"),
        ((None, None, pki["client-key"]), "cert_file"),
        ((None, pki["client"], pki["server-key"]), "cert_file"),
        ((None, rubbish, rubbish), "cert_file"),
    ):
        with pytest.raises(TlsFilesError) as refused:
            client_context(*files)
        assert refused.value.setting == setting
    assert client_context(None, None, None) is None
    settings = load(ServiceSettings, {"TETHER_NATS_TLS_CA_FILE": str(rubbish)})
    with pytest.raises(ConfigurationError, match=r"TETHER_NATS_TLS_CA_FILE: .*rubbish\.pem holds no certificates"):
        settings.tls()
