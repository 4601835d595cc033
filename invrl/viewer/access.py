"""Access control of the page: only holders of its key may read it, from this machine's
browser, and nobody through another site.

The key is random and new with every start. A browser gets it once in the URL, keeps it
as a cookie that scripts cannot read and other sites do not send, and is redirected to
the same URL without it. Model output is hostile text: the policy of every response
allows only the page's own scripts, styles and connections.
"""

import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response."""
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_EVERYWHERE = ("0.0.0.0", "::", "")
_YEAR_S = 365 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused request: HTTP status and reason."""

    status: int
    reason: str
    fix: str


@dataclass(frozen=True, slots=True)
class Access:
    """`port`: of the page's server. `hosts`: names under which the page is served;
    empty: any, for a server that listens on all addresses."""

    port: int
    hosts: frozenset[str]
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def cookie_name(self) -> str:
        """Name that tells ports apart, which cookies do not."""
        return f"invrl-view-{self.port}"

    @property
    def cookie(self) -> str:
        """Value of Set-Cookie."""
        return f"{self.cookie_name}={self.key}; HttpOnly; SameSite=Strict; Path=/; Max-Age={_YEAR_S}"

    def refusal(
        self, method: str, host: str, headers: Mapping[str, str], key: str
    ) -> Refusal | None:
        """Return why a request is refused; None if it is not. `host`: its Host header.
        `key`: the one in its URL."""
        if self.hosts and host.lower() not in self.hosts:
            fix = "use the URL that `invrl view` printed; --host NAME serves under another one"
            return Refusal(421, f"this page is not served as {host!r}", fix)
        if method not in ("GET", "HEAD"):
            return Refusal(405, "this page only reads", "use GET")
        if not any(
            self._is_key(candidate) for candidate in (key, *self._given(headers))
        ):
            return Refusal(
                401,
                "the key is missing or wrong",
                "open the URL that `invrl view` printed",
            )
        return None

    def _given(self, headers: Mapping[str, str]) -> Sequence[str]:
        """Return the keys in a request's headers."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        keys = [token.strip()] if scheme.lower() == "bearer" else []
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return keys
        if self.cookie_name in cookies:
            keys.append(cookies[self.cookie_name].value)
        return keys

    def _is_key(self, candidate: str) -> bool:
        return hmac.compare_digest(candidate.encode(), self.key.encode())


def access_for(host: str, port: int) -> Access:
    """Make the access for a server that listens on `host`, with a new key."""
    names = {host} if host not in _EVERYWHERE else set[str]()
    if host in _LOOPBACK or host == "::1":
        names = set(_LOOPBACK)
    bracketed = {
        f"[{name}]" if ":" in name and not name.startswith("[") else name
        for name in names
    }
    return Access(
        port=port, hosts=frozenset(f"{name}:{port}".lower() for name in bracketed)
    )


def without_key(query: str) -> str:
    """Return the query of a URL without the key."""
    kept = [
        (name, value)
        for name, value in parse_qsl(query, keep_blank_values=True)
        if name != "key"
    ]
    return urlencode(kept)
