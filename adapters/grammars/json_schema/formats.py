"""Formats of JSON Schema as languages, by their RFCs."""

from __future__ import annotations

from functools import lru_cache

from adapters.grammars.json_schema.ecma import whole
from adapters.grammars.json_schema.patterns import ANYTHING, Language, both, cat, complement, of_length, text

UNCONSTRAINED = frozenset({"password", "binary", "int32", "int64", "float", "double", "unknown"})
"""Formats of OpenAPI that say how a value is shown or stored; any text has them."""

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_OFFSET = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FRACTION = "(?:[.][0-9]+)?"


def _leap_seconds() -> str:
    """The last second of a day in UTC, in every time zone: offsets are quarters of an hour."""
    found = [f"23:59:60{_FRACTION}[zZ]"]
    for offset in range(0, 24 * 60, 15):
        written = f"{offset // 60:02}:{offset % 60:02}"
        for sign, local in (("[+]", (offset - 1) % 1440), ("-", 1439 - offset)):
            found.append(f"{local // 60:02}:{local % 60:02}:60{_FRACTION}{sign}{written}")
    return f"(?:{'|'.join(found)})"


_TIME = f"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}{_OFFSET}|{_leap_seconds()})"

_TIME_SPAN = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:{_DAYS}(?:{_TIME_SPAN})?|{_TIME_SPAN}|[0-9]+W)"

_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOSTNAME = f"{_LABEL}(?:[.]{_LABEL})*"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"{_BYTE}(?:[.]{_BYTE}){{3}}"
_H16 = "[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    """RFC 4291, section 2.2: eight groups, of which a run may be left out, the last two as IPv4."""
    last = f"(?:{_H16}:{_H16}|{_IPV4})"
    found = [f"(?:{_H16}:){{6}}{last}"]
    for left in range(8):
        before = f"{_H16}(?::{_H16}){{{left - 1}}}" if left else ""
        found += [f"{before}::(?:{_H16}:){{{right}}}{last}" for right in range(6 - left)]
        found += [f"{before}::{_H16}"] if left < 7 else []
        found.append(f"{before}::")
    return f"(?:{'|'.join(found)})"


_IPV6 = _ipv6()
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_UCS = "\\u{A0}-\\u{D7FF}\\u{F900}-\\u{FDCF}\\u{FDF0}-\\u{FFEF}\\u{10000}-\\u{1FFFD}\\u{20000}-\\u{3FFFD}"


def _email(ucs: str) -> str:
    atom = _ATOM[:1] + ucs + _ATOM[1:]
    domain = _HOSTNAME if not ucs else f"[a-zA-Z0-9{ucs}-]+(?:[.][a-zA-Z0-9{ucs}-]+)*"
    return f"{atom}(?:[.]{atom})*@(?:{domain}|\\[{_IPV4}\\])"


def _uri(ucs: str, *, relative: bool) -> str:
    """RFC 3986, appendix A; with ``ucs`` RFC 3987."""
    char = f"(?:[a-zA-Z0-9._~!$&'()*+,;=:@{ucs}-]|%[0-9a-fA-F]{{2}})"
    no_colon = f"(?:[a-zA-Z0-9._~!$&'()*+,;=@{ucs}-]|%[0-9a-fA-F]{{2}})"
    name = f"(?:[a-zA-Z0-9._~!$&'()*+,;={ucs}-]|%[0-9a-fA-F]{{2}})*"
    user = f"(?:[a-zA-Z0-9._~!$&'()*+,;=:{ucs}-]|%[0-9a-fA-F]{{2}})*@"
    literal = f"\\[(?:{_IPV6}|[vV][0-9a-fA-F]+[.][a-zA-Z0-9._~!$&'()*+,;=:-]+)\\]"
    network = f"//(?:{user})?(?:{literal}|{name})(?::[0-9]*)?(?:/{char}*)*"
    absolute, rootless = f"/(?:{char}+(?:/{char}*)*)?", f"{char}+(?:/{char}*)*"
    behind = f"(?:[?](?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?"
    found = f"[a-zA-Z][a-zA-Z0-9+.-]*:(?:{network}|{absolute}|{rootless})?{behind}"
    if not relative:
        return found
    return f"(?:{found}|(?:{network}|{absolute}|{no_colon}+(?:/{char}*)*)?{behind})"


_POINTER = "(?:/(?:[^~/]|~[01])*)*"

_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": _DURATION,
    "email": _email(""),
    "idn-email": _email(_UCS),
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "uri": _uri("", relative=False),
    "uri-reference": _uri("", relative=True),
    "iri": _uri(_UCS, relative=False),
    "iri-reference": _uri(_UCS, relative=True),
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "byte": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
}


_NO_YEAR = "0000-"
"""Beginning of dates that not all parsers know: Python and SQL have no year 0."""


@lru_cache(64)
def format_language(name: str) -> Language | None:
    """Texts of the format ``name``, None if it is unknown."""
    if name in UNCONSTRAINED:
        return ANYTHING
    if name not in _PATTERNS:
        return None
    language = whole(_PATTERNS[name])
    if name in ("date", "date-time"):
        return both([language, complement(cat([text(_NO_YEAR), ANYTHING]))])
    return both([language, of_length(0, 253)]) if name == "hostname" else language
