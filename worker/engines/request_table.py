"""The unfinished requests of an engine, and the reason why no more are taken."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from worker.errors import InvalidRequest, ServingError


class Unfinished(Protocol):
    """A request in the table, which knows how it ends in its engine."""

    @property
    def request_id(self) -> str:
        """The worker's id."""

    def keep_alive(self) -> None:
        """Give the consumer an empty delta if none has come since the last call."""

    def abort(self) -> None:
        """End the request as ``cancelled``."""

    def leave(self) -> None:
        """The consumer takes no more: end the request in the engine, if it is unfinished there."""

    def end(self, failure: ServingError) -> None:
        """End the request in the engine, and its stream with an exception."""


R = TypeVar("R", bound=Unfinished)


class RequestTable(Generic[R]):
    """Unfinished requests by id; used in one event loop only.

    Attributes:
        refusal: Error that every new request gets, the first ever given; None while they are taken.
    """

    def __init__(self) -> None:
        self.refusal: ServingError | None = None
        self._by_id: dict[str, R] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} unfinished, {self.refusal!r})"

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    @property
    def unfinished(self) -> list[R]:
        """The requests."""
        return list(self._by_id.values())

    def get(self, request_id: str) -> R | None:
        """The unfinished request of this id, None if there is none."""
        return self._by_id.get(request_id)

    def check(self, request_id: str) -> None:
        """Raises `refusal`, or `InvalidRequest` if the id is in use."""
        if self.refusal is not None:
            raise self.refusal
        if request_id in self._by_id:
            raise InvalidRequest("request_id", f"{request_id!r} is in use by an unfinished request")

    def add(self, request: R) -> None:
        """Enter a request that runs from now on."""
        self._by_id[request.request_id] = request

    def release(self, request: R) -> None:
        """Remove a request whose consumer takes no more, and end it if it is unfinished."""
        if self._by_id.get(request.request_id) is request:
            del self._by_id[request.request_id]
        request.leave()

    def abort(self, request_id: str) -> None:
        """End a request; its stream ends as ``cancelled``. Ignores unknown ids."""
        request = self._by_id.get(request_id)
        if request is not None:
            request.abort()

    def keep_alive(self) -> None:
        """Give an empty delta to each stream that has had none since the last call."""
        for request in self._by_id.values():
            request.keep_alive()

    def end_all(self, failure: ServingError) -> int:
        """Fail every stream, and refuse new requests; returns how many streams there were."""
        self.refusal = self.refusal or failure
        requests, self._by_id = self._by_id, {}
        for request in requests.values():
            request.end(failure)
        return len(requests)
