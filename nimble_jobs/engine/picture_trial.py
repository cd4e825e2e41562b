"""Whether a device decodes JPEGs: it decodes one, once in a process."""

from __future__ import annotations

import base64
import contextlib
import functools

import numpy as np
import torch

from nimble_jobs.decoding.recipe import Recipe
from nimble_jobs.engine.device import able
from nimble_jobs.engine.pictures import PictureDecoder
from nimble_jobs.errors import DeviceFault, EngineError, OutOfMemory, first_line
from nimble_jobs.pictures import Pictures
from nimble_jobs.resizing import Interpolation

_SAMPLE = (64, 64, (200, 100, 50))  # height, width and colour of
_SAMPLE_JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAMCAgMCAgMDAwMEAwMEBQgFBQQEBQoHBwYIDAoMDAsKCwsNDhIQDQ4RDgsLEBYQERMUFRUVDA8XGBYUGB"
    "IUFRT/2wBDAQMEBAUEBQkFBQkUDQsNFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBT/wAARCABAAEADASIA"
    "AhEBAxEB/8QAFQABAQAAAAAAAAAAAAAAAAAAAAT/xAAUEAEAAAAAAAAAAAAAAAAAAAAA/8QAFgEBAQEAAAAAAAAAAAAAAAAAAAcI/8QAFBEBAAAAAA"
    "AAAAAAAAAAAAAAAP/aAAwDAQACEQMRAD8AkAQ9pAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAB/9k="
)


def available(device: torch.device, interpolation: Interpolation = "bilinear") -> str | None:
    """None if pictures can be decoded on the device and resized so, else why not. Decodes one to see.

    Raises OutOfMemory and DeviceFault.
    """
    if not able(device).decoder:
        return f"the job runs on the {device.type.upper()}, and only CUDA devices decode"
    if not torch.cuda.is_available():
        return "CUDA is not available"
    return _trial(torch.device("cuda", device.index or 0), interpolation)


@functools.cache
def _trial(device: torch.device, interpolation: Interpolation) -> str | None:
    height, width, colour = _SAMPLE
    data = np.frombuffer(bytearray(_SAMPLE_JPEG), dtype=np.uint8)
    sample = Pictures(
        data=data,
        spans=np.array([[0, len(data)]]),
        sizes=np.array([[height, width]], dtype=np.int32),
        alike=np.array([-1]),
    )
    try:
        decoder = PictureDecoder(device, Recipe(channels=3, size=(height, width), interpolation=interpolation))
        with contextlib.closing(decoder):
            out = torch.zeros(1, height, width, 3, dtype=torch.uint8, device=device)
            torch.cuda.current_stream(device).synchronize()
            failed = decoder.decode(sample, out)
            assert decoder.done is not None
            decoder.done.synchronize()
    except (OutOfMemory, DeviceFault):
        raise
    except EngineError as e:
        return str(e)
    except RuntimeError as e:
        if isinstance(e, torch.AcceleratorError):
            raise DeviceFault(str(e)) from e
        return first_line(e)
    if failed:
        return next(iter(decoder.refusals))
    far = (out.cpu().to(torch.int16) - torch.tensor(colour, dtype=torch.int16)).abs().max().item()
    return None if far <= 4 else f"a test picture was decoded wrongly: it is off by {far} of 255"
