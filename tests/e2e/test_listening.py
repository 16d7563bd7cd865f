"""Where the server listens: TLS, a Unix socket, below a proxy's prefix; and the phases of its start."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Started, need, start, stub_command
from tests.e2e.test_security import client_of

BODY = {"messages": [{"role": "user", "content": "one two"}]}


def said(client: Any, path: str = "/v1/chat/completions") -> str:
    reply = client.post(path, json=BODY)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def make_certificate(folder: Path) -> Path:
    need("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "server.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + secret)
    return path


def test_tls(model_here: None, tmp_path: Path) -> None:
    import httpx

    certificate = make_certificate(tmp_path)
    started = start(stub_command("--tls-cert", str(certificate), "--root-path", "/llm"))
    assert started.url.startswith("https://")
    context = ssl.create_default_context(cafile=str(certificate))
    url = f"https://localhost:{started.url.rsplit(':', 1)[1]}"
    with httpx.Client(base_url=url, verify=context, timeout=60) as client:
        assert said(client) == "one two" and said(client, "/llm/v1/chat/completions") == "one two"
        with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as reply:
            assert reply.read().endswith(b"data: [DONE]\n\n")
        assert 'href="page/' in client.get("/llm/").text and client.get("/llm/page/app.js").status_code == 200
        assert client.get("/llm").status_code == client.get("/llmx/healthz").status_code == 404
    with pytest.raises(httpx.TransportError):
        httpx.get(started.url.replace("https", "http") + "/healthz", timeout=60)
    started.stop()


def test_unix_socket(model_here: None, tmp_path: Path) -> None:
    import httpx

    path = tmp_path / "quire.sock"
    for _ in range(2):  # a socket that a killed server left is replaced
        started = start(stub_command("--uds", str(path)))
        assert path.is_socket() and path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=60
        ) as client:
            assert said(client) == "one two"
            phases = client.get("/v1/stats").json()["start"]
            assert set(phases) >= {"tokenizer", "engine", "total"} and phases["total"] >= phases["engine"] > 0
        assert any("started" in line and "engine=" in line for line in started.lines), started.lines
        started.process.kill()
        started.process.wait()
    started = start(stub_command("--uds", str(path)))
    assert started.stop() == 0 and not path.exists()


@pytest.mark.parametrize(
    "flags,words",
    [
        (("--tls-cert", "/nowhere.pem"), "can't be used"),
        (("--tls-key", "/nowhere.pem"), "needs --tls-cert"),
        (("--uds", "/nowhere/x.sock"), "Can't listen on /nowhere/x.sock"),
    ],
)
def test_what_can_not_be_listened_on(model_here: None, flags: tuple[str, ...], words: str) -> None:
    import subprocess

    done = subprocess.run(stub_command(*flags), capture_output=True, text=True, timeout=300)
    assert done.returncode in (1, 2) and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_vllms_names_of_metrics(model_here: None) -> None:
    started: Started = start(stub_command("--metric-names", "vllm", "--served-model-name", "parrot"))
    with client_of(started, None) as client:
        said(client)
        lines = client.get("/metrics").text.splitlines()
    label = '{engine="0",model_name="parrot"}'
    assert (
        f"vllm:num_requests_running{label} 0.0" in lines
        and f"vllm:time_to_first_token_seconds_count{label} 1.0" in lines
    )
    assert f"vllm:generation_tokens_total{label} 3.0" in lines and "quire_http_open 1.0" in lines
    assert any(line.startswith("vllm:kv_cache_usage_perc{") for line in lines)
    started.stop()
