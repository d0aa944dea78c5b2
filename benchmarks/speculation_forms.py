"""Structured answers of the speculation benchmark: calls of tools, and forty schemas in use.

The schemas are Kubernetes' own, as the package ``kubernetes-validate`` has them: of version
`KUBERNETES` those that describe an object of at least `FEWEST` properties without references, every
n-th of them. As structured outputs of a strict kind ask for it, all properties are required and no
others are allowed; what only describes is left out. Texts have `LONGEST_TEXT` characters at most: a
small model does not end them by itself.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from speculation_workload import Workload, chat

KUBERNETES = "v1.30.0-local-strict"
FEWEST, SCHEMAS, LONGEST_TEXT = 3, 40, 16

_KEPT = ("type", "properties", "items", "required", "additionalProperties", "enum")


def _tool(name: str, **parameters: dict[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": parameters,
        "required": [*parameters],
        "additionalProperties": False,
    }
    return {"name": name, "parameters": schema}


_TEXT: dict[str, Any] = {"type": "string", "maxLength": LONGEST_TEXT}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 20}

TOOLS = [
    _tool(
        "get_current_weather",
        location_name=_TEXT,
        temperature_unit={"enum": ["celsius", "fahrenheit"]},
        include_hourly_forecast={"type": "boolean"},
        number_of_forecast_days=_COUNT,
    ),
    _tool(
        "search_flight_connections",
        departure_airport_city=_TEXT,
        destination_airport_city=_TEXT,
        number_of_passengers=_COUNT,
        cabin_class={"enum": ["economy", "premium_economy", "business", "first"]},
        direct_connections_only={"type": "boolean"},
    ),
    _tool(
        "create_calendar_event",
        event_title=_TEXT,
        duration_in_minutes={"type": "integer", "minimum": 5, "maximum": 480},
        send_invitations_to_attendees={"type": "boolean"},
        notification_channel={"enum": ["email", "text_message", "none"]},
    ),
    _tool(
        "convert_currency_amount",
        amount_to_convert={"type": "integer", "minimum": 1, "maximum": 99999},
        source_currency_code={"enum": ["EUR", "USD", "GBP", "JPY"]},
        target_currency_code={"enum": ["EUR", "USD", "GBP", "JPY"]},
    ),
]

_WISHES = (
    "What is the weather like in Lisbon? In degrees Celsius, please.",
    "Find two seats from Oslo to Madrid, in economy.",
    "Put lunch with Anna into my calendar, for an hour.",
    "How much is 250 dollars in euros?",
    "Will it rain in Kyoto this week?",
    "I need a direct flight from Vienna to Athens, business class.",
    "Plan a meeting about the budget, 45 minutes, and tell everybody by mail.",
    "Change 9000 yen into pounds.",
)


def tools() -> Workload:
    """One call of one of four tools in each answer."""
    form = {"name": "tool_calls", "args": {"format": "hermes", "tools": TOOLS, "choice": "required", "parallel": False}}
    told = f"You answer with a call of one of these tools, as JSON: {json.dumps([one['name'] for one in TOOLS])}. "
    return Workload("tools", tuple(chat(told + wish) for wish in _WISHES), forms=((form,),) * len(_WISHES))


def strict(schema: Any) -> Any:
    """The schema with all properties required, no others allowed and short texts, without what only
    describes.
    """
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key in _KEPT}
    if "string" in kept.get("type", ()):
        kept["maxLength"] = LONGEST_TEXT
    if "properties" in kept:
        kept["properties"] = {name: strict(each) for name, each in kept["properties"].items()}
        kept |= {"required": [*kept["properties"]], "additionalProperties": False}
    for key in ("items", "additionalProperties"):
        if key in kept:
            kept[key] = strict(kept[key])
    return kept


def schemas() -> Workload:
    """One object of each of forty schemas."""
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / KUBERNETES
    texts = {one.name: one.read_text(encoding="utf-8") for one in folder.iterdir() if one.name.endswith("-v1.json")}
    alone = [json.loads(texts[name]) for name in sorted(texts) if '"$ref"' not in texts[name]]
    fit = [one for one in alone if len(one.get("properties", ())) >= FEWEST]
    chosen = [fit[len(fit) * number // SCHEMAS] for number in range(SCHEMAS)]
    chats = tuple(chat(f"Give me an example, as JSON. {one['description']}") for one in chosen)
    forms = tuple(({"name": "json_schema", "args": {"schema": strict(one)}},) for one in chosen)
    return Workload("schemas", chats, forms=forms)
