"""Tools for an agent that works on files: ``Workspace(".").tools``."""

from holdfast.workspace.launch import Confinement
from holdfast.workspace.limits import Limits
from holdfast.workspace.workspace import Workspace

__all__ = ["Confinement", "Limits", "Workspace"]
