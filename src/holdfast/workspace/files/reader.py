"""The read tool: one page of a text file, an image, or a description of other content.

The file is streamed in chunks, whatever its size, so memory is bounded by the page.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import Any

from holdfast.core.images import image_type
from holdfast.core.tool import Result
from holdfast.errors import ToolError
from holdfast.tools.call import Call
from holdfast.tools.declare import Tool
from holdfast.tools.options import MOST_RESULT
from holdfast.workspace.files import text
from holdfast.workspace.files.contents import FileWorkspace
from holdfast.workspace.files.root import CHUNK, storable_text

READ = """Read a file of the workspace: one page of lines, exactly as they are.

The result has the text, lines_total, next_offset (null after the last line: pass it as offset to read on) and version.
Pass the version as `expected` to write, edit or apply_patch, so that nobody's changes are overwritten. A line that is
too long is cut, with a marker. Images are shown; of other binary files you get size and type. Give paths relative to
the workspace. To find something in files, use grep."""
READ_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "The file, relative to the workspace, such as src/app.py"},
        "offset": {
            "type": "integer",
            "minimum": 0,
            "description": "The first line to return; 1 (default) is the first",
        },
        "limit": {"type": "integer", "minimum": 1, "description": "The most lines to return; 2000 by default"},
    },
    "required": ["path"],
    "additionalProperties": False,
}


def read_tool(ws: FileWorkspace) -> Tool:
    """Return the read tool of a workspace."""

    def judge(args: dict[str, Any], call: Call) -> Any:
        return ws.policy.judge_paths("read", ws_paths(ws, [args["path"]]), writes=False)

    async def read(args: dict[str, Any], call: Call) -> Result:
        refuse_denied(await asyncio.to_thread(judge, args, call))
        return await asyncio.to_thread(read_page, ws, args, call)

    async def preview(args: dict[str, Any], call: Call) -> dict[str, Any]:
        refuse_denied(await asyncio.to_thread(judge, args, call))
        return await asyncio.to_thread(preview_read, ws, args)

    return Tool.declare(
        name="read",
        handler=read,
        preview=preview,
        description=READ,
        parameters=READ_PARAMETERS,
        approval=ws.approval(judge),
        risk="low",
        recovery="redispatch",
        result_bytes=MOST_RESULT,
    )


def ws_paths(ws: FileWorkspace, paths: list[str]) -> list[str]:
    """Return the paths that a rule must allow: each as given and, where a link leads elsewhere, as it really is."""
    names: list[str] = []
    for path in paths:
        name = ws.root.normalise(path)
        names += [name, ws.root.real_path(name)]
    return list(dict.fromkeys(names))


def refuse_denied(ruling: Any) -> None:
    """Raise ``permission_denied`` for a call that the mode or a rule denies, whatever was approved."""
    if ruling.effect == "deny":
        raise ToolError("permission_denied", ruling.reason)


def preview_read(ws: FileWorkspace, args: dict[str, Any]) -> dict[str, Any]:
    """Return what a read would open; raise the error that it would give."""
    path = ws.root.normalise(args["path"])
    fd, real = ws.root.open_real(path)
    try:
        link = {"leads_to": storable_text(real)} if real != path else {}
        return {"path": path, "bytes": os.fstat(fd).st_size} | link
    finally:
        os.close(fd)


def read_page(ws: FileWorkspace, args: dict[str, Any], call: Call) -> Result:
    """Open the file once, look at its beginning, and return the page, the image or the description."""
    path = ws.root.normalise(args["path"])
    fd, real = ws.root.open_real(path)
    try:
        size = os.fstat(fd).st_size
        head = _read_fully(fd, min(size, text.SAMPLE_BYTES))
        kind = image_type(head)
        if kind is not None and size <= ws.limits.image_bytes:
            image = _show_image(path, head + _read_fully(fd, size - len(head)), kind, call)
            ws.seen.record(call.conversation, real, image.output["version"], None)
            return image
        if kind is not None or text.is_binary(head):
            version = None
            if size <= ws.limits.edited_bytes:  # it can be replaced by write, so its version is needed
                version = text.hash_content(head + _read_fully(fd, size - len(head)))
                ws.seen.record(call.conversation, real, version, None)
            return Result(_describe_binary(path, head, size, kind) | {"version": version})
        return Result(_Reading(ws, path, real, size, args, call).run(fd, head))
    except OSError as error:
        ws.root.raise_error(error, path, "read_failed")
    finally:
        os.close(fd)


def _read_fully(fd: int, size: int) -> bytes:
    chunks: list[bytes] = []
    while size > 0 and (chunk := os.read(fd, min(size, CHUNK))):
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _show_image(path: str, content: bytes, kind: str, call: Call) -> Result:
    artifact = call.keep(content, kind, name=path.rpartition("/")[2])
    facts = {"path": path, "media_type": kind, "size": artifact.size, "version": artifact.sha256}
    return Result(facts, images=[artifact])


def _describe_binary(path: str, head: bytes, size: int, image: str | None) -> dict[str, Any]:
    kind = image or text.media_type(head)
    if image:
        note = "This image is too large to be shown. Make a smaller copy with a command and read that."
    elif "utf-16" in kind:
        note = "This is UTF-16 text. Convert it to UTF-8 with a command, such as iconv, and read the copy."
    else:
        note = "This is not text, so it is only described. Use a command that understands the format."
    return {
        "path": path,
        "binary": True,
        "media_type": kind,
        "size": size,
        "first_bytes": head[:32].hex(" "),
        "note": note,
    }


class _Reading:
    """One read of a text file."""

    def __init__(self, ws: FileWorkspace, path: str, real: str, size: int, args: dict[str, Any], call: Call):
        limits = ws.limits
        self.ws, self.path, self.real, self.size, self.call = ws, path, real, size, call
        self.page = text.Page(
            max(1, args.get("offset", 1)),
            min(args.get("limit", limits.read_lines), limits.read_lines),
            max_bytes=limits.read_bytes,
            line_characters=limits.line_characters,
        )
        self.counted = size <= limits.paged_bytes
        """A larger file is neither counted nor hashed to its end: the page is all that is read."""

    def run(self, fd: int, head: bytes) -> dict[str, Any]:
        digest, remembered = hashlib.sha256(), bytearray()
        chunk, read = head, 0
        while chunk:
            read += len(chunk)
            self.page.feed(chunk)
            if self.counted:
                digest.update(chunk)
            if self.size <= self.ws.seen.file_bytes:
                remembered += chunk
            self._check_effort(read)
            if self.page.full and not self.counted:
                return self._result(None, None)
            chunk = os.read(fd, min(CHUNK, self.size - read)) if read < self.size else b""
        self.page.finish()
        version = digest.hexdigest() if self.counted else None
        if version is not None:
            kept = bytes(remembered) if self.size <= self.ws.seen.file_bytes else None
            self.ws.seen.record(self.call.conversation, self.real, version, kept)
        return self._result(self.page.line - 1, version)

    def _check_effort(self, read: int) -> None:
        if self.call.cancelled:
            raise ToolError("cancelled", "the call was cancelled")
        if read > self.ws.limits.scanned_bytes:
            raise ToolError(
                "too_large",
                f"line {self.page.offset} of {self.path!r} is more than {self.ws.limits.scanned_bytes} bytes into the "
                "file, or a line there is that long. Find what you need with grep, or cut it out with a command",
                {"path": self.path, "size": self.size},
            )

    def _result(self, total: int | None, version: str | None) -> dict[str, Any]:
        page = self.page
        more = page.full if total is None else page.next_line <= total
        facts: dict[str, Any] = {
            "path": self.path,
            "text": page.text,
            "offset": page.offset,
            "lines_returned": page.lines_returned,
            "lines_total": total,
            "next_offset": page.next_line if more and page.lines_returned else None,
            "version": version,
        }
        notes = list(self._notes(total))
        return facts | ({"notes": notes} if notes else {})

    def _notes(self, total: int | None) -> list[str]:
        page, notes = self.page, list[str]()
        if total == 0:
            notes.append("The file is empty.")
        elif total is not None and page.offset > total:
            notes.append(f"Offset {page.offset} is past the end: the file has {total} lines.")
        if page.cut_lines:
            lines = ", ".join(map(str, page.cut_lines[:20])) + (", ..." if len(page.cut_lines) > 20 else "")
            notes.append(f"Lines that were cut because they are too long: {lines}. See the rest with a command.")
        if page.replaced:
            notes.append("Some bytes are not UTF-8; they are shown as \ufffd. An edit leaves them as they are.")
        if total is None and self.size > self.ws.limits.paged_bytes:
            notes.append(f"The file has {self.size} bytes: its lines are not counted and it has no version.")
        return notes
