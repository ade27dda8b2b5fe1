"""A hostile app: what somebody would try who has taken over the process of a request.

Takes one word on its connection, attempts what the word names, and says how that ended: "done ..." or the error. A
system call that the filter kills for ends it without an answer.
"""

import ctypes
import errno
import json
import os
import signal
import socket
import time

libc = ctypes.CDLL(None, use_errno=True)


def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def write(path):
    with open(path, "wb") as file:
        file.write(b"x")


def read(path):
    with open(path, "rb") as file:
        file.read(1)


def connect(path):
    socket.socket(socket.AF_UNIX).connect(path)


def every_family():
    """Families whose sockets can be made, beside AF_UNIX: each with every kind of socket."""
    made = []
    for family in range(64):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
            try:
                socket.socket(family, kind).close()
                made.append(family)
            except OSError:
                pass
    if set(made) - {socket.AF_UNIX}:
        return made
    raise OSError(errno.EAFNOSUPPORT, "all but AF_UNIX")


def other_processes():
    others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    seen = [pid for pid in (*others, "1", str(os.getppid())) if os.path.exists(f"/proc/{pid}")]
    if seen:
        return seen
    raise OSError(errno.ENOENT, "none")


def devices():
    allowed = {"null", "zero", "full", "random", "urandom", "tty", "core", "fd", "stdin", "stdout", "stderr", "ptmx",
               "pts", "shm", "mqueue", "hugepages", "log", "char", "block"}  # fmt: skip
    extra = set(os.listdir("/dev")) - allowed
    if extra:
        return sorted(extra)
    raise OSError(errno.ENOENT, "none")


def fork_bomb():
    children = 0
    try:
        while children < 4096:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            children += 1
    except OSError:
        if children >= 32:
            raise AssertionError(children) from None
        raise
    return children


def store_buffer(size):
    """Asks the cache store for a buffer, as tie/store does."""
    from tie.proto import store_pb2

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(20)
    connection.connect("/run/tie/store/store.sock")
    connection.sendall(store_pb2.StoreRequest(new=store_pb2.New(size=size)).SerializeToString())
    data, descriptors, _, _ = socket.recv_fds(connection, 65536, 8)
    if descriptors:
        return f"{len(descriptors)} descriptors"
    reply = store_pb2.StoreReply.FromString(data)
    raise OSError(errno.ENOSPC, str(reply))


