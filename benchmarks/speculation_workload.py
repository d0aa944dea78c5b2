"""Requests of the speculation benchmark, and what a peer is asked and answers.

Standard library only: peers import this in their own environments.

Every request has a text of its own, so that no answer repeats another one's. Where an answer is to
repeat its prompt, the chat shows first how that is done, as a chat that has gone on for a while
does: the model is small, and without an example it talks about the text instead.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Chat = list[dict[str, str]]

MOST_ROWS = 8
LONGEST = 1536
"""Tokens of the longest prompt and answer together."""

NGRAM: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 6,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
"""Settings of n-gram speculation, ours and the peers'."""

LONG_KEYS: dict[str, Any] = {
    "customer_identification_number": {"type": "integer", "minimum": 0, "maximum": 9999},
    "preferred_communication_language": {"enum": ["English", "German", "French"]},
    "is_subscribed_to_the_newsletter": {"type": "boolean"},
    "shipping_address_is_billing_address": {"type": "boolean"},
    "number_of_orders_in_the_last_year": {"type": "integer", "minimum": 0, "maximum": 99},
    "loyalty_programme_membership_level": {"enum": ["none", "silver", "gold"]},
}
SCHEMA = {"type": "object", "properties": LONG_KEYS, "required": [*LONG_KEYS], "additionalProperties": False}


@dataclass
class Ask:
    """Prompts that are answered together.

    Attributes:
        prompts: Token ids.
        tokens: Of an answer at most.
        temperature: 0 for greedy answers.
        seed: Of the first prompt; that of the next one is one more.
        schema: JSON Schema of the answers.
        speculates: Whether tokens may be drafted; a peer that cannot choose answers as it is.
        forms: Logits processors of each prompt, by name, which no peer has.
        predictions: Text that each answer is likely to be, which no peer takes.
        together: Prompts that are answered at a time; 0 for all.
    """

    prompts: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    temperature: float = 0.0
    seed: int = 0
    schema: dict[str, Any] | None = None
    speculates: bool = True
    forms: list[list[dict[str, Any]]] = field(default_factory=list)
    predictions: list[str] = field(default_factory=list)
    together: int = 0


@dataclass
class Answered:
    """The tokens of each answer, and the time of the processor that they took, seconds."""

    answers: list[list[int]] = field(default_factory=list)
    cpu_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))


def timed(answer: Callable[[Ask], list[list[int]]]) -> Callable[[Ask], Answered]:
    """`answer`, with the time of the processor that it takes in this process."""

    def timing(asked: Ask) -> Answered:
        began = time.process_time()
        answers = answer(asked)
        return Answered(answers, time.process_time() - began)

    return timing


@dataclass(frozen=True)
class Workload:
    """One kind of request.

    Attributes:
        name: Label.
        chats: `MOST_ROWS` of them; or more, which are answered as many at a time as a batch has.
        temperature: 0 for greedy answers.
        schema: JSON Schema of all answers.
        forms: Logits processors of each chat, by name, which no peer has.
        predictions: Text that each answer is likely to be, which no peer takes.
    """

    name: str
    chats: tuple[Chat, ...]
    temperature: float = 0.0
    schema: dict[str, Any] | None = None
    forms: tuple[tuple[dict[str, Any], ...], ...] = ()
    predictions: tuple[str, ...] = ()


def chat(*turns: str) -> Chat:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(turns)]


_CUSTOMERS = ("bookshop", "bakery", "pharmacy", "garage", "florist", "theatre", "ferry line", "brewery")


def json_chats() -> tuple[Chat, ...]:
    """Objects with long keys."""
    return tuple(chat(f"Describe a customer of a {shop} as JSON.") for shop in _CUSTOMERS)


_WARDS = ("harbour", "station", "airport", "market", "library", "museum", "hospital", "theatre")
_SHIPS = (
    "Alexandra",
    "Nordlicht",
    "Maria Celeste",
    "Aurora",
    "Petrel",
    "Santa Lucia",
    "Kestrel",
    "Halcyon",
    "Borealis",
)
_CARGO = ("grain", "timber", "cement", "coffee", "steel", "cotton", "copper", "paper")


def report(number: int) -> str:
    """Three lines of a log, like no other's."""
    source = random.Random(number)
    ships = source.sample(_SHIPS, 3)
    lines = []
    for ship in ships:
        hour, minute = source.randrange(24), source.randrange(60)
        tonnes, cargo = source.randrange(100, 9999), source.choice(_CARGO)
        lines.append(
            f"{hour:02}:{minute:02} {ship} unloaded {tonnes} tonnes of {cargo} at quay {source.randrange(1, 30)}."
        )
    return "\n".join(lines)


