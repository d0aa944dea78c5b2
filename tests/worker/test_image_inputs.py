"""Pictures beside prompts: what a request may say, and where they may come from."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.arguments import parse_arguments
from worker.engines.images import ImageInput, ImageSources, check_pixels, data_url, image_sources, read_images
from worker.engines.vllm.images import Images
from worker.errors import ConfigurationError, InvalidRequest
from worker.frontdoor.fields import FIELDS as CLIENT_FIELDS
from worker.requests.request import RequestLimits, parse_request

TEXT_ONLY = RequestLimits(context_length=64, vocab_size=1000)
WITH_IMAGES = RequestLimits(context_length=64, vocab_size=1000, takes_images=True)
PIXEL = "data:image/png;base64,AAAA"
PICTURE = {"image_url": [{"Url": PIXEL}]}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["image_url", "video_url", "Url", "Decoded", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def test_an_engine_of_text_refuses_them_by_name() -> None:
    asked = {"token_ids": [5], "multi_modal_data": PICTURE}
    with pytest.raises(InvalidRequest, match=r"^multi_modal_data: this worker serves text only"):
        parse_request(asked, TEXT_ONLY)
    assert parse_request({**asked, "multi_modal_data": {"image_url": []}}, TEXT_ONLY).images == ()
    (image,) = parse_request(asked, WITH_IMAGES).images
    assert image == ImageInput("multi_modal_data.image_url[0].Url", PIXEL)
    scored = {**asked, "output_options": {"prompt_logprobs": 0}}
    with pytest.raises(InvalidRequest, match=r"^output_options\.prompt_logprobs: cannot be given beside"):
        parse_request(scored, WITH_IMAGES)


def test_what_the_frontend_adds_for_its_router_is_accepted() -> None:
    """Captured from the frontends of 1.4.2 and 1.6.1, of a model whose pictures they can count."""
    added = {
        "mm_routing_info": {
            "routing_token_ids": [5, 685336970, 685336970, 7, *[0] * 12],
            "block_mm_infos": [None, {"mm_objects": [{"mm_hash": 1, "offsets": [[1, 3]]}]}],
            "expanded_prompt_len": 4,
        },
        "extra_args": {
            "formatted_prompt": "a<image>b",
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}],
            "mm_hashes": ["4ef284b668ca274a"],
        },
    }
    asked = {"token_ids": [5, 6, 7], "multi_modal_data": PICTURE}
    assert parse_request({**asked, **added}, WITH_IMAGES) == parse_request(asked, WITH_IMAGES)


def test_clients_are_not_told_that_text_alone_is_served() -> None:
    assert [row.name for row in CLIENT_FIELDS if "text only" in row.why] == []


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ("mm_processor_kwargs", "pictures are read and prepared"),
        ("media_io_kwargs", "pictures are read and prepared"),
        ("multi_modal_uuids", "pictures are given by their URLs"),
        ("encoder_result", "there is no encode worker"),
    ],
)
def test_reasons_hold_where_pictures_are_served(field: str, problem: str) -> None:
    asked = {"token_ids": [5], "multi_modal_data": PICTURE, field: {"a": 1}}
    with pytest.raises(InvalidRequest, match=f"^{field}: {problem}"):
        parse_request(asked, WITH_IMAGES)


@given(value=JSON)
@settings(max_examples=examples(200), deadline=None)
def test_whatever_is_sent_is_read_or_refused_by_its_path(value: Any) -> None:
    with contextlib.suppress(InvalidRequest):
        found = read_images("multi_modal_data", value)
        assert [each.url for each in found] == [one["Url"] for one in value.get("image_url") or ()]
        return
    with pytest.raises(InvalidRequest, match=r"^multi_modal_data"):
        read_images("multi_modal_data", value)


@pytest.fixture
def files(tmp_path: Path) -> ImageSources:
    """A directory with a picture and a link out of it, beside one whose name begins the same."""
    allowed = tmp_path / "allowed"
    for directory in (allowed / "inner", tmp_path / "allowed-not"):
        directory.mkdir(parents=True)
        (directory / "a.png").write_bytes(b"")
    (allowed / "link.png").symlink_to(tmp_path / "allowed-not" / "a.png")
    return ImageSources(allowed, frozenset({"pictures.example"}))


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [
        (PIXEL, True),
        ("file://{root}/allowed/inner/a.png", True),
        ("file://localhost{root}/allowed/inner/a.png", True),
        ("file://{root}/allowed/inner/../../allowed-not/a.png", False),
        ("file://{root}/allowed/%2e%2e/allowed-not/a.png", False),
        ("file://{root}/allowed-not/a.png", False),
        ("file://{root}/allowed/link.png", False),
        ("file://{root}/allowed/inner", False),
        ("file://{root}/allowed/none.png", False),
        ("file://{root}/allowed/a%00.png", False),
        ("file://elsewhere{root}/allowed/inner/a.png", False),
        ("{root}/allowed/inner/a.png", False),
        ("https://pictures.example/a.png", True),
        ("http://PICTURES.example:8080/a.png", True),
        ("https://pictures.example.org/a.png", False),
        ("https://pictures.example@169.254.169.254/", False),
        ("ftp://pictures.example/a.png", False),
        ("http://[::1", False),
        ("", False),
    ],
)
def test_where_they_may_come_from(files: ImageSources, tmp_path: Path, url: str, is_allowed: bool) -> None:
    image = ImageInput("here", url.format(root=tmp_path))
    for sources, allowed in ((files, is_allowed), (ImageSources(), url == PIXEL)):
        if allowed:
            sources.check(image)
        else:
            with pytest.raises(InvalidRequest, match=r"^here: "):
                sources.check(image)


def test_a_path_with_a_host_is_refused(files: ImageSources, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14 raises an error that ended the request as one of the worker's own."""

    def path_of(url: str) -> str:
        raise URLError("file:// scheme is supported only on localhost")

    monkeypatch.setattr("worker.engines.images.url2pathname", path_of)
    with pytest.raises(InvalidRequest, match=r"^here: must be a URL: .*localhost"):
        files.check(ImageInput("here", "file:////elsewhere/a.png"))


