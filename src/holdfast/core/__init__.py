"""The core: events, state and decisions of a conversation as pure functions. No I/O, no clock and no tool code."""
