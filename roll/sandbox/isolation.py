"""What keeps a program in: namespaces, a root of its own, limits, no privileges, and a filter of system calls."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal

Isolation = Literal["namespaces", "processes"]
"""`namespaces`: a program sees neither the network, nor other processes, nor files except Python's. `processes`: it is
limited and killed, and cannot open sockets or send signals, but reads and writes what its user may."""

MOUNT_BYTES = 64 * 2**20
"""Size of the writable folder of a program, which is in memory."""

FILE_BYTES = 32 * 2**20
OPEN_FILES = 128
PROCESSES = 16
"""Limits of one program: largest file, open files, and processes with threads, each with the memory of the job."""

PROGRAM_ID, TESTER_ID = 65534, 65533
"""Users of a program and of the process that tests it, where the server may choose them, as root may."""

NEW_NAMESPACES = {"user": 0x10000000, "mount": 0x20000, "net": 0x40000000, "ipc": 0x08000000, "uts": 0x04000000}
NEW_PIDS = 0x20000000
ALL_NAMESPACES = sum(NEW_NAMESPACES.values()) | NEW_PIDS | 0x02000000

READ_ONLY, NOSUID, NODEV, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH = 2
SET_DEATH_SIGNAL, SET_DUMPABLE, SET_SECCOMP, SET_SUBREAPER, SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38

LIBC = ctypes.CDLL(None, use_errno=True)

SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/localtime")
"""Read-only parts of the root of a program, besides those of Python."""

PYTHON_FOLDERS = tuple(os.path.realpath(folder) for folder in (sys.base_prefix, sys.prefix))

WORK_FOLDER = "/work" if any(folder.startswith("/tmp/") for folder in PYTHON_FOLDERS) else "/tmp"
"""Writable folder of a program; another one where Python is installed below /tmp, which it would hide."""

DEVICES = ("null", "zero", "urandom", "random")


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def _prctl(option: int, value: int | ctypes.Array[ctypes.c_char] = 0) -> None:
    pointer = value if isinstance(value, int) else ctypes.addressof(value)
    unsigned = ctypes.c_ulong
    _checked(LIBC.prctl(option, unsigned(pointer), unsigned(0), unsigned(0), unsigned(0)), f"prctl {option}")


def signal_at_parents_end(number: int) -> None:
    _prctl(SET_DEATH_SIGNAL, number)


def end_with_parent() -> None:
    """Lets the kernel kill this process when the thread that started it ends, such as that of a Ray daemon."""
    signal_at_parents_end(9)


def be_opaque() -> None:
    _prctl(SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process."""
    _prctl(SET_SUBREAPER, 1)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    _checked(LIBC.mount(*encoded, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def enter_namespaces(root: str) -> None:
    """Continues in a child in namespaces of its own, with a root that holds Python and nothing else.

    The child is the first process of new process ids; this process waits for it and ends.

    Args:
        root: an empty folder on which the root is mounted.

    Raises:
        OSError: the kernel, or the container that this runs in, does not allow it.
    """
    global OWN_PIDS
    write_maps = _MapWriter(os.getpid()) if os.geteuid() == 0 else None
    _checked(LIBC.unshare(sum(NEW_NAMESPACES.values()) | NEW_PIDS), "unshare")
    if write_maps is not None:
        write_maps()
    else:
        _write_own_maps()
    try:
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    except OSError:
        pass  # the filter of system calls refuses them too
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)
    end_with_parent()
    OWN_PIDS = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    _mount("none", "/", None, RECURSIVE | PRIVATE)
    _make_root(Path(root))


OWN_PIDS = -1
"""The process ids of a server in namespaces, as a file descriptor."""


OUTER_USER, OUTER_GROUP = os.geteuid(), os.getegid()
"""User and group of the server before it enters its namespaces."""


def _write_own_maps() -> None:
    """Makes the user of this process root in its namespaces; it stays the same user outside of them."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {OUTER_USER} 1")
    Path("/proc/self/gid_map").write_text(f"0 {OUTER_GROUP} 1")


class _MapWriter:
    """A process outside of the namespaces, which gives them users of their own; calling it waits until it has."""

    def __init__(self, pid: int) -> None:
        start, self._go = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._go)
            status = 1
            try:
                if os.read(start, 1):
                    ids = f"0 0 1\n{TESTER_ID} {TESTER_ID} 1\n{PROGRAM_ID} {PROGRAM_ID} 1\n"
                    Path(f"/proc/{pid}/uid_map").write_text(ids)
                    Path(f"/proc/{pid}/gid_map").write_text(ids)
                    status = 0
            finally:
                os._exit(status)
        os.close(start)

    def __call__(self) -> None:
        os.write(self._go, b"1")
        os.close(self._go)
        if os.waitpid(self._child, 0)[1] != 0:
            raise PermissionError("the users of the namespaces cannot be mapped")


def _make_root(root: Path) -> None:
    """Mounts a new root of this process: Python and the system's libraries, read-only, and an empty WORK_FOLDER."""
    _mount("tmpfs", str(root), "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    wanted = [*SYSTEM_FOLDERS, *PYTHON_FOLDERS]
    for path in dict.fromkeys(wanted):
        inside = any(path != other and path.startswith(f"{other}/") for other in wanted)
        if path == "/" or inside or not os.path.exists(path):
            continue
        target = root / path.lstrip("/")
        if os.path.islink(path):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(os.readlink(path))
            continue
        _bind(path, target)
        _mount("none", str(target), None, REMOUNT | BIND | READ_ONLY | NOSUID | _kept_flags(path))
    (root / "dev").mkdir()
    for name in DEVICES:
        _bind(f"/dev/{name}", root / "dev" / name)
    (root / WORK_FOLDER.lstrip("/")).mkdir()
    old = root / ".old"
    old.mkdir()
    _checked(LIBC.pivot_root(str(root).encode(), str(old).encode()), "pivot_root")
    os.chdir("/")
    _checked(LIBC.umount2(b"/.old", DETACH), "umount2")
    os.rmdir("/.old")
    _mount("none", "/", None, REMOUNT | READ_ONLY | NOSUID | NODEV, "size=1m,mode=755")


def _bind(path: str, target: Path) -> None:
    if os.path.isdir(path):
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount(path, str(target), None, BIND | RECURSIVE)


def _kept_flags(path: str) -> int:
    """Flags of the mount of a path that a remount in a user namespace must repeat."""
    found = os.statvfs(path).f_flag
    pairs = ((os.ST_NOSUID, NOSUID), (os.ST_NODEV, NODEV), (os.ST_NOEXEC, 8), (os.ST_NOATIME, 1024))
    kept = sum(flag for bit, flag in pairs if found & bit)
    return kept | (2048 if found & os.ST_NODIRATIME else 0) | (1 << 21 if found & os.ST_RELATIME else 0)


def fork_with_new_pids() -> int:
    """As `os.fork`; the child is the first process of new process ids."""
    _checked(LIBC.unshare(NEW_PIDS), "unshare")
    child = os.fork()
    if child:
        _checked(LIBC.setns(OWN_PIDS, NEW_PIDS), "setns")
    return child


def mount_work_folder() -> None:
    """Mounts an empty WORK_FOLDER that can be written, which ends with this process and its children."""
    _checked(LIBC.unshare(NEW_NAMESPACES["mount"]), "unshare")
    _mount("tmpfs", WORK_FOLDER, "tmpfs", NOSUID | NODEV, f"size={MOUNT_BYTES},nr_inodes=4096,mode=1777")


def limit(memory_bytes: int, cpu_s: float) -> None:
    """Sets the limits of this process and its children, for good.

    Memory is address space; seconds of processor time are rounded up.
    """
    seconds = int(cpu_s) + 1
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, PROCESSES + OTHER_PROCESSES),
    ):
        resource.setrlimit(kind, (value, value))


