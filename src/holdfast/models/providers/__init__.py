"""Models of real providers: ``Agent(model="anthropic:...")``, or a ``ProviderModel`` to set a key, URL or timeouts.

Importing this package loads no provider's SDK; the first request does. In the modules below, "the layer" is
pydantic-ai, which wraps the SDKs:

    names.py    model strings, and what each provider needs (extra, key, URL)
    model.py    ``ProviderModel``: one request from start to end
    clients.py  SDK clients and HTTP connections
    render.py   our messages and tools -> the layer's
    reply.py    the layer's stream -> our parts
    output.py   structured answers
    errors.py   the layer's exceptions -> ``ModelError``
"""

from holdfast.models.providers.model import ProviderModel
from holdfast.models.providers.names import PROVIDERS, check

__all__ = ["PROVIDERS", "ProviderModel", "check"]
