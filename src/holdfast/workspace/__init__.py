"""Tools for an agent that works on files: ``Workspace(".").tools``.

``files`` reads and changes them, ``shell`` runs commands, ``sandbox`` confines commands, ``policy`` decides which calls
ask.
"""

from holdfast.workspace.limits import Limits
from holdfast.workspace.policy.rules import RuleSet, narrow, remember_command
from holdfast.workspace.sandbox.base import Confinement
from holdfast.workspace.workspace import Workspace

__all__ = ["Confinement", "Limits", "RuleSet", "Workspace", "narrow", "remember_command"]
