"""``Root``: the directory that the workspace tools may touch, and the paths in it that they may not.

Every path is opened beneath the root by an ``Opener`` (see ``beneath``), and the descriptor is used from then on. What
is protected is decided by the real path of what was opened, so a link cannot rename a protected file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import sys
import threading
import unicodedata
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, NoReturn

from holdfast.errors import ToolError
from holdfast.tools.protected import protected_files
from holdfast.workspace.files.beneath import Directory, NotRegular, Opener, allow_owner, choose_opener, open_root

PROTECTED = (
    # repositories: these files run code under plain git commands
    ".git/hooks",
    ".git/config",
    ".git/config.worktree",
    ".git/modules",
    ".git/commondir*",  # with "*", so that no sandbox puts an empty directory there, at which git fails
    ".git/worktrees",
    ".git/info",
    ".git/objects/info",
    ".gitmodules",
    ".gitconfig",
    ".config/git",
    # secrets
    ".env*",
    # start-up files of shells and tools
    ".bashrc",
    ".bash_profile",
    ".bash_login",
    ".bash_logout",
    ".bash_aliases",
    ".profile",
    ".zshrc",
    ".zprofile",
    ".zshenv",
    ".zlogin",
    ".zlogout",
    ".kshrc",
    ".cshrc",
    ".tcshrc",
    ".login",
    ".inputrc",
    ".config/fish",
    ".ripgreprc",
    # settings that start programs
    ".mcp.json",
    ".vscode",
    ".idea",
)
"""Protected in every workspace, at any depth, with all that is below. `*` matches within one part of a path."""
REPOSITORY = ("hooks", "objects/info")
"""Covered in every repository of the workspace, also while missing. The other files of one are there, or are found."""
STORE_FILES = ("holdfast*.db", "holdfast*.db-*")
"""Files of a store, whatever process has it open."""
SECRET = (".env*", *STORE_FILES)
"""Of these also the content is kept from the tools: they may not be read."""
HARMLESS = re.compile(r"(?:.*/)?\.env\.(?:example|sample|template|dist)")
"""Templates that hold no secret: they may be read."""

_HARMLESS_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS)
"""Of a directory that is gone, or that commands cannot list or change either: another user's."""
MAX_PATH = 4096
MAX_SCANNED = 200_000
"""Entries that ``protected_paths`` looks at; a workspace with more is refused, since the rest would be open."""
CHUNK = 1024 * 1024
WINDOWS = sys.platform == "win32"
_RAW_BYTE = re.compile("[\udc80-\udcff]")
"""How Python writes a byte of a name that is not UTF-8."""
_DEVICE_NAMES = re.compile(r"(?i)(?:con|prn|aux|nul|com[0-9¹²³]|lpt[0-9¹²³]|conin\$|conout\$)(?:\..*)?")


class Place(NamedTuple):
    """Where a file is or will be: an open directory and the file's name in it, which is no link."""

    directory: Directory
    name: str

    @property
    def path(self) -> str:
        """The path beneath the root, without links."""
        return self.directory.path_of(self.name)


