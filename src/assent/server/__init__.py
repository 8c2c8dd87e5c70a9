"""The HTTP API and the page: ``app(runtime, auth=...)`` is an ASGI application, alone or mounted in another."""

from assent.server.app import App, Limits, app
from assent.server.auth import Auth, MaySee, OpenedBy, TokenAuth

__all__ = ["App", "Auth", "Limits", "MaySee", "OpenedBy", "TokenAuth", "app"]
