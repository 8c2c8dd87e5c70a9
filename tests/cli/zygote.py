"""Forks a ready interpreter for each command: a real process that does not pay for its imports again.

One job a line on standard input, as JSON; its exit status on standard output.
"""

import json
import os
import sys

import rich.panel
import rich.table  # noqa: F401

import holdfast.cli.app
import holdfast.cli.commands.copy
import holdfast.cli.commands.decide
import holdfast.cli.commands.log
import holdfast.cli.commands.pending_list
import holdfast.cli.commands.run
import holdfast.stores.postgres.store
import holdfast.stores.sqlite.store


def child(job):
    for target, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_CREAT), (2, os.O_WRONLY | os.O_CREAT)):
        opened = os.open(job["files"][target], flags)
        os.dup2(opened, target)
        os.close(opened)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.path[0] = job["cwd"]
    sys.argv = [holdfast.__path__[0] + "/__main__.py", *(os.fsdecode(bytes.fromhex(word)) for word in job["words"])]
    code = holdfast.cli.app.main()
    sys.stdout.flush()
    return code


def serve():
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            code = 70
            try:
                code = child(json.loads(line))
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
