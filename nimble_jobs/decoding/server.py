"""The decoding program: one process loads the decoder, and processes forked from it do the work.

The first process gets the descriptor of a control socket. Each byte that arrives there carries the descriptor of a
link, and the process forks a child to serve that link. The first process ends when the control socket closes or its
parent is gone. The kernel then kills the children.
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
_LOOK_S = 1.0  # how often the first process checks that its parent still lives


def main(descriptor: int) -> None:
    """Fork a child for each link that arrives, until the control socket closes or the parent is gone."""
    # A terminal sends these to every process. The parent decides when this one ends.
    for known in (signal.SIGINT, signal.SIGTERM):
        signal.signal(known, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps children that end
    warnings.simplefilter("ignore")  # a picture's problems are reported in its row
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
                except BaseException:  # noqa: BLE001 - the parent sees that the link closed; the reason belongs in the log
                    traceback.print_exc()
                finally:
                    os._exit(0)
            os.close(number)
    os._exit(0)


def serve(link: socket.socket) -> None:
    """Do the work that arrives, in order, until the link closes."""
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
    except Exception as e:  # noqa: BLE001 - not about one picture; the parent raises it where it waits for the answer
        return {"error": "".join(traceback.format_exception(e))}, []


def _keep_memory() -> None:
    """Make malloc keep freed memory for the next picture. New pages cost as much time as decoding into them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES // 2)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _warm_up() -> None:
    """Decode one picture, so that its imports happen once, before the forks."""
    Image.init()
    sink = BytesIO()
    Image.new("RGB", (64, 64)).save(sink, "JPEG")
    pixels(BytesIO(sink.getvalue()), Recipe(channels=3, resize=(8, 8), center_crop=None, size=(8, 8)))


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
