"""Exits 0 when the gRPC service at ADDRESS says that it is serving: the healthcheck of its container."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

ANSWER_S_MAX = 3.0
CERTIFICATES = Path("/certificates")  # as in deploy/kvcommons.toml


def open_channel(address: str, folder: Path) -> grpc.Channel:
    """As the service itself, where it has certificates."""
    options = [("grpc.enable_http_proxy", 0)]
    if not (folder / "tls.crt").exists():
        return grpc.insecure_channel(address, options=options)
    authority, key, certificate = ((folder / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
    names = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    own = names.value.get_values_for_type(x509.DNSName)[0]
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    return grpc.secure_channel(address, credentials, [*options, ("grpc.ssl_target_name_override", own)])


def main(address: str, folder: Path = CERTIFICATES) -> int:
    with open_channel(address, folder) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=ANSWER_S_MAX, wait_for_ready=True
            )
        except grpc.RpcError as error:
            print(f"{address}: {error.code().name}", file=sys.stderr)
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
    return 0 if reply.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7000"))
