"""The steps of a turn: model calls and tool calls, and what they need: prompts, replies, hooks, tasks, user code."""
