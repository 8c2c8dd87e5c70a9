"""Holdfast under /holdfast in a Django project, with Django's sessions: `uvicorn with_django:application`.

This file combines the settings.py, urls.py, views.py and asgi.py of a project. Open http://127.0.0.1:8000/login/ada
and then /holdfast/. `POST /ask` with a field `text` is a view of the project's own that runs the agent.
"""

import os
import secrets
from typing import Any

from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from hello import agent
from starlette.requests import Request

from holdfast import Runtime
from holdfast.server import OpenedBy, app

settings.configure(
    SECRET_KEY=os.environ.get("SECRET_KEY", secrets.token_urlsafe()),
    ALLOWED_HOSTS=["localhost", "127.0.0.1"],
    ROOT_URLCONF=__name__,
    MIDDLEWARE=["django.contrib.sessions.middleware.SessionMiddleware"],
    SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
    SESSION_COOKIE_SAMESITE="Strict",
)
django = get_asgi_application()

from django.contrib.sessions.backends.signed_cookies import SessionStore  # noqa: E402  (needs the settings)


def login(request: HttpRequest, name: str) -> HttpResponse:
    """Replace this with your own login."""
    request.session["user"] = name
    return HttpResponse(f"hello {name}")


async def ask(request: HttpRequest) -> HttpResponse:
    """Run the agent for the user; return its reply, and what waits for a decision on the page."""
    user = request.session.get("user")
    if user is None or request.method != "POST":
        return HttpResponse(status=401 if user is None else 405)
    result = await runtime.run(request.POST["text"], by=user)
    waiting = [pending.prompt for pending in result.pending]
    return JsonResponse({"text": result.text, "waiting": waiting, "conversation": result.conversation})


urlpatterns = [path("login/<str:name>", login), path("ask", ask)]


def authenticate(request: Request) -> str | None:
    """Return the user's name from Django's session; None refuses the request."""
    return SessionStore(request.cookies.get(settings.SESSION_COOKIE_NAME, "")).get("user")


runtime = Runtime(agent, store=os.environ.get("HOLDFAST_STORE", "sqlite:///holdfast.db"))
holdfast = app(runtime, auth=authenticate, may_see=OpenedBy(runtime))


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Route requests to Holdfast or Django. Django supports neither lifespan nor mounts."""
    if scope["type"] == "lifespan":
        await holdfast(scope, receive, send)
    elif scope["path"] == "/holdfast" or scope["path"].startswith("/holdfast/"):
        await holdfast({**scope, "root_path": f"{scope.get('root_path', '')}/holdfast"}, receive, send)
    else:
        await django(scope, receive, send)
