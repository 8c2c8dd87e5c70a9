"""Assent below /assent of a Django project, with Django's sessions: `uvicorn with_django:application`.

What stands here in one file are your project's settings.py, urls.py and asgi.py. Open
http://127.0.0.1:8000/login/ada and then /assent/.
"""

import os
import secrets

from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import HttpResponse
from django.urls import path
from hello import agent

from assent import Runtime
from assent.server import OpenedBy, app

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


def login(request, name):
    """Your own login stands here."""
    request.session["user"] = name
    return HttpResponse(f"hello {name}")


urlpatterns = [path("login/<str:name>", login)]


def who(request):
    """Who asks, from Django's session; None: they have to log in first."""
    return SessionStore(request.cookies.get(settings.SESSION_COOKIE_NAME, "")).get("user")


runtime = Runtime(agent, store=os.environ.get("ASSENT_STORE", "sqlite:///assent.db"))
assent = app(runtime, auth=who, may_see=OpenedBy(runtime))


async def application(scope, receive, send):
    """Django has no lifespan and no mounts: both are three lines."""
    if scope["type"] == "lifespan":
        await assent(scope, receive, send)
    elif scope["path"] == "/assent" or scope["path"].startswith("/assent/"):
        await assent({**scope, "root_path": f"{scope.get('root_path', '')}/assent"}, receive, send)
    else:
        await django(scope, receive, send)
