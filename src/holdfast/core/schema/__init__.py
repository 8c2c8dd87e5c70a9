"""JSON Schema: made from Python types and docstrings, and used to validate arguments, answers and results."""
