"""For all tests: Ctrl-C is Ctrl-C, also where a shell started them in the background and had it ignored; and what
Hypothesis draws may take as long as a busy machine needs for it."""

import signal

from hypothesis import settings

signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