class Root:
    """A directory beneath which the tools work."""

    def __init__(
        self,
        path: str | Path,
        *,
        protected: Sequence[str] = (),
        fixed: Sequence[str] = (),
        allow_hard_links: bool = False,
        opener: Opener | None = None,
    ):
        """Open a root.

        protected:  more patterns of protected paths, at any depth
        fixed:      paths relative to the root, without patterns, that are protected with all that is below
        """
        given = os.path.abspath(str(path))
        self.path = Path(given).resolve(strict=True)
        self._prefixes = tuple(dict.fromkeys((_to_posix(str(self.path)), _to_posix(given))))
        self.allow_hard_links = allow_hard_links
        self._directory = open_root(str(self.path))
        self.opener = opener or choose_opener(self._directory)
        self._patterns = _compile_patterns((*PROTECTED, *STORE_FILES, *protected))
        self._secrets = _compile_patterns(SECRET)
        self._added = tuple(protected)
        self._fixed = tuple(path.strip("/") for path in fixed)
        self.lock = threading.RLock()
        """Held while files are replaced: two commits of one process never interleave."""

    @property
    def weakness(self) -> str:
        """What the containment of paths does not hold on this system; empty for nothing."""
        return self.opener.weakness

    def close(self) -> None:
        self._directory.close()

    def __enter__(self) -> Root:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- names ---

    def normalise(self, path: str) -> str:
        """Return the relative form with "/" between its parts; "." for the root. `..` is resolved as text.

        The result is what gets opened, so text and file cannot mean different things.
        """
        _refuse_bad_text(path)
        text = _to_posix(path)
        if text.startswith("/") or (WINDOWS and re.match(r"[A-Za-z]:", text)):
            text = self._strip_prefix(text, path)
        parts: list[str] = []
        for part in text.split("/"):
            if part in ("", "."):
                continue
            if part == "..":
                if not parts:
                    _refuse_outside(path, "`..` leads above it")
                parts.pop()
            else:
                parts.append(part)
        if WINDOWS:
            _refuse_windows_names(parts, path)
        return "/".join(parts) or "."

    def _strip_prefix(self, text: str, path: str) -> str:
        # Resolved as text first: "/root/../other" is not inside.
        whole = os.path.normpath(text) if not WINDOWS else _to_posix(os.path.normpath(text))
        whole = "/" + whole.lstrip("/") if not WINDOWS else whole
        for prefix in self._prefixes:
            base = prefix.rstrip("/")
            if f"{whole}/".startswith(f"{base}/"):
                return whole[len(base) + 1 :]
        return _refuse_outside(path, f"the workspace is {self.path}; give a path relative to it")

    # --- opening ---

    def open_file(self, path: str) -> int:
        """Return a descriptor of a regular file, read only. Secrets are refused; FIFOs and devices do not block."""
        return self.open_real(path)[0]

    def open_real(self, path: str) -> tuple[int, str]:
        """Return what ``open_file`` returns, and the path of the file without links."""
        name = self.normalise(path)
        with self._translate(name, "read_failed"):
            fd, real = self.opener.open_file(self._directory, name)
        if self.is_secret(name) or self.is_secret(real):
            os.close(fd)
            _refuse_secret(name, real)
        return fd, real

    def open_directory(self, path: str = ".", *, create: bool = False) -> int:
        """Return a descriptor of a directory. With ``create`` it is made, with its parents, where it is missing."""
        found = self.directory(path, create=create)
        if found.fd is None:
            raise ToolError(
                "resource_missing",
                "this system has no descriptors of directories (openat): use Root.directory(), which works by path",
            )
        return found.fd

    def directory(self, path: str = ".", *, create: bool = False, made: list[str] | None = None) -> Directory:
        """Open a directory. The paths of directories that were made are appended to ``made``, topmost first."""
        name = self.normalise(path)
        with self._translate(name, "write_failed" if create else "read_failed"):
            return self._open_or_make(name, made) if create else self.opener.open_directory(self._directory, name)

    def _open_or_make(self, name: str, made: list[str] | None) -> Directory:
        try:
            return self.opener.open_directory(self._directory, name)
        except FileNotFoundError:
            if name == ".":
                raise
        above, _, last = name.rpartition("/")
        with self._open_or_make(above or ".", made) as parent:
            real = parent.path_of(last)
            self.refuse_protected(real)
            try:
                parent.make_directory(last)
            except FileExistsError:
                pass  # another process made it, or it is a link that leads nowhere: the open below tells
            else:
                if made is not None:
                    made.append(real)
            return parent.open_directory(last)

    def locate(self, path: str, *, create: bool = False, made: list[str] | None = None) -> Place:
        """Return the place to write a file: links are followed, beneath the root, to where the file really is.

        Refuses protected paths, by the path that was given and by the real one. The caller closes the directory.
        """
        name = self.normalise(path)
        self.refuse_protected(name)
        with self._translate(name, "write_failed"):
            place = self._follow(name, create, made)
        try:
            self.refuse_protected(place.path, name)
            return place
        except BaseException:
            place.directory.close()
            raise

    def _follow(self, path: str, create: bool, made: list[str] | None) -> Place:
        for _ in range(40):
            above, _, last = path.rpartition("/")
            if last in ("", ".", ".."):
                raise NotRegular("a directory", path)
            directory = (
                self._open_or_make(above or ".", made)
                if create
                else self.opener.open_directory(self._directory, above or ".")
            )
            try:
                target = directory.read_link(last)
                if target is None:
                    return Place(directory, last)
            except BaseException:
                directory.close()
                raise
            directory.close()
            if target.startswith("/"):
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
            path = target if directory.real == "." else f"{directory.real}/{target}"
            create = False  # a link that leads nowhere makes no directories
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)

    def remove_empty(self, path: str) -> None:
        """Remove a directory that a failed commit made; one that has content by now stays."""
        above, _, last = path.rpartition("/")
        with contextlib.suppress(OSError), self.opener.open_directory(self._directory, above or ".") as parent:
            parent.remove_directory(last)

    def hash_file(self, path: str) -> str | None:
        """Return the SHA-256 of the content (hex), the file's version; None if there is no such file.

        Also of secrets: a version does not show the content.
        """
        name = self.normalise(path)
        try:
            with self._translate(name, "read_failed"):
                fd, _ = self.opener.open_file(self._directory, name)
        except ToolError as error:
            if error.kind == "not_found":
                return None
            raise
        with os.fdopen(fd, "rb", buffering=0) as file:
            return hash_stream(lambda: file.read(CHUNK))

    def real_path(self, path: str) -> str:
        """Return the path without links; the path itself if nothing is there yet."""
        name = self.normalise(path)
        try:
            place = self._follow(name, False, None)
        except OSError:
            return name
        place.directory.close()
        return place.path

    # --- protected paths ---

    def is_protected(self, path: str) -> bool:
        """Return whether tools may not change the path, or it is below one that they may not change."""
        key = _comparable(path)
        if self._patterns.search(key) or self._is_registered(key) or self._is_fixed(key):
            return True
        return key.rpartition("/")[2] == ".git" and not self._is_directory(path)

    def is_secret(self, path: str) -> bool:
        """Return whether tools may not even read the path."""
        key = _comparable(path)
        return bool(self._secrets.search(key) and not HARMLESS.fullmatch(key)) or self._is_registered(key)

    def refuse_protected(self, path: str, given: str | None = None) -> None:
        """Raise ``protected_path`` if the path is protected."""
        if self.is_protected(path):
            named = f"{given!r} leads to {path!r}, which" if given not in (None, path) else f"{path!r}"
            raise ToolError(
                "protected_path",
                f"{named} is protected in every mode: nothing was changed. Ask the user to change this file by hand, "
                "or work without it",
                {"path": storable_text(path)},
            )

    def protected_paths(self, unsearched: list[str] | None = None) -> list[str]:
        """Return the protected paths: those that exist, and those of the top directory that could be made.

        Raises ``too_large`` if the root has too many entries, or a directory that cannot be searched.

        unsearched:  gets such directories, and nothing is raised: all the others are searched, however many there are
        """
        found = {
            pattern.strip("/") for pattern in (*PROTECTED, *self._added) if "*" not in pattern and "?" not in pattern
        }
        found |= {".env", *self._fixed, *self._registered()}
        found.update(self._scan_protected(unsearched))
        return sorted(path for path in found if path)

    def _scan_protected(self, unsearched: list[str] | None) -> Iterator[str]:
        # First by the name alone, which is much faster: nothing above an entry is protected where the scan gets to.
        patterns = (*PROTECTED, *STORE_FILES, ".git", *self._added, *self._fixed)
        patterns += tuple(f"{path}*" for path in self._registered())
        names = _compile_patterns([_to_posix(pattern).rstrip("/").rpartition("/")[2] for pattern in patterns])
        seen = 0
        # Depth first: what a directory's owner was allowed ends once everything below it is searched, so that few
        # descriptors are open at a time.
        pending: list[str | contextlib.ExitStack] = ["."]
        try:
            while pending:
                above = pending.pop()
                if isinstance(above, contextlib.ExitStack):
                    above.close()
                    continue
                pending.append(allowed := contextlib.ExitStack())
                is_repository = _comparable(above).rpartition("/")[2] == ".git"
                if is_repository:
                    yield from (f"{above}/{name}" for name in REPOSITORY)
                for entry in self._list_entries(above, allowed, unsearched):
                    seen += 1
                    if seen > MAX_SCANNED and unsearched is None:
                        _refuse_size()
                    path = entry.name if above == "." else f"{above}/{entry.name}"
                    if names.search(_comparable(entry.name)) and self.is_protected(path):
                        yield path
                    elif entry.is_dir(follow_symlinks=False) and not is_repository:
                        pending.append(path)
        finally:
            for each in reversed(pending):
                if isinstance(each, contextlib.ExitStack):
                    each.close()

    def _list_entries(
        self, path: str, allowed: contextlib.ExitStack, unsearched: list[str] | None
    ) -> Iterator[os.DirEntry[str]]:
        """Yield the entries of a directory. One that its owner may not list is listed all the same."""
        whole = self.path / path
        try:
            if not WINDOWS and not os.access(whole, os.R_OK | os.X_OK):
                fd = os.open(whole, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                allowed.callback(os.close, fd)
                allowed.enter_context(allow_owner(fd))
            with os.scandir(whole) as entries:
                yield from entries
        except OSError as error:
            if error.errno in _HARMLESS_ERRORS:
                return
            if unsearched is None:
                _refuse_unsearched(path, error)
            unsearched.append(path)

    def _is_directory(self, path: str) -> bool:
        # A file named .git makes git read its configuration from elsewhere. The directory itself is not protected.
        with contextlib.suppress(OSError):
            found = self._directory.stat(path)
            return found is not None and stat.S_ISDIR(found.st_mode)
        return False

    def _is_fixed(self, key: str) -> bool:
        return any(key == own or key.startswith(own + "/") for own in map(_comparable, self._fixed))

    def _is_registered(self, key: str) -> bool:
        return any(key == own or key.startswith((own + "/", own + "-")) for own in map(_comparable, self._registered()))

    def _registered(self) -> list[str]:
        """Return the files that this process protects (an open store's), as far as they are beneath the root."""
        return _paths_beneath(str(self.path), tuple(sorted(_registered_files())))

    # --- errors ---

    @contextlib.contextmanager
    def _translate(self, path: str, kind: str) -> Generator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self.raise_error(error, path, kind)

    def raise_error(self, error: OSError | ValueError, path: str, kind: str) -> NoReturn:
        """Raise the ToolError for an error of the system: ``kind`` unless it says more."""
        code = error.errno if isinstance(error, OSError) else None
        if code == errno.EXDEV:
            _refuse_outside(path, self._explain_link(path))
        if code == errno.ELOOP:
            _refuse_outside(path, "a link on the way is a loop, or changed while it was followed")
        if isinstance(error, NotRegular):
            advice = (
                "use list to see what is in it" if error.kind == "a directory" else "only regular files can be used"
            )
            raise ToolError(kind, f"{path!r} is {error.kind}: {advice}", {"path": path}) from error
        if code == errno.ENOENT or (code == errno.ENOTDIR and kind == "read_failed"):
            message = f"there is no {path!r} in the workspace: check the path with list or glob"
            raise ToolError("not_found", message, {"path": path}) from error
        if code == errno.ENOTDIR:
            message = f"{path!r} cannot be created: a part of the path is a file, not a directory. Choose another path"
            raise ToolError(kind, message, {"path": path}) from error
        if code == errno.ENAMETOOLONG or not isinstance(error, OSError):
            raise ToolError("invalid_args", f"{path[:80]!r}... is not a usable path: {error}", {}) from error
        message = f"{path!r}: {os.strerror(error.errno) if error.errno else error}"
        raise ToolError(kind, message, {"path": path, "errno": errno.errorcode.get(error.errno or 0, "")}) from error

    def _explain_link(self, path: str) -> str:
        """Return which link of the path leads out. Only for the message: nothing is opened by it."""
        parts = path.split("/")
        for count in range(1, len(parts) + 1):
            link = "/".join(parts[:count])
            with contextlib.suppress(OSError):
                target = os.readlink(self.path / link)
                if os.path.isabs(target):
                    inside = os.path.normpath(target).startswith(str(self.path) + os.sep)
                    advice = "absolute links are not followed, even inside: name its target instead" if inside else ""
                    return f"{link!r} is a link to {target!r}" + (f"; {advice}" if advice else "")
                return f"{link!r} is a link to {target!r}"
        return "a link on the way leads out of it"


def hash_stream(read: Callable[[], bytes | None]) -> str:
    """Return the SHA-256 (hex) of everything that ``read`` returns, chunk by chunk."""
    digest = hashlib.sha256()
    while chunk := read():
        digest.update(chunk)
    return digest.hexdigest()


def _refuse_bad_text(path: str) -> None:
    if not isinstance(path, str) or not path:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ToolError("invalid_args", "the path is empty: give a path relative to the workspace, such as src/app.py")
    if "\0" in path:
        raise ToolError("invalid_args", "the path contains a NUL character: no file can have such a name")
    if len(path) > MAX_PATH:
        raise ToolError("invalid_args", f"the path is longer than {MAX_PATH} characters: give a shorter one")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ToolError("invalid_args", f"the path is not valid text: {error}") from error


def _refuse_windows_names(parts: list[str], path: str) -> None:
    for part in parts:
        if ":" in part or _DEVICE_NAMES.fullmatch(part):
            raise ToolError("invalid_args", f"{path!r}: {part!r} names a device or a stream, not a file")


def _refuse_outside(path: str, why: str) -> NoReturn:
    raise ToolError(
        "outside_workspace",
        f"{path!r} leads out of the workspace: {why}. Only paths inside the workspace can be used",
        {"path": path},
    )


def _refuse_size() -> NoReturn:
    raise ToolError(
        "too_large",
        f"the workspace has more than {MAX_SCANNED} entries, too many to find the protected paths among them. Nothing "
        "was run: choose a smaller directory as the workspace, or remove what is not needed, such as build output",
    )


def _refuse_unsearched(path: str, error: OSError) -> NoReturn:
    raise ToolError(
        "too_large",
        f"{path[:80]!r} in the workspace cannot be searched for protected paths ({os.strerror(error.errno or 0)}). "
        "Nothing was run: ask the user to remove this directory, or to choose another workspace",
        {"path": storable_text(path[:MAX_PATH])},
    )


def _refuse_secret(path: str, real: str) -> NoReturn:
    raise ToolError(
        "protected_path",
        f"{path!r}{'' if path == real else f' leads to {real!r}, which'} holds secrets or the log itself and is not "
        "shown to tools. Work without it, or ask the user for what you need from it",
        {"path": path},
    )


def storable_text(text: str) -> str:
    """Return a text that the log can hold: bytes of a name that are not UTF-8 become ``\\xNN``.

    A plan that cannot be stored is no plan, and an approval without one is bound to nothing.
    """
    if text.isascii():
        return text
    escaped = _RAW_BYTE.sub(lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)
    return escaped.encode("utf-8", "backslashreplace").decode()


def _to_posix(path: str) -> str:
    return path.replace("\\", "/") if WINDOWS else path


def _compile_patterns(patterns: Sequence[str]) -> re.Pattern[str]:
    """Return one expression for all patterns: one search a path, since grep and glob ask for every file."""
    bodies: list[str] = []
    for pattern in patterns:
        parts = [part for part in _to_posix(pattern).split("/") if part not in ("", ".")]
        if parts:
            text = "/".join(_comparable_part(part) for part in parts)
            bodies.append("".join({"*": "[^/]*", "?": "[^/]"}.get(letter, re.escape(letter)) for letter in text))
    return re.compile(rf"(?:^|/)(?:{'|'.join(bodies)})(?:/|$)")


def _comparable(path: str) -> str:
    """Return the path in a form in which names that some file system takes for the same are the same."""
    if path.isascii() and ":" not in path and " " not in path and "./" not in path and not path.endswith("."):
        return path.lower()
    return "/".join(_comparable_part(part) for part in path.split("/"))


def _comparable_part(part: str) -> str:
    """Without case, composition, invisible characters; without what Windows drops: a final dot or space, a stream."""
    text = unicodedata.normalize("NFKC", part).casefold()
    text = "".join(letter for letter in text if unicodedata.category(letter) != "Cf")
    head = text.split(":", 1)[0]
    return (head or text).rstrip(" .") or text


def _registered_files() -> Sequence[str]:
    return [os.fspath(path) for path in protected_files()]


@lru_cache(maxsize=64)
def _paths_beneath(root: str, files: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for file in files:
        real = os.path.realpath(file)
        if real.startswith(root.rstrip(os.sep) + os.sep):
            found.append(_to_posix(os.path.relpath(real, root)))
    return found
