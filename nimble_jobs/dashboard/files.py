"""The files of the page. Only names that lay in the package when the server started are served."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nimble_jobs.dashboard.answers import problem

FRONT = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
}
_OTHER = "text/plain; charset=utf-8"  # a licence, for instance


@dataclass(frozen=True, kw_only=True)
class PageFile:
    """A file of the page, as it is served."""

    data: bytes
    type: str
    tag: str  # changes with the bytes

    @classmethod
    def of(cls, name: str, data: bytes) -> PageFile:
        suffix = name[name.rfind(".") :] if "." in name else ""
        return cls(data=data, type=_TYPES.get(suffix, _OTHER), tag=f'"{hashlib.sha256(data).hexdigest()[:16]}"')


def page_files() -> dict[str, PageFile]:
    """All files of the page, by their path below its folder."""
    found: dict[str, PageFile] = {}

    def walk(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                walk(entry, f"{prefix}{entry.name}/")
            else:
                found[prefix + entry.name] = PageFile.of(entry.name, entry.read_bytes())

    walk(resources.files("nimble_jobs.dashboard") / "page", "")
    return found


def file_route() -> Route:
    """Every path that is not another route's."""
    files = page_files()

    async def respond(request: Request) -> Response:
        file = files.get(request.path_params["name"] or FRONT)
        if file is None:
            return problem(404, "not-found", "there is nothing at this address")
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers={"etag": file.tag})
        return Response(file.data, headers={"content-type": file.type, "etag": file.tag})

    return Route("/{name:path}", respond, methods=["GET"])
