"""Bridges: other protocols that drive conversations or answer their calls."""
