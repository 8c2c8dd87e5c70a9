"""Real models: ``Agent(model="anthropic:...")``, or a ``ProviderModel`` where a string does not say enough.

Importing this loads no provider's SDK; the first request does.
"""

from assent.models.providers.model import ProviderModel
from assent.models.providers.names import PROVIDERS, check

__all__ = ["PROVIDERS", "ProviderModel", "check"]
