"""Run the snippets of one page in the working directory. Usage: python run_page.py PAGE.md

```python blocks run in order in one namespace. A block with title="name" is also written to that file.
```sh run blocks run line by line in a shell; a line ends in `# exit N` where it does not end with 0 or 75 (at rest).
A ```text block after either must equal the printed output; `...` matches any text, as in a doctest.
A block that follows `<!-- not run -->` is shown only.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import traceback
import types
from pathlib import Path

BLOCK = re.compile(r"(?ms)^(?:(<!-- not run -->)\n+)?^```([^\n]*)\n(.*?)^```$")


def run(page: Path) -> int:
    """Run the blocks of a page, and return the number of checked outputs."""
    text = page.read_text()
    module = sys.modules["__main__"] = types.ModuleType("__main__")  # the page is the main program, not this file
    namespace = vars(module)
    printed: str | None = None
    checked = 0
    for found in BLOCK.finditer(text):
        shown_only, info, body = found.groups()
        where = f"{page.name}:{text.count(chr(10), 0, found.start(2)) + 1}"
        if shown_only:
            printed = None
            continue
        if named := re.search(r'title="([\w./-]+)"', info):
            Path(named[1]).write_text(body)
        if info.startswith("python"):
            printed = _python(body, where, namespace)
        elif info == "sh run":
            printed = _shell(body, where)
        elif info == "text":
            if printed is None:
                raise SystemExit(f"{where}: a text block that follows nothing that runs")
            if not _matches(body, printed):
                raise SystemExit(f"{where}: the page shows\n{body}\nand it prints\n{printed}")
            printed = None
            checked += 1
        else:
            printed = None
    return checked


def _python(body: str, where: str, namespace: dict[str, object]) -> str:
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(body, where, "exec", dont_inherit=True), namespace)
    except Exception:
        raise SystemExit(f"{where}: {traceback.format_exc()}") from None
    return out.getvalue()


def _shell(body: str, where: str) -> str:
    printed = ""
    for line in body.splitlines():
        command = ["sh", "-c", line]
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
        wanted = re.search(r"# exit (\d+)$", line)
        if ran.returncode not in ((int(wanted[1]),) if wanted else (0, 75)):
            raise SystemExit(f"{where}: `{line}` exits with {ran.returncode}:\n{ran.stdout}")
        printed += ran.stdout
    return printed


def _matches(shown: str, printed: str) -> bool:
    def lines(text: str) -> str:
        text = re.sub(r"expires in [\d dhms]*\d [dhms]", "expires in 7 d", text)  # time passes during the run
        return "\n".join(re.sub(r" +│$", " │", line.rstrip()) for line in text.strip().splitlines())

    pattern = re.escape(lines(shown)).replace(re.escape("..."), ".*?")
    return re.fullmatch(pattern, lines(printed), flags=re.S) is not None


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    print(run(Path(sys.argv[1])))
