"""Pictures beside a prompt: where they may come from, and what a request says of them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import io
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from worker.errors import ConfigurationError, InvalidRequest, one_line, shown

if TYPE_CHECKING:
    from worker.arguments import Arguments

FIELD = "multi_modal_data"
"""Field of a request with its pictures, in the form that Dynamo's frontend gives them."""

MAX_IMAGES = 256
"""Pictures of one request."""

MAX_PIXELS = 2**28
"""Pixels of a request's pictures together: 0.8 GB in RGB, some 20 photographs."""

ANY_PICTURE = "image/*"
"""Type of media of a picture's file of which nobody has said what it is."""

_KIND, _URL = "image_url", "Url"


@dataclass(frozen=True, slots=True)
class ImageInput:
    """A picture of a prompt, in the place of one of its tokens.

    Attributes:
        path: JSON path in the request.
        url: URL of it: ``data:`` with the file itself, ``file:``, ``http:`` or ``https:``.
    """

    path: str
    url: str


@dataclass(frozen=True, slots=True)
class ImageSources:
    """The places that pictures may come from, beside requests themselves.

    Attributes:
        directory: Directory whose files requests may name, None for no files.
        hosts: Names of the hosts that are asked for pictures, in lower case.
    """

    directory: Path | None = None
    hosts: frozenset[str] = frozenset()

    def check(self, image: ImageInput) -> None:
        """Raises `InvalidRequest` if the picture may not be read from its URL."""
        try:
            url = urlsplit(image.url)
            host, file = url.hostname, file_of(image.url)
        except (OSError, ValueError) as error:  # Python 3.14's, of a path with another host
            raise InvalidRequest(image.path, f"must be a URL: {error}") from None
        if url.scheme == "data":
            return
        if file is not None:
            self._check_file(image, url.netloc, file)
        elif url.scheme not in ("http", "https"):
            raise InvalidRequest(image.path, f"must be a URL of data:, file:, http: or https:, got {shown(image.url)}")
        elif host not in self.hosts:
            problem = f"{shown(host)} is no host of --allowed-media-domains; a data: URL holds the picture itself"
            raise InvalidRequest(image.path, problem)

    def _check_file(self, image: ImageInput, host: str, file: Path) -> None:
        problem = "is no file below --allowed-local-media-path; a data: URL holds the picture itself"
        if self.directory is None or host not in ("", "localhost"):
            raise InvalidRequest(image.path, problem)
        try:
            path = file.resolve()
            is_below = path.is_relative_to(self.directory.resolve()) and path.is_file()
        except (OSError, ValueError, RuntimeError):  # a loop of links, a name that no file can have
            is_below = False
        if not is_below:
            raise InvalidRequest(image.path, problem)

    async def load(self, images: Sequence[ImageInput], load: Callable[[str], Awaitable[Any]]) -> list[Any]:
        """The pictures of a request, in order; ``load`` is a library's own loader of a URL.

        Raises:
            InvalidRequest: one may not be read, or cannot, or they have too many pixels.
        """

        async def loaded(image: ImageInput) -> Any:
            try:
                return await load(image.url)
            except Exception as error:  # the library's loader: whatever a file or a host runs into
                raise InvalidRequest(image.path, f"is no picture that can be read: {one_line(error)}") from error

        for image in images:
            self.check(image)
        await asyncio.to_thread(check_pixels, images)
        return await asyncio.gather(*map(loaded, images))


def read_images(path: str, value: Any) -> tuple[ImageInput, ...]:
    """The pictures in a request's field.

    Args:
        path: Path of the field.
        value: ``{"image_url": [{"Url": ...}, ...]}``, as Dynamo's frontend sends it.

    Raises:
        InvalidRequest: it is malformed, or has other media.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequest(path, f"must be an object, got {shown(value)}")
    for kind, items in value.items():
        if kind != _KIND and items:
            raise InvalidRequest(f"{path}.{shown(kind).strip(chr(39))}", "only pictures (image_url) are served")
    items = value.get(_KIND) or []
    if not isinstance(items, list) or len(items) > MAX_IMAGES:
        raise InvalidRequest(f"{path}.{_KIND}", f"must be a list of at most {MAX_IMAGES} pictures")
    return tuple(_image(f"{path}.{_KIND}[{place}]", item) for place, item in enumerate(items))


def _image(path: str, item: Any) -> ImageInput:
    if not isinstance(item, Mapping) or set(item) != {_URL} or not isinstance(item[_URL], str):
        raise InvalidRequest(path, f'must be {{"{_URL}": a URL}}, got {shown(item)}')
    return ImageInput(f"{path}.{_URL}", item[_URL])


def check_pixels(images: Sequence[ImageInput]) -> None:
    """Refuse pictures whose pixels would take too much memory: small files may hold very many.

    Only the beginnings of files are decoded. Pictures of hosts are not looked at here: the
    operator trusts those, and the engine's loader fetches them.

    Raises:
        InvalidRequest: naming the picture that exceeds `MAX_PIXELS` with those before it.
    """
    total = 0
    for image in images:
        total += _num_pixels(image.url)
        if total > MAX_PIXELS:
            problem = f"has more pixels than the {MAX_PIXELS} that the pictures of a request may have together"
            raise InvalidRequest(image.path, problem)


def _num_pixels(url: str) -> int:
    """Pixels of a file, 0 where there is none that can be read: the loader says so. Loaders read a
    scheme in capitals, too.
    """
    file: Any = file_of(url)
    with contextlib.suppress(Exception):  # Pillow's, of whatever is in the file
        if file is None and urlsplit(url).scheme == "data":
            file = io.BytesIO(base64.b64decode(url.partition(",")[2]))
        if file is not None:
            with importlib.import_module("PIL.Image").open(file) as opened:
                return int(opened.width * opened.height)
    return 0


def file_of(url: str) -> Path | None:
    """The file that a ``file:`` URL names, None for another. Raises `ValueError` for no URL, and
    `OSError` where the path names another host.
    """
    parts = urlsplit(url)
    return Path(url2pathname(parts.path)) if parts.scheme == "file" else None


def data_url(content: bytes, media_type: str = ANY_PICTURE) -> str:
    """The URL that holds a file itself (RFC 2397).

    Args:
        content: Bytes of the file.
        media_type: Type of media of the file, such as ``image/png``.
    """
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def image_sources(arguments: Arguments) -> ImageSources | None:
    """The places that the options allow, None if no pictures are served.

    Raises:
        ConfigurationError: the directory does not exist.
    """
    if arguments.modality == "text":
        return None
    directory = None if arguments.allowed_local_media_path is None else Path(arguments.allowed_local_media_path)
    if directory is not None and not directory.is_dir():
        raise ConfigurationError(f"--allowed-local-media-path {directory}: is not a directory")
    return ImageSources(directory, frozenset(host.lower() for host in arguments.allowed_media_domains))
