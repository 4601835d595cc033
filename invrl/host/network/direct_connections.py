"""Keeps connections to our own processes away from the environment's proxy.

A machine behind a proxy sets `http_proxy`, `https_proxy` or `all_proxy`, and most HTTP
clients then send even requests to 127.0.0.1 there. User code needs the proxy to reach
the internet, so the variables stay. The hosts of our own processes are added to
`no_proxy` instead, which clients in every language read. Our own clients ignore these
variables: `direct_client` for blocking calls, and `http_connection.py` in an event
loop.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import httpx

THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
WITHOUT_PROXIES = dict.fromkeys(
    (
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
    ),
    "",
)
"""Variables of a process that talks only to our processes, also on other machines.
`no_proxy=*` does not suffice: the HTTP client of the routers (reqwest) takes it for
names only, not for addresses."""
_NO_PROXY = ("no_proxy", "NO_PROXY")
"""Clients read one spelling or the other."""
_NO_GRPC_PROXY = "no_grpc_proxy"
"""gRPC reads this one instead, if it is set."""


def bypass_proxies(*hosts: str) -> None:
    """Let this process, and what it starts from now on, reach `hosts` without a
    proxy."""
    # Clients disagree about which spelling counts if they differ, so both get all
    # hosts.
    exempt = ",".join(os.environ.get(name, "") for name in _NO_PROXY)
    os.environ.update(dict.fromkeys(_NO_PROXY, _with_hosts(exempt, hosts)))
    if _NO_GRPC_PROXY in os.environ:
        exempt = os.environ[_NO_GRPC_PROXY]
        os.environ[_NO_GRPC_PROXY] = _with_hosts(exempt, hosts)


def _with_hosts(exempt: str, hosts: Iterable[str]) -> str:
    """Add hosts to a comma-separated list."""
    names = [host.strip() for host in (*exempt.split(","), *hosts)]
    if "*" in names:
        return "*"  # Python's clients accept it only alone
    return ",".join(dict.fromkeys(name for name in names if name))


def direct_client(
    url: str, *, timeout_s: float, headers: Mapping[str, str] | None = None
) -> httpx.Client:
    """Return a client of the server at `url`, an absolute URL or the base of all paths.
    It uses no proxy. `timeout_s`: for each step of a request (connect, write, each
    read)."""
    import httpx  # 0.1 s, which `invrl --help` need not spend

    return httpx.Client(
        base_url=url,
        headers=headers,
        timeout=timeout_s,
        trust_env=False,
        # Loading the certificates takes 20 ms, and only https needs them.
        verify=url.startswith("https:"),
    )
