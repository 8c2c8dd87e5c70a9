"""Ask for a refund, and approve it: two jobs, which different processes of the worker may run."""

from jobs import ask, decide

asked = ask.delay("Refund order 42", by="ann").get(timeout=60)
[pending] = asked["pending"]
print("waits:", pending["prompt"])
print("reply:", decide.delay(asked["conversation"], pending["call"], pending["digest"], by="boss").get(timeout=60))
