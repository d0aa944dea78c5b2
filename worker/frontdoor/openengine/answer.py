"""`AnswerForm`: the chunks of one answer in the forms of OpenAI's API, as Dynamo's frontend has
them.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from adapters.vocabulary import ReasoningTokens
from worker.engines import LEAST_LOGPROB
from worker.frontdoor.completions.openai_logprobs import HIDDEN
from worker.frontdoor.openengine.body import AskedAnswer
from worker.frontdoor.openengine.thinking import Part, ThinkingSplit
from worker.requests.prompt_scores import TokenText

Chunk = Mapping[str, Any]
"""A chunk of `worker.runtimes.direct`, with its text."""

Document = dict[str, Any]


class AnswerForm:
    """Makes the events of one answer, or the whole of it.

    Args:
        asked: The answer that was asked for.
        request_id: Id of the request.
        created: Time of the request, seconds since 1970.
        token_text: Text of each token.
        split: Separation of thinking, None where the text is the answer.
        reasoning: Count of the tokens of thinking, which are fed to it elsewhere; None as `split`.
        hidden: Tokens that the text leaves out.
        num_prompt_tokens: Tokens of the prompt, for the usage before the last chunk.
    """

    def __init__(
        self,
        asked: AskedAnswer,
        request_id: str,
        created: int,
        token_text: TokenText,
        split: ThinkingSplit | None = None,
        reasoning: ReasoningTokens | None = None,
        hidden: Collection[int] = (),
        num_prompt_tokens: int = 0,
    ) -> None:
        self._asked = asked
        self._token_text = token_text
        self._split = split
        self._reasoning = reasoning
        self._hidden = hidden
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._has_begun = False
        self._length = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._usage: Document | None = None
        name = "chatcmpl" if asked.is_chat else "cmpl"
        self._same: Document = {"id": f"{name}-{request_id}", "created": created, "model": asked.model}
        if not asked.is_chat:
            self._same["system_fingerprint"] = None

    def events(self, chunk: Chunk) -> Iterator[Document]:
        """The data of the events of a chunk; none if it has nothing for the client."""
        reason = chunk.get("finish_reason")
        self._num_tokens += len(chunk["token_ids"])
        if chunk.get("completion_usage") is not None:
            self._usage = self._usage_form(chunk["completion_usage"])
        parts = self._parts(chunk)
        shown = self._extension(chunk)
        if not parts and reason is None and not shown and not chunk.get("log_probs"):
            return
        logprobs = self._logprobs(chunk)
        while len(parts) > 1:  # one of thinking, one of the answer behind it
            yield self._event(parts.pop(0), None, logprobs)
            logprobs = None
        yield self._event(parts[0] if parts else None, reason, logprobs) | shown

    def usage_event(self) -> Document:
        """The data of the event with the usage, behind the last chunk."""
        return self._same | {"object": self._object("chunk"), "choices": [], "usage": self._usage}

    def whole(self, chunks: Iterable[Chunk]) -> Document:
        """The whole answer that chunks, the last of which ends it, put together."""
        parts: dict[Part, list[str]] = {}
        lists: dict[str, list[Any]] = {}
        reason, usage, extension = None, None, Document()
        for chunk in chunks:
            for name, text in self._parts(chunk):
                parts.setdefault(name, []).append(text)
            for key, values in (self._logprobs(chunk) or {}).items():
                lists.setdefault(key, []).extend(values or ())
            reason = chunk.get("finish_reason", reason)
            usage = chunk.get("completion_usage", usage)
            _join(extension, self._extension(chunk).get("nvext", {}))
        made = self._same | {"object": self._object(), "usage": None if usage is None else self._usage_form(usage)}
        texts = {name: "".join(each) for name, each in parts.items()}
        made["choices"] = [self._whole_choice(texts, lists, reason)]
        return made | ({"nvext": extension} if extension else {})

    def _whole_choice(self, texts: Mapping[Part, str], lists: dict[str, list[Any]], reason: str | None) -> Document:
        if not self._asked.is_chat:
            choice = {"text": texts.get("content", ""), "index": 0, "finish_reason": reason}
            return choice | ({"logprobs": lists} if lists else {})
        message = {"content": texts.get("content", None if texts else ""), "refusal": None, "role": "assistant"}
        message |= {name: text for name, text in texts.items() if name != "content"}
        logprobs = {"content": lists["content"], "refusal": None} if lists else None
        return {"index": 0, "message": message, "finish_reason": reason, "logprobs": logprobs}

    def _event(self, part: tuple[Part, str] | None, reason: str | None, logprobs: Any) -> Document:
        event = self._same | {"object": self._object("chunk")}
        if self._asked.has_running_usage:
            event["usage"] = self._usage or self._running_usage()
        elif not self._asked.is_chat:
            event["usage"] = None
        if not self._asked.is_chat:
            choice: Document = {"text": part[1] if part else "", "index": 0}
            choice |= {"finish_reason": reason} if reason else {}
            choice |= {"logprobs": logprobs} if logprobs else {}
            return event | {"choices": [choice]}
        delta: Document = {} if part is None else {part[0]: part[1]}
        if not self._has_begun:
            self._has_begun = True
            delta = {"content": "", **delta} if part is None else delta
            delta["role"] = "assistant"
        return event | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}]}

    def _object(self, kind: str = "") -> str:
        if not self._asked.is_chat:
            return "text_completion"
        return "chat.completion" + ("." * bool(kind)) + kind

    def _parts(self, chunk: Chunk) -> list[tuple[Part, str]]:
        text = chunk.get("text", "")
        if self._split is not None:
            return list(self._split.feed(text, ends=chunk.get("finish_reason") is not None))
        return [("content", text)] if text else []

    def _extension(self, chunk: Chunk) -> Document:
        """``nvext`` of a chunk, if it has some."""
        if not self._asked.has_engine_data or not chunk.get("engine_data"):
            return {}
        return {"nvext": {"engine_data": dict(chunk["engine_data"])}}

    def _running_usage(self) -> Document:
        """The usage before the last chunk, which alone tells of cached tokens."""
        prompt, count = self._num_prompt_tokens, self._num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}

    def _usage_form(self, usage: Mapping[str, Any]) -> Document:
        details = {} if self._asked.is_chat else {"audio_tokens": None}
        form = {
            **usage,
            "prompt_tokens_details": {**details, **usage.get("prompt_tokens_details", {"cached_tokens": 0})},
        }
        if self._reasoning is not None:
            form["completion_tokens_details"] = {"reasoning_tokens": self._reasoning.count}
        return form

    def _logprobs(self, chunk: Chunk) -> Document | None:
        scores: Sequence[float] = chunk.get("log_probs") or ()
        if not scores:
            return None
        entries = [self._entry(*each) for each in zip(chunk["token_ids"], scores, strict=True)]
        tops = [[self._entry(one["token_id"], one["logprob"]) for one in top] for top in chunk["top_logprobs"]]
        if self._asked.is_chat:
            ids = [{"token_id": token_id} for token_id in chunk["token_ids"]]
            content = [{**e, **i, "top_logprobs": top} for e, i, top in zip(entries, ids, tops, strict=True)]
            return {"content": content, "refusal": None}
        names = [entry["token"] for entry in entries]
        hides = [token_id in self._hidden and not self._asked.names_ids for token_id in chunk["token_ids"]]
        if not self._asked.names_ids:  # what each adds to the text: nothing before a character's last part
            names = [
                entry["token"] if hidden else self._decoder.decode(bytes(entry["bytes"]))
                for entry, hidden in zip(entries, hides, strict=True)
            ]
        offsets = []
        for name, hidden in zip(names, hides, strict=True):
            offsets.append(self._length)
            self._length += 0 if hidden else len(name)
        return {
            "tokens": names,
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
            HIDDEN: hides,
        }

    def _entry(self, token_id: int, logprob: float) -> Document:
        data = f"token_id:{token_id}".encode() if self._asked.names_ids else self._token_text(token_id)
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(data)}


def _join(whole: Document, part: Mapping[str, Any]) -> None:
    """Add the ``nvext`` of a chunk to that of the answer."""
    if "engine_data" in part:
        whole["engine_data"] = {**whole.get("engine_data", {}), **part["engine_data"]}
