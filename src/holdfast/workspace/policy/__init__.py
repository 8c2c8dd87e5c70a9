"""Which calls run, ask or are denied: ``policy.Policy`` decides, by the mode, the ``rules`` and an ``analysis``."""