ATTEMPTS = {
    "a network of any family": every_family,
    "a connection to the ingress": lambda: socket.create_connection(("127.0.0.1", 8443), 5),
    "an abstract socket of the host": lambda: connect("\0/org/freedesktop/systemd1/private"),
    "other processes in /proc": other_processes,
    "init's memory": lambda: read("/proc/1/mem"),
    "ptrace": lambda: call(101, 16, 1, 0, 0),
    "process_vm_readv": lambda: call(310, 1, 0, 0, 0, 0, 0),
    "pidfd_open": lambda: call(434, 1, 0),
    "a signal to init": lambda: os.kill(1, 0),
    "a signal to everybody": lambda: os.kill(-1, signal.SIGTERM),
    "tgkill": lambda: call(234, 1, 1, 0),
    "devices": devices,
    "a new device": lambda: os.mknod("/tmp/device", 0o020600, os.makedev(1, 1)),
    "shared memory": lambda: write("/dev/shm/left"),
    "POSIX message queue": lambda: call(240, b"/left", os.O_CREAT | os.O_RDWR, 0o600, 0),
    "System V shared memory": lambda: call(29, 0, 4096, 0o1600),
    "kernel log device": lambda: read("/dev/kmsg"),
    "kernel log in /proc": lambda: read("/proc/kmsg"),
    "kernel log by syslog(2)": lambda: call(103, 3, 0, 0),
    "write /": lambda: write("/left"),
    "write /tmp": lambda: write("/tmp/left"),
    "write /var/tmp": lambda: write("/var/tmp/left"),
    "write /run": lambda: write("/run/left"),
    "write beside the runtime's sockets": lambda: write("/run/tie/runtime/left"),
    "write into the environment": lambda: write("/opt/tie/left"),
    "write among the libraries": lambda: write("/usr/lib/x86_64-linux-gnu/left"),
    "write into the model": lambda: write("/run/tie/assets/left"),
    "remove the runtime's directory": lambda: os.rmdir("/run/tie/runtime"),
    "a file of the host": lambda: read("/etc/shadow"),
    "a directory of the host": lambda: os.listdir("/home/."),
    "remount": lambda: call(165, b"none", b"/", b"tmpfs", 0, 0),
    "a namespace": lambda: call(272, 0x10000000),
    "memfd_create": lambda: os.memfd_create("left"),
    "memfd_secret": lambda: call(447, 0),
    "executable memory": lambda: __import__("mmap").mmap(-1, 4096, prot=7),
    "make memory executable": lambda: (
        libc.mprotect(ctypes.c_void_p(id(b"") & ~4095), 4096, 7) and call(10, ctypes.c_void_p(id(b"") & ~4095), 4096, 7)
    ),
    "execute a shell": lambda: os.execv("/bin/sh", ["sh", "-c", "true"]),
    "execute a program": lambda: os.execv("/usr/bin/id", ["id"]),
    "execute a program by descriptor": lambda: call(322, os.open("/usr/bin/id", os.O_RDONLY), b"", 0, 0, 0x1000),
    "execute by way of the loader": lambda: os.execv("/lib64/ld-linux-x86-64.so.2", ["ld.so", "/usr/bin/id"]),
    "a fork bomb": fork_bomb,
    "8 GiB of memory": lambda: bytearray(8 << 30),
    "8 GiB of anonymous pages": lambda: __import__("mmap").mmap(-1, 8 << 30),
    "8 GiB in the store": lambda: store_buffer(8 << 30),
    "bpf": lambda: call(321, 0, 0, 0),
    "io_uring": lambda: call(425, 8, 0),
    "userfaultfd": lambda: call(323, 0),
    "perf_event_open": lambda: call(298, 0, 0, -1, -1, 0),
    "keyctl": lambda: call(250, 0, 0, 0, 0, 0),
    "a raised limit": lambda: __import__("resource").setrlimit(__import__("resource").RLIMIT_DATA, (8 << 30, 8 << 30)),
    "become root": lambda: os.setuid(0),
    "the owner's socket": lambda: connect("/run/tie/owner/owner.sock"),
    "the owner's control": lambda: connect("/run/tie/owner-control/control.sock"),
    "the probe": lambda: connect("/run/tie/probe/probe.sock"),
    "the engine": lambda: connect("/run/tie/engine/engine.sock"),
    "the controller": lambda: connect("/run/tie/control/control.sock"),
    "CloudBoard": lambda: connect("/run/tie/cloudboard/node.sock"),
    "the key protection service": lambda: connect("/run/tie/kps/kps.sock"),
    "the store's control": lambda: connect("/run/tie/store-control/control.sock"),
    "another app": lambda: connect("/run/tie/app/app.sock"),
    "the node's keys": lambda: os.listdir("/run/tie/keys"),
    "systemd": lambda: connect("/run/systemd/private"),
    "D-Bus": lambda: connect("/run/dbus/system_bus_socket"),
    "the journal": lambda: connect("/run/systemd/journal/socket"),
}


def main():
    connection = socket.socket(fileno=3)
    word = connection.recv(200).decode()
    try:
        answer = f"done {ATTEMPTS[word]()}" if word in ATTEMPTS else "here"
    except (OSError, MemoryError, OverflowError, ValueError) as error:
        answer = errno.errorcode.get(error.errno or 0, "?") if isinstance(error, OSError) else type(error).__name__
    connection.sendall(json.dumps(answer).encode())
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)


if __name__ == "__main__":
    main()