class Connector:
    """vLLM's loader: the paths of the files that it would read."""

    def __init__(self, **_: object) -> None:
        pass

    async def fetch_image_async(self, url: str) -> str:
        parts = urlsplit(url)
        return url2pathname(parts.netloc + parts.path) if parts.scheme == "file" else url


@pytest.mark.parametrize("host", ["", "localhost"])
async def test_vllm_reads_the_file_that_was_checked(
    files: ImageSources, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """The host was the beginning of its path."""
    monkeypatch.setitem(sys.modules, "vllm.multimodal.media", SimpleNamespace(MediaConnector=Connector))
    monkeypatch.setattr("worker.engines.vllm.images.importlib.import_module", sys.modules.__getitem__)
    monkeypatch.setattr("worker.engines.images.check_pixels", lambda images: None)
    images = Images(files, SimpleNamespace(is_multimodal_model=True), "0.0")
    assert files.directory is not None
    path = files.directory / "inner" / "a.png"
    asked = [ImageInput("here", path.as_uri().replace("//", f"//{host}", 1)), ImageInput("there", PIXEL)]
    assert await images.load(asked) == [str(path), PIXEL]


class Opened:
    """What Pillow opens of a file whose text is its width and height."""

    def __init__(self, file: Any) -> None:
        content = Path(file).read_bytes() if isinstance(file, Path) else file.read()
        self.width, self.height = map(int, content.split())

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_pixels_are_bounded_for_all_pictures_of_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "PIL.Image", SimpleNamespace(open=Opened))
    (tmp_path / "a.png").write_bytes(b"16384 8192")
    half = data_url(b"16384 8192")
    urls = [half, "data:,", "data:image/png;base64,!", "https://a.example/b.png", (tmp_path / "a.png").as_uri()]
    check_pixels([ImageInput(f"at[{i}]", url) for i, url in enumerate(urls)])
    with pytest.raises(InvalidRequest, match=r"^at\[5\]: has more pixels than the 268435456 that"):
        check_pixels([ImageInput(f"at[{i}]", url) for i, url in enumerate([*urls, data_url(b"1 1")])])


@pytest.mark.parametrize("write", [str.upper, str.capitalize, " {}".format])
@pytest.mark.parametrize("scheme", ["data", "file"])
def test_pixels_count_however_a_scheme_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, write: Callable[[str], str]
) -> None:
    """The loaders read such URLs: 256 pictures of 2^27 pixels passed."""
    monkeypatch.setitem(sys.modules, "PIL", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "PIL.Image", SimpleNamespace(open=Opened))
    (tmp_path / "a.png").write_bytes(b"16384 16385")
    url = data_url(b"16384 16385") if scheme == "data" else (tmp_path / "a.png").as_uri()
    image = ImageInput("here", write(scheme) + url.removeprefix(scheme))
    ImageSources(tmp_path).check(image)
    with pytest.raises(InvalidRequest, match=r"^here: has more pixels than"):
        check_pixels([image])


def test_options(tmp_path: Path) -> None:
    def sources(*flags: str) -> ImageSources | None:
        return image_sources(parse_arguments(["--engine", "vllm", "--model-path", "/m", *flags], {}))

    assert sources() is None
    assert sources("--enable-multimodal") == sources("--modality", "multimodal") == ImageSources()
    given = sources("--modality", "multimodal", "--allowed-local-media-path", str(tmp_path))
    assert given == ImageSources(tmp_path)
    found = sources("--modality", "multimodal", "--allowed-media-domains", "Pictures.example")
    assert found is not None
    found.check(ImageInput("here", "https://Pictures.Example/a.png"))
    with pytest.raises(ConfigurationError, match="is not a directory"):
        sources("--modality", "multimodal", "--allowed-local-media-path", str(tmp_path / "none"))
    for flags, problem in (
        (("--allowed-media-domains", "a"), "need --modality multimodal"),
        (("--modality", "multimodal", "--disaggregation-mode", "prefill"), "aggregated workers alone"),
    ):
        with pytest.raises(ConfigurationError, match=problem):
            sources(*flags)
