"""The configuration of an nginx in front of one or several gateways, correct for streams of events.

Without it, nginx buffers responses, so that tokens arrive in bursts, closes a stream that is silent for 60 s, and opens
a connection per request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from armillary.errors import BadInput
from armillary.fleet.gateway.gateway_config import GatewaySettings

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}")
_NAME = re.compile(r"[A-Za-z0-9.*_-]+")
_PATH = re.compile(r"(/[A-Za-z0-9._-]+)*")


@dataclass(frozen=True, kw_only=True)
class NginxSettings:
    """What the configuration depends on."""

    gateways: Sequence[str]  # host:port of each
    port: int = 80
    server_name: str = "_"
    certificate: Path | None = None  # with its key: TLS on this port
    certificate_key: Path | None = None
    max_body_bytes: int = 4_000_000
    longest_silence_s: float = 450.0  # of the gateway; nginx waits longer, so that the gateway's error arrives
    connections_per_client: int = 100
    gateway_tls: bool = False  # the gateways serve HTTPS themselves
    root_path: str = ""  # that clients send before /v1, and the gateways take away

    def __post_init__(self) -> None:
        for address in self.gateways:
            if not _ADDRESS.fullmatch(address):
                raise BadInput(f"'{address}' is not an address; write it like 127.0.0.1:9000")
        if not self.gateways:
            raise BadInput("no gateway given; name at least one, like 127.0.0.1:9000")
        if not _PATH.fullmatch(self.root_path):
            raise BadInput(
                f"'{self.root_path}' is not a path for nginx; write it like /llm, without a slash at its end"
            )
        if not _NAME.fullmatch(self.server_name):
            raise BadInput(f"'{self.server_name}' is not a server name; write it like api.example.com")
        if (self.certificate is None) != (self.certificate_key is None):
            raise BadInput("TLS needs both the certificate and its key; give both or neither")


def longest_silence_s(settings: GatewaySettings) -> float:
    """Seconds for which a gateway may send nothing: waiting for a slot and for the first byte of every replica that it
    tries, or between two parts of a response."""
    first_s = settings.max_wait_s + (settings.retries + 1) * (
        settings.connect_timeout_s + settings.first_token_timeout_s
    )
    return max(settings.idle_timeout_s, first_s)


def config_before(settings: GatewaySettings, host: str, gateway_port: int, *, port: int = 80) -> str:
    """The configuration of an nginx on `port` in front of one gateway with these settings."""
    address = f"[{host}]:{gateway_port}" if ":" in host else f"{host}:{gateway_port}"
    return nginx_config(
        NginxSettings(
            gateways=[address],
            port=port,
            max_body_bytes=settings.max_body_bytes,
            longest_silence_s=longest_silence_s(settings),
            gateway_tls=bool(settings.tls_certificate),
            root_path=settings.root_path.rstrip("/"),
        )
    )


def nginx_config(settings: NginxSettings) -> str:
    """An `http` block's content, for a file under /etc/nginx/conf.d."""
    servers = "\n".join(f"    server {address} max_fails=2 fail_timeout=5s;" for address in settings.gateways)
    return _CONFIG.format(
        servers=servers,
        listen=f"{settings.port} ssl" if settings.certificate else str(settings.port),
        name=settings.server_name,
        tls=_tls(settings),
        body=settings.max_body_bytes,
        read_s=int(settings.longest_silence_s) + 30,
        scheme="https" if settings.gateway_tls else "http",
        root=settings.root_path,
        connections=settings.connections_per_client,
    )


def _tls(settings: NginxSettings) -> str:
    if settings.certificate is None:
        return ""
    return (
        f"\n    ssl_certificate {settings.certificate};\n    ssl_certificate_key {settings.certificate_key};"
        "\n    ssl_protocols TLSv1.2 TLSv1.3;\n    ssl_session_cache shared:armillary_tls:10m;"
    )


_CONFIG = """# Written by armillary gateway --nginx-config. nginx -t checks it.
upstream armillary_gateways {{
    least_conn;
{servers}
    keepalive 256;                        # connections stay open between requests
}}

map $http_x_request_id $armillary_request_id {{
    default $http_x_request_id;           # the client's own
    "" $request_id;
}}

limit_conn_zone $binary_remote_addr zone=armillary_clients:10m;

server {{
    listen {listen};
    server_name {name};{tls}
    client_max_body_size {body};
    client_body_timeout 30s;
    limit_conn armillary_clients {connections};
    limit_conn_status 429;
    tcp_nodelay on;
    gzip off;                             # would hold back tokens to compress them

    location {root}/v1/ {{
        proxy_pass {scheme}://armillary_gateways;
        proxy_http_version 1.1;
        proxy_set_header Connection "";   # keep-alive to the gateways
        proxy_set_header Host $host;
        proxy_set_header X-Forwarded-For $remote_addr;
        proxy_set_header X-Forwarded-Proto $scheme;
        proxy_set_header X-Request-ID $armillary_request_id;
        proxy_buffering off;              # a token is passed on when it arrives
        proxy_cache off;
        proxy_connect_timeout 2s;
        proxy_send_timeout 60s;
        proxy_read_timeout {read_s}s;    # without a byte; the gateway gives up first
        proxy_next_upstream error timeout;  # another gateway, but not for a POST that was sent already
        proxy_next_upstream_tries 2;
    }}

    location = {root}/health {{ proxy_pass {scheme}://armillary_gateways; }}
    location = {root}/ready {{ proxy_pass {scheme}://armillary_gateways; }}
    location / {{ return 404; }}          # /metrics and everything else stay inside
}}
"""
