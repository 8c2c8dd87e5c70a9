"""Calls that wait for people and clients: their index and deadlines, the decisions on them, and notices about them."""
