"""Run `wcpipe` many times without paying for its imports each time: a server that has imported all and forks.

WHY: a stage of a tiny world computes for a tenth of a second and imports torch for six. Measurements that start
hundreds of stages (the fault campaign) are about what happens to processes, and would be about imports. Each call is
still a process of its own that runs the real command line; `wcpipe` on PATH is a small client that stands for it:
signals go through to it, it has the client's output, folder and environment, its exit is the client's exit, and when
the client dies, by kill -9 too, it dies.


Not part of wcpipe: nothing outside benchmarks/ and tests/ knows of it.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
from pathlib import Path

CLIENT = r"""#!{python} -ISE
import array, json, os, signal, socket, struct, sys
line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
line.connect({address!r})
said = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
fds = array.array("i", [0, 1, 2])
line.sendmsg([struct.pack("<I", len(said))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
line.sendall(said)
child = struct.unpack("<i", line.recv(4, socket.MSG_WAITALL))[0]
def through(number, frame):
    try:
        os.kill(child, number)
    except ProcessLookupError:
        pass
for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), through)
answer = line.recv(4, socket.MSG_WAITALL)
status = struct.unpack("<i", answer)[0] if len(answer) == 4 else 9
if os.WIFSIGNALED(status):
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != 9 else None
    os.kill(os.getpid(), os.WTERMSIG(status))
sys.exit(os.waitstatus_to_exitcode(status))
"""


def write_client(folder: Path) -> Path:
    """Write FOLDER/bin/wcpipe; returns the address that the server listens at."""
    address = folder / "wcpipe.socket"
    client = folder / "bin" / "wcpipe"
    client.parent.mkdir(parents=True, exist_ok=True)
    client.write_text(CLIENT.replace("{python}", sys.executable).replace("{address!r}", repr(str(address))))
    client.chmod(0o755)
    return address


def serve(folder: Path) -> None:
    """Import everything once, then answer until stdin closes."""
    import stages.cli  # noqa: F401
    from pipeline import rewards, stores  # noqa: F401
    from pipeline.scorers import critic, pose_net  # noqa: F401
    from pipeline.updates import loop, policy  # noqa: F401
    from pipeline.worlds import registry, wan  # noqa: F401
    from pipeline.worlds.mini import load, prompts  # noqa: F401

    address = write_client(folder)
    address.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(address))
        listener.listen(64)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            line, _ = listener.accept()
            with contextlib.suppress(OSError, ValueError):  # the client died while it asked
                _start(line, listener)


def _start(line: socket.socket, listener: socket.socket) -> None:
    fds = array.array("i")
    head, ancillary, _, _ = line.recvmsg(4, socket.CMSG_LEN(3 * fds.itemsize))
    for _, _, data in ancillary:
        fds.frombytes(data)
    wanted = struct.unpack("<I", head)[0]
    said = b""
    while len(said) < wanted:
        part = line.recv(wanted - len(said))
        if not part:
            return
        said += part
    arguments, cwd, environment = json.loads(said)
    child = os.fork()
    if child == 0:
        listener.close()
        line.close()
        _become(arguments, cwd, environment, fds)
    for fd in fds:
        os.close(fd)
    with contextlib.suppress(OSError):  # a client that died meanwhile: the thread sees it at once
        line.sendall(struct.pack("<i", child))
    threading.Thread(target=_watch, args=(line, child), daemon=True).start()


def _watch(line: socket.socket, child: int) -> None:
    """Tell the client how its process ended; end the process when the client is gone."""
    handle = os.pidfd_open(child)
    ready, _, _ = select.select([line, handle], [], [])
    if handle not in ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(handle)
    with contextlib.suppress(OSError):
        line.sendall(struct.pack("<i", status))
    line.close()


def _become(arguments: list[str], cwd: str, environment: dict[str, str], fds: array.array[int]) -> None:
    code = 1
    try:
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
            os.close(fd)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["wcpipe", *arguments]
        from stages.cli import main

        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    serve(Path(sys.argv[1]).resolve())