def _processes_of_user() -> int:
    """Processes and threads that count towards the limit of this user where there is no user namespace."""
    count = 0
    for task in Path("/proc").glob("[0-9]*/task/*"):
        try:
            count += task.stat().st_uid == os.getuid()
        except OSError:
            pass  # it has ended
    return count


OTHER_PROCESSES = 0
"""Added to PROCESSES where programs share their user with others."""


def count_other_processes() -> None:
    """Sets OTHER_PROCESSES for a server without namespaces; root gives programs a user of their own."""
    global OTHER_PROCESSES
    OTHER_PROCESSES = 0 if os.geteuid() == 0 else _processes_of_user() + 256


def drop_privileges(user: int, in_namespaces: bool) -> None:
    """Takes every privilege from this process: its user if it is root, its capabilities, and ways to gain others.

    Args:
        user: becomes the user and group if this process may choose them.
        in_namespaces: signals need no filter, because no other process can be seen.
    """
    if OUTER_USER == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = struct.pack("Ii", 0x20080522, 0)  # version 3, this thread
    _checked(LIBC.capset(header, bytes(24)), "capset")
    _prctl(SET_NO_NEW_PRIVS, 1)
    _filter_calls(in_namespaces)


DENIED = {
    "x86_64": (
        *(29, 64, 68, 319, 447),
        *(41, 101, 103, 135, 155, 161, 163, 165, 166, 167, 168, 169, 175, 176, 179, 240, 246, 248, 249, 250, 272, 298),
        *(300, 303, 304, 308, 310, 311, 312, 313, 320, 321, 323, 425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442),
    ),
    "aarch64": (
        *(194, 190, 186, 279, 447),
        198,
        *(117, 116, 92, 41, 51, 89, 40, 39, 224, 225, 142, 105, 106, 60, 180, 104, 217, 218, 219, 97, 241),
        *(262, 264, 265, 268, 270, 271, 272, 273, 294, 280, 282, 425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442),
    ),
}
"""System calls that a program is refused: memory that no limit counts or that outlives it, semaphores, queues, sockets,
tracing, mounts, namespaces, modules, keys, kernel interfaces."""

