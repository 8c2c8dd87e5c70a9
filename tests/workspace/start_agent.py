"""The process that dies while it starts a command, for ``test_workspace_kills``.

It imports everything once and forks a process for each line that it reads (a JSON object). That process starts the
command, kills itself with SIGKILL at the moment that the line names, and this one says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from holdfast.workspace.files.root import Root
from holdfast.workspace.limits import Limits
from holdfast.workspace.sandbox.base import Launch
from holdfast.workspace.sandbox.probe import find_sandbox
from holdfast.workspace.shell.output import Output
from holdfast.workspace.shell.process import ProcessTree

AFTER_SERVER = 'while [ -d "/proc/$0" ]; do :; done; exec "$@"'
"""Starts the supervisor once the server is gone: on a busy machine it might otherwise look before the kill."""


async def start_and_die(order: dict[str, Any]) -> None:
    root = Root(Path(order["root"]))
    launch = find_sandbox(order["level"]).wrap(
        ["/bin/sh", "-c", order["command"]], root=root, cwd=".", writable=True, env={"PATH": "/usr/bin:/bin"}
    )
    if order["moment"] == "forked":
        launch = replace(launch, argv=("/bin/sh", "-c", AFTER_SERVER, str(os.getpid()), *launch.argv))
    await ProcessTree.start(launch, Output(Limits()), None)
    wait_for(launch, order["moment"])
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(launch: Launch, moment: str | float) -> None:
    """Wait until the sandbox has reported its first process, or for some seconds."""
    if moment == "reported":
        select.select([launch.info_fd], [], [], 30)
    elif moment != "forked":
        time.sleep(float(moment))


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        find_sandbox(order["level"])  # what it finds is kept for the forked processes
        child = os.fork()
        if child == 0:
            asyncio.run(start_and_die(order))
        os.waitpid(child, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
