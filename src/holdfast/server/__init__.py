"""The HTTP API and the page. ``app(runtime, auth=...)`` returns an ASGI application to serve or to mount."""

from holdfast.server.app import App, app
from holdfast.server.auth import Auth, MaySee, OpenedBy, TokenAuth
from holdfast.server.limits import Limits

__all__ = ["App", "Auth", "Limits", "MaySee", "OpenedBy", "TokenAuth", "app"]
