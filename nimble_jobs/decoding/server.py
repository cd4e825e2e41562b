"""The program that decodes: a process that loads the decoder once, and processes forked from it that do the work.

The first process is given the descriptor of a socket. For each byte that comes with a descriptor, a process is forked
that serves that one. All end with the socket's other side: the first process sees its end, or that its parent changed;
the others are killed by the kernel when the first is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from nimble_jobs.decoding.do import do
from nimble_jobs.decoding.picture import pixels
from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.decoding.wire import Inbox, pack
from nimble_jobs.decoding.work import Work

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 64 << 20  # in each process; a larger picture's memory goes back
_LOOK_S = 1.0  # how often the first process looks whether its parent is there


def main(descriptor: int) -> None:
    """Fork processes as they are asked for, until the other side is gone."""
    for known in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all; the other side says when to end
        signal.signal(known, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets those that have ended
    warnings.simplefilter("ignore")  # what is wrong with a picture is in its row
    parent, me = os.getppid(), os.getpid()
    _keep_memory()
    _warm_up()
    control = socket.socket(fileno=descriptor)
    while os.getppid() == parent:
        if not select.select([control], [], [], _LOOK_S)[0]:
            continue
        data, found, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            break
        for number in found:
            if os.fork() == 0:
                try:
                    control.close()
                    _die_with(me)
                    serve(socket.socket(fileno=number))
                except BaseException:  # noqa: BLE001 - its end is noticed; why belongs in the log
                    traceback.print_exc()
                finally:
                    os._exit(0)
            os.close(number)
    os._exit(0)


def serve(link: socket.socket) -> None:
    """Do the work that comes, in its order, until the other side is gone."""
    inbox = Inbox()
    maps: dict[int, np.ndarray] = {}
    link.sendall(b"".join(pack({"pid": os.getpid()})))
    while inbox.read(link):
        while (arrived := inbox.take()) is not None:
            message, blobs = arrived
            if "map" in message:
                number = inbox.descriptor()
                maps[message["map"]] = np.frombuffer(mmap.mmap(number, message["nbytes"]), dtype=np.uint8)
                os.close(number)
            elif "unmap" in message:
                maps.pop(message["unmap"], None)
            else:
                said, packed = _done(message, maps, blobs)
                link.sendall(b"".join(pack({"task": message["task"]} | said, packed)))


def _done(
    message: dict[str, Any], maps: dict[int, np.ndarray], blobs: list[bytes]
) -> tuple[dict[str, Any], list[bytes]]:
    asked = message["work"]
    try:
        work = Work.unpacked(asked, blobs)
        return do(work, maps[message["in"]], blobs[asked["packed"] :]).packed()
    except Exception as e:  # noqa: BLE001 - no picture's fault: it is raised where the answer is asked for
        return {"error": "".join(traceback.format_exception(e))}, []


def _keep_memory() -> None:
    """Have malloc keep the memory of a picture for the next one: new pages cost as much as decoding into them does."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES // 2)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _warm_up() -> None:
    """Import what the first picture would import, so that forked processes share it."""
    Image.init()
    sink = BytesIO()
    Image.new("RGB", (64, 64)).save(sink, "JPEG")
    pixels(BytesIO(sink.getvalue()), Recipe(channels=3, resize=(8, 8), center_crop=None, size=(8, 8)))


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
