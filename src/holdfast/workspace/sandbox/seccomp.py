"""The seccomp filter of confined commands, assembled as BPF with ``struct``.

libseccomp would need a system library and a binding for a program of some fifty instructions. The filter refuses with
EPERM, and allows everything else:

- sockets of all families but the allowed ones. Unix sockets reach services of the host without a network namespace;
  VM sockets reach the hypervisor. ``socketpair`` stays.
- system calls with a history of kernel exploits that commands do not need, and those that look into other processes.
- files with the set-user-id or set-group-id bit. A command that runs as root could leave one for others to run.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Sequence
from functools import cache

AF_INET, AF_INET6, AF_NETLINK = 2, 10, 16
INTERNET = (AF_INET, AF_INET6, AF_NETLINK)
"""The families that a command with a network namespace of its own may use."""

_LOAD, _EQUAL, _ABOVE, _BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_SET_ID = 0o6000
_CREATES = 0o100 | 0o20000000  # O_CREAT and the bit of O_TMPFILE that no other flag has

_ARCHITECTURES: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "ptrace": 101, "keyctl": 250, "add_key": 248, "request_key": 249, "userfaultfd": 323, "bpf": 321,
            "perf_event_open": 298, "process_vm_readv": 310, "process_vm_writev": 311, "socket": 41, "openat": 257,
            "fchmod": 91, "fchmodat": 268, "open": 2, "creat": 85, "chmod": 90, "mknod": 133, "mknodat": 259,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "ptrace": 117, "keyctl": 219, "add_key": 217, "request_key": 218, "userfaultfd": 282, "bpf": 280,
            "perf_event_open": 241, "process_vm_readv": 270, "process_vm_writev": 271, "socket": 198, "openat": 56,
            "fchmod": 52, "fchmodat": 53, "mknodat": 33,
        },
    ),
}  # fmt: skip
_COMMON = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "openat2": 437, "pidfd_getfd": 438,
    "fchmodat2": 452,
}  # fmt: skip
_REFUSED = (
    "io_uring_setup", "io_uring_enter", "io_uring_register", "ptrace", "keyctl", "add_key", "request_key",
    "userfaultfd", "bpf", "perf_event_open", "process_vm_readv", "process_vm_writev", "pidfd_getfd",
)  # fmt: skip
_MODES = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1, "mknod": 1, "mknodat": 2}
"""System call -> the number of its argument that is a file's mode."""
_OPENS = {"open": (1, 2), "openat": (2, 3)}
"""System call -> the numbers of its flags and of its mode, which counts only if the flags create a file."""

Instruction = tuple[int, int, int, int]


def is_supported(machine: str | None = None) -> bool:
    """Return whether there is a filter for this machine."""
    return (machine or platform.machine()) in _ARCHITECTURES


@cache
def build_filter(families: tuple[int, ...] = INTERNET, machine: str | None = None) -> bytes:
    """Return the filter as an array of ``struct sock_filter``, which allows sockets of these families only."""
    architecture, numbers = _ARCHITECTURES[machine or platform.machine()]
    calls = {**numbers, **_COMMON}
    code: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),  # the 32-bit calls of the same machine have other numbers
        (_LOAD, 0, 0, 0),
        (_ABOVE, 0, 1, 0x40000000),  # the x32 calls, too
        (_RETURN, 0, 0, _KILL),
    ]
    for name in _REFUSED:
        code += _on_call(calls[name], [(_RETURN, 0, 0, _EPERM)])
    # Its flags are behind a pointer, where a filter cannot read them. Programs fall back to openat.
    code += _on_call(calls["openat2"], [(_RETURN, 0, 0, _ENOSYS)])
    code += _on_call(calls["socket"], _check_family(families))
    for name, argument in _MODES.items():
        if name in calls:
            code += _on_call(calls[name], _check_mode(argument))
    for name, (flags, mode) in _OPENS.items():
        if name in calls:
            code += _on_call(calls[name], [*_check_bits(flags, _CREATES), (_RETURN, 0, 0, _ALLOW), *_check_mode(mode)])
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", op, yes, no, value) for op, yes, no, value in code)


def _on_call(number: int, body: list[Instruction]) -> list[Instruction]:
    """Run ``body`` for this system call. It ends with a return, so the accumulator still holds the number after it."""
    return [(_EQUAL, 0, len(body), number), *body]


def _load_argument(argument: int) -> Instruction:
    return (_LOAD, 0, 0, 16 + 8 * argument)  # the low half: both machines are little-endian


def _check_family(families: Sequence[int]) -> list[Instruction]:
    """Allow the families, refuse all others."""
    tests: list[Instruction] = [(_EQUAL, len(families) - number, 0, family) for number, family in enumerate(families)]
    return [_load_argument(0), *tests, (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]


def _check_bits(argument: int, bits: int) -> list[Instruction]:
    """Skip the next instruction if the argument has one of the bits."""
    return [_load_argument(argument), (_BITS, 1, 0, bits)]


def _check_mode(argument: int) -> list[Instruction]:
    return [*_check_bits(argument, _SET_ID), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
