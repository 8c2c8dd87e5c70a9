"""For all tests: Ctrl-C is Ctrl-C, also where a shell started them in the background and had it ignored; what
Hypothesis draws may take as long as a busy machine needs for it; and nothing is kept in the user's state directory."""

import atexit
import os
import shutil
import signal
import tempfile

from hypothesis import settings

signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

os.environ["XDG_STATE_HOME"] = _state = tempfile.mkdtemp(prefix="assent-state-")
_pid = os.getpid()
atexit.register(lambda: shutil.rmtree(_state, ignore_errors=True) if os.getpid() == _pid else None)
