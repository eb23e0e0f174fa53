"""Access control: allowed hosts, origins and the token of every request, and the security headers of every answer."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
PUBLIC = frozenset(("/", "/page.js", "/page.css", "/health"))
"""Routes that need no token: they hold nothing of the model."""
SUBPROTOCOL = "mrconv"
"""WebSocket subprotocol of the page, which offers the token as a second one: browsers set no other header."""
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


def host_name(host: str) -> str:
    """Return the name or address of a Host header, without its port."""
    return (urlsplit(f"//{host}").hostname or "").rstrip(".")


class AccessMiddleware:
    """ASGI middleware that rejects requests of other hosts, of pages of other origins and without the token.

    A page that rebinds its own name to this server's address sends that name as the host.

    Args:
        token: the bearer token; None if none is required.
        hosts: allowed names besides those of the local machine and the address of the connection.
    """

    def __init__(self, app: ASGIApp, token: str | None, hosts: Iterable[str]) -> None:
        self.app, self.token = app, token
        self.hosts = {*LOCAL_NAMES, *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, or answer with the reason why not."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def secured(message: Message) -> None:
            if message["type"].endswith("response.start"):
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        rejection = self._rejection(scope, Headers(scope=scope))
        await (rejection or self.app)(scope, receive, secured)

    def _rejection(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        try:
            names = {host_name(host) for host in headers.getlist("host")}
            origins = {urlsplit(origin).netloc.lower() for origin in headers.getlist("origin")}
        except ValueError:  # an invalid IPv6 address or port
            return JSONResponse({"error": "the Host or Origin of the request is not an address"}, 400)
        address = (scope.get("server") or ("",))[0]
        if foreign := names - self.hosts - {address}:
            name = ascii(min(foreign))
            return JSONResponse({"error": f"the host {name:.100} is not allowed: see --allow-host"}, 421)
        if origins - {headers.get("host", "").lower()}:
            return JSONResponse({"error": "pages of other origins may not use this server"}, 403)
        if self.token is not None and scope["path"] not in PUBLIC and not self._has_token(scope, headers):
            message = "this server requires a token: send the header Authorization: Bearer TOKEN"
            return JSONResponse({"error": message}, 401, {"www-authenticate": "Bearer"})
        return None

    def _has_token(self, scope: Scope, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        offered = [given if scheme.lower() == "bearer" else "", *scope.get("subprotocols", [])]
        expected = (self.token or "").encode()
        return any(hmac.compare_digest(each.strip().encode(), expected) for each in offered)
