"""Bridges to other protocols, one file or package each. They use the public verbs of ``Runtime`` and the tool API."""
