"""The messages that a model is sent.

``history`` keeps the turns that a request may show; ``compaction`` fits them into the agent's limits.
"""
