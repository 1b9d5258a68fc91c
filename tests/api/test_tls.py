"""https: a controller with a certificate, a client that checks it, and words where something does not fit."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from weightdepot.api.client import ControllerClient
from weightdepot.api.server import CannotServe, check_certificate
from weightdepot.api.settings import Settings
from weightdepot.store.errors import ControllerUnavailable, InvalidRequest

from .helpers import Trainer, serving, unique


class Files:
    def __init__(self, folder: Path, host: str = "127.0.0.1", **options: object) -> None:
        authority = trustme.CA()
        issued = authority.issue_cert(host, **options)  # type: ignore[arg-type]
        self.ca, self.cert, self.key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
        authority.cert_pem.write_to_path(self.ca)
        for blob in issued.cert_chain_pems:
            blob.write_to_path(self.cert, append=True)
        issued.private_key_pem.write_to_path(self.key)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(redis_url: str, files: Files) -> Iterator[str]:
    options = ("--redis-url", redis_url, "--tls-cert", str(files.cert), "--tls-key", str(files.key))
    with serving(*options) as (url, _):
        assert url.startswith("https://")
        yield url


def test_everything_goes_over_https(secure: str, files: Files) -> None:
    with ControllerClient(secure, ca=str(files.ca)) as client:
        model = unique("model")
        Trainer(client, model, world_size=1).join_all().publish(1)
        assert client.latest(model, timeout=5).version == 1
        stream = client.events(model, timeout=0.2)
        assert next(stream).kind == "subscribed"


def test_the_authority_comes_from_the_environment_where_none_is_given(
    secure: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTDEPOT_CA", str(files.ca))
    with ControllerClient(secure) as client:
        client.ready(timeout=5)


def test_a_certificate_that_is_not_trusted_is_said_at_once(secure: str) -> None:
    """Asking again would meet the same certificate."""
    with ControllerClient(secure) as client:
        begun = time.monotonic()
        with pytest.raises(ControllerUnavailable, match="not trusted") as error:
            client.ready(timeout=30)
        assert time.monotonic() - begun < 5
    assert "WEIGHTDEPOT_CA" in error.value.message


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_an_authority_that_is_none_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidRequest, match=str(path)):
        ControllerClient("https://c", ca=str(path))


def test_a_certificate_and_a_key_that_do_not_fit_are_refused_at_the_start(
    files: Files, tmp_path: Path
) -> None:
    other = Files(tmp_path)
    locked = tmp_path / "locked.pem"
    key = load_pem_private_key(files.key.read_bytes(), None)
    locked.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password"))
    )
    for cert, its_key in (
        (files.cert, other.key),
        (files.cert, locked),
        (files.cert, tmp_path / "none.pem"),
        (files.key, files.key),
    ):
        with pytest.raises(CannotServe, match="PEM"):
            check_certificate(cert, its_key)
    check_certificate(files.cert, files.key)
    with pytest.raises(InvalidRequest, match="go together"):
        Settings(tls_cert=files.cert)


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": "another.host"},
        {"not_after": datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)},
    ],
    ids=["host", "expired"],
)
def test_a_certificate_for_another_host_or_of_the_past_is_not_trusted(
    redis_url: str, tmp_path: Path, wrong: dict[str, object]
) -> None:
    files = Files(tmp_path, **wrong)  # type: ignore[arg-type]
    options = ("--redis-url", redis_url, "--tls-cert", str(files.cert), "--tls-key", str(files.key))
    with (
        serving(*options) as (url, _),
        ControllerClient(url, ca=files.ca) as client,
        pytest.raises(ControllerUnavailable, match="not trusted"),
    ):
        client.ready(timeout=5)
