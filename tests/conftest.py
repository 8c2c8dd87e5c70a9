"""For all tests: Ctrl-C is Ctrl-C, also where a shell started them in the background and had it ignored."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