def extract_chats() -> tuple[Chat, ...]:
    """Lines of a text, word for word."""
    asked = "Extract the entries about ships from this note, word for word:\n\n"
    note = "Dear colleagues, here is what the {place} office wrote down today.\n{lines}\nPlease file it. Kind regards."
    example, lines = note.format(place="pilot", lines=report(100)), report(100)
    return tuple(
        chat(asked + example, lines, asked + note.format(place=place, lines=report(number)))
        for number, place in enumerate(_WARDS)
    )


_EXAMPLES = (
    """def count_words(lines):
    total = 0
    for line in lines:
        total += len(line.split())
    return total
""",
    """def weight_of_cart(cart, limit):
    total = 0
    for item in cart.items:
        total += item.weight * item.quantity
        if total > limit:
            raise ValueError("the cart is too heavy")
    return total
""",
)

_PROGRAMS = (
    """def average_of_column(rows, column):
    total = 0.0
    count = 0
    for row in rows:
        value = row.get(column)
        if value is None:
            continue
        total += float(value)
        count += 1
    if count == 0:
        raise ValueError("no row has a value in the column " + column)
    return total / count
""",
    """def price_of_order(order, discounts):
    total = 0
    for item in order.items:
        price = item.price * item.quantity
        if item.code in discounts:
            price -= discounts[item.code] * item.quantity
        total += max(price, 0)
    if order.is_express:
        total += order.express_fee
    return round(total, 2)
""",
    """def balance_of_account(transactions, account):
    total = 0
    for transaction in transactions:
        if transaction.source == account:
            total -= transaction.amount + transaction.fee
        if transaction.target == account:
            total += transaction.amount
    if total < 0:
        logging.warning("account %s is overdrawn", account)
    return total
""",
    """def send_invoice(customer, order, mailer):
    subject = "Invoice for order " + order.number
    body = "Dear " + customer.name + ", please find your invoice attached."
    message = mailer.new_message(customer.email, subject, body)
    message.attach(order.invoice_file)
    if customer.wants_copy:
        message.copy_to(customer.second_email)
    mailer.send(message)
    logging.info("sent the invoice of order %s", order.number)
""",
    """def describe_weather(report):
    if report.temperature < 0:
        text = "It is freezing"
    elif report.temperature < 15:
        text = "It is cool"
    elif report.temperature < 25:
        text = "It is warm"
    else:
        text = "It is hot"
    if report.is_raining:
        text += " and it rains"
    return text + " in " + report.city
""",
    """def draw_table(screen, rows, width, height):
    screen.clear()
    screen.set_color("black")
    screen.draw_line(0, 0, width, 0)
    screen.draw_line(0, height, width, height)
    screen.draw_line(0, 0, 0, height)
    screen.draw_line(width, 0, width, height)
    for number, row in enumerate(rows):
        screen.draw_text(10, 20 * number, row.title)
        screen.draw_text(200, 20 * number, row.value)
    screen.show()
""",
    """def validate_address(address):
    if not address.street:
        raise ValueError("the street is missing")
    if not address.city:
        raise ValueError("the city is missing")
    if not address.country:
        raise ValueError("the country is missing")
    if len(address.postal_code) != 5:
        raise ValueError("the postal code must have five digits")
    if not address.postal_code.isdigit():
        raise ValueError("the postal code must be a number")
    return True
""",
    """def size_of_directory(path, pattern):
    total = 0
    for entry in os.scandir(path):
        if entry.is_dir(follow_symlinks=False):
            total += size_of_directory(entry.path, pattern)
        elif fnmatch.fnmatch(entry.name, pattern):
            total += entry.stat().st_size
    return total
""",
)


def edit_chats() -> tuple[Chat, ...]:
    """Programs to which a line is added; of such ones that this model can repeat."""
    asked = "Add import logging at the top of this program, and leave the rest as it is:\n\n```python\n{}```"
    answered = "```python\nimport logging\n\n\n{}```"
    examples = [turn.format(program) for program in _EXAMPLES for turn in (asked, answered)]
    return tuple(chat(*examples, asked.format(program)) for program in _PROGRAMS)


_PLACES = ("lighthouse", "bridge", "desert", "submarine", "library", "volcano", "circus", "railway")


def text_chats() -> tuple[Chat, ...]:
    """Stories."""
    return tuple(chat(f"Write a story about a {place}.") for place in _PLACES)


WORKLOADS = (
    Workload("json", json_chats(), schema=SCHEMA),
    Workload("edit", edit_chats(), predictions=_PROGRAMS),
    Workload("extract", extract_chats()),
    Workload("text", text_chats(), temperature=1.0),
)