SIGNALS = {
    "x86_64": (62, 129, 141, 200, 203, 234, 251, 297, 302, 424),
    "aarch64": (129, 138, 130, 131, 140, 122, 30, 240, 261, 424),
}
"""Refused where other processes of the user can be seen: signals, and changes of their limits and priorities."""

CLONE, CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LOAD, IF_EQUAL, IF_AT_LEAST, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, REFUSE_AS_UNKNOWN = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38
FIRST_OTHER_ABI = 0x40000000


@cache
def call_filter(in_namespaces: bool) -> tuple[Any, Any] | None:
    """The filter of system calls, and the code that it points to; None on another processor, which has no filter.

    The server calls it once, so that its programs need not.
    """
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        return None
    steps = [(LOAD, 0, 0, 4), (IF_EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, REFUSE), (LOAD, 0, 0, 0)]
    steps += [(IF_AT_LEAST, 0, 1, FIRST_OTHER_ABI), (RETURN, 0, 0, REFUSE)]
    steps += [(IF_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, REFUSE_AS_UNKNOWN)]
    for number in DENIED[machine] + (() if in_namespaces else SIGNALS[machine]):
        steps += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    steps += [(IF_EQUAL, 0, 3, CLONE[machine]), (LOAD, 0, 0, 16), (IF_ANY_BIT, 0, 1, ALL_NAMESPACES)]
    steps += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    return ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))), code


def _filter_calls(in_namespaces: bool) -> None:
    made = call_filter(in_namespaces)
    if made is not None:
        unsigned = ctypes.c_ulong
        pointer = unsigned(ctypes.addressof(made[0]))
        _checked(LIBC.prctl(SET_SECCOMP, unsigned(2), pointer, unsigned(0), unsigned(0)), "seccomp")
