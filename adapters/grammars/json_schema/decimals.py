"""Exact decimal numbers as regular expressions: bounds of any size, without floating point."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, gcd, isfinite, lcm
from typing import Any, NamedTuple

MAX_DIGITS = 400
"""Longest number of a schema, digits: float64's are shorter."""

MAX_FRACTIONS = 1_024
"""Multiples of a step below 1 that are listed."""

INTEGER = "-?(?:0|[1-9][0-9]*)"
_MAGNITUDE = "(?:0|[1-9][0-9]*)(?:[.][0-9]+)?"
_EXPONENT = "(?:[eE][+-]?[0-9]+)?"
_ZERO = "0(?:[.]0+)?"
_NONZERO = "(?:[1-9][0-9]*(?:[.][0-9]+)?|0[.][0-9]*[1-9][0-9]*)"


class Bound(NamedTuple):
    """An end of an interval.

    Attributes:
        value: Number at the end.
        is_open: Whether the interval excludes it.
    """

    value: Fraction
    is_open: bool


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of an interval.

    Attributes:
        low: Lower end, None if there is none.
        high: Upper end, None if there is none.
        step: Number of which all are multiples, 1 for integers; None if they need not be any.
        fractional: Whether the integers are excluded.
    """

    low: Bound | None = None
    high: Bound | None = None
    step: Fraction | None = None
    fractional: bool = False

    @property
    def value(self) -> Fraction | None:
        """The only number, None if there may be more."""
        return self.low.value if self.low and self.high and self.low.value == self.high.value else None


def exact(number: Any) -> Fraction:
    """A number of JSON as it was written: of a float64 its shortest digits.

    Raises:
        ValueError: it is no number, or has more than `MAX_DIGITS` digits.
    """
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError("expected a number")
    if isinstance(number, int):
        if number.bit_length() > 3.3 * MAX_DIGITS:
            raise ValueError(f"expected a number of at most {MAX_DIGITS} digits")
        return Fraction(number)
    if not isfinite(number):
        raise ValueError("expected a finite number")
    return Fraction(Decimal(repr(number)))


def single(value: Fraction) -> Numbers:
    """The numbers that are ``value``."""
    return Numbers(Bound(value, False), Bound(value, False))


def meet(left: Numbers, right: Numbers) -> Numbers | None:
    """Numbers that are in both, None if there are none."""
    lows = [numbers.low for numbers in (left, right) if numbers.low]
    highs = [numbers.high for numbers in (left, right) if numbers.high]
    steps = [numbers.step for numbers in (left, right) if numbers.step]
    step = steps[0] if steps else None
    if len(steps) == 2:
        step = Fraction(lcm(steps[0].numerator, steps[1].numerator), gcd(steps[0].denominator, steps[1].denominator))
    found = Numbers(
        max(lows, default=None),
        min(highs, key=lambda bound: (bound.value, not bound.is_open), default=None),
        step,
        left.fractional or right.fractional,
    )
    return None if _is_empty(found) else found


def _is_empty(numbers: Numbers) -> bool:
    if numbers.fractional and numbers.step is not None and numbers.step.denominator == 1:
        return True
    if numbers.low is None or numbers.high is None:
        return False
    (low, low_open), (high, high_open) = numbers.low, numbers.high
    if low > high or (low == high and (low_open or high_open)):
        return True
    if numbers.step is not None:
        first, last = multiples(numbers)
        assert first is not None
        assert last is not None
        is_whole = first == last and (first * numbers.step).denominator == 1
        return first > last or (numbers.fractional and is_whole)
    return numbers.fractional and low == high and low.denominator == 1


def multiples(numbers: Numbers) -> tuple[int | None, int | None]:
    """The first and the last multiple of its step, divided by the step."""
    assert numbers.step is not None
    first = last = None
    if numbers.low is not None:
        first = ceil(numbers.low.value / numbers.step)
        first += numbers.low.is_open and first * numbers.step == numbers.low.value
    if numbers.high is not None:
        last = floor(numbers.high.value / numbers.step)
        last -= numbers.high.is_open and last * numbers.step == numbers.high.value
    return first, last


def digits(value: Fraction) -> str:
    """A number as JSON writes it, without an exponent."""
    whole, fraction = _digits(abs(value))
    return f"{'-' if value < 0 else ''}{whole}{'.' if fraction else ''}{fraction}"


def expression(numbers: Numbers, *, with_fraction: bool) -> str | None:
    """A terminal in Lark of ``numbers``, None where their step is neither a power of ten nor one
    over a whole number.

    Every number can be written; an exponent is possible where only the sign matters.

    Args:
        numbers: Numbers, at least one.
        with_fraction: Whether an integer may be written as ``1.0``.
    """
    value, step = numbers.value, numbers.step
    if value is not None:
        return f"/{written(value, with_fraction=with_fraction)}/"
    parts = list[str]()
    if step is not None:
        multiple = _multiple(step, with_fraction)
        if multiple is None:
            return None
        parts.append(multiple)
    if numbers.fractional:
        parts.append(f"{INTEGER}[.][0-9]*[1-9][0-9]*")
    signs_alone = not any(bound is not None and bound.value for bound in (numbers.low, numbers.high))
    power = _EXPONENT if signs_alone and not parts else ""
    parts += [_above(numbers.low, power)] if numbers.low else []
    parts += [_below(numbers.high, power)] if numbers.high else []
    return " & ".join(f"/{part}/" for part in parts or [f"-?{_MAGNITUDE}{power}"])


def written(value: Fraction, *, with_fraction: bool) -> str:
    """Regular expression of a number, with zeros behind it where an integer may have a fraction."""
    zeros = "(?:[.]0+)?" if value.denominator == 1 else "0*"
    return digits(value).replace(".", "[.]") + (zeros if with_fraction else "")


@lru_cache(64)
def _multiple(step: Fraction, with_fraction: bool) -> str | None:
    """Regular expression of the multiples of a step, None where `expression` has none."""
    zeros, exponent = "(?:[.]0+)?" if with_fraction else "", _power_of_ten(step)
    if exponent is not None and exponent > 0:
        return f"-?(?:0|[1-9][0-9]*0{{{exponent}}}){zeros}"
    if exponent is not None:
        more = f"(?:[.][0-9]{{1,{-exponent}}}{'0*' if with_fraction else ''})?" if exponent else zeros
        return INTEGER + more
    if step.numerator > 1 or step.denominator > MAX_FRACTIONS:
        return None
    fractions = "|".join(_digits(factor * step)[1] for factor in range(1, step.denominator))
    behind = f"0+|(?:{fractions})0*" if with_fraction else fractions
    return f"{INTEGER}(?:[.](?:{behind}))?"


def without(numbers: Numbers, value: Fraction) -> list[Numbers]:
    """The numbers but one, in two intervals."""
    sides = [Numbers(high=Bound(value, True)), Numbers(low=Bound(value, True))]
    return [found for side in sides if (found := meet(numbers, side))]


def complements(numbers: Numbers) -> list[Numbers] | None:
    """Every other number, None if that is no union of intervals."""
    found = list[Numbers]()
    if numbers.low:
        found.append(Numbers(high=Bound(numbers.low.value, not numbers.low.is_open)))
    if numbers.high:
        found.append(Numbers(low=Bound(numbers.high.value, not numbers.high.is_open)))
    if numbers.fractional:
        found.append(Numbers(step=Fraction(1)))
    if numbers.step == 1:
        found.append(Numbers(fractional=True))
    elif numbers.step is not None:
        return None
    return found


def _power_of_ten(step: Fraction) -> int | None:
    """n of 10**n, None if it is none."""
    whole, inverse = str(step.numerator), str(step.denominator)
    if inverse == "1" and whole.rstrip("0") == "1":
        return len(whole) - 1
    return 1 - len(inverse) if whole == "1" and inverse.rstrip("0") == "1" else None


def _digits(value: Fraction) -> tuple[str, str]:
    """Digits of a value that is not negative, before the point and behind it."""
    whole, rest = divmod(value.numerator, value.denominator)
    behind = list[str]()
    while rest:
        digit, rest = divmod(rest * 10, value.denominator)
        behind.append(str(digit))
    return str(whole), "".join(behind)


def _above(bound: Bound, power: str) -> str:
    """Numbers above a lower end."""
    value, is_open = bound
    if value > 0:
        return _greater(value, is_open)
    if value == 0:
        return f"{_NONZERO}{power}" if is_open else f"(?:{_MAGNITUDE}{power}|-{_ZERO}{power})"
    return f"(?:{_MAGNITUDE}|-{_less(-value, is_open)})"


def _below(bound: Bound, power: str) -> str:
    """Numbers below an upper end."""
    value, is_open = bound
    if value < 0:
        return f"-{_greater(-value, is_open)}"
    if value == 0:
        return f"-{_NONZERO}{power}" if is_open else f"(?:-{_MAGNITUDE}{power}|{_ZERO}{power})"
    return f"(?:-{_MAGNITUDE}|{_less(value, is_open)})"


def _greater(value: Fraction, strictly: bool) -> str:
    """Magnitudes of at least ``value``, or above it."""
    whole, behind = _digits(value)
    options = [f"[1-9][0-9]{{{len(whole)},}}(?:[.][0-9]+)?"]
    options += [f"{part}(?:[.][0-9]+)?" for part in _lexical(whole, above=True)]
    if not behind and not strictly:
        options.append(f"{whole}(?:[.][0-9]+)?")
    else:
        options += [f"{whole}[.]{part}[0-9]*" for part in _lexical(behind, above=True, fixed=False)]
        options.append(f"{whole}[.]{behind}[0-9]*" + ("[1-9][0-9]*" if strictly else ""))
    return f"(?:{'|'.join(options)})"


def _less(value: Fraction, strictly: bool) -> str:
    """Magnitudes of at most ``value``, or below it."""
    whole, behind = _digits(value)
    options = list[str]()
    if len(whole) > 1:
        options.append(f"(?:0|[1-9][0-9]{{0,{len(whole) - 2}}})(?:[.][0-9]+)?")
    options += [f"{part}(?:[.][0-9]+)?" for part in _lexical(whole, above=False)]
    if behind:
        options.append(whole)
        options += [f"{whole}[.]{behind[:length]}" for length in range(1, len(behind))]
        options += [f"{whole}[.]{part}[0-9]*" for part in _lexical(behind, above=False, fixed=False)]
    if not strictly:
        options.append(f"{whole}[.]{behind}0*" if behind else f"{whole}(?:[.]0+)?")
    return f"(?:{'|'.join(options)})"


def _lexical(text: str, *, above: bool, fixed: bool = True) -> list[str]:
    """Digits that differ from ``text`` at one place, and are greater or less there.

    Args:
        text: Digits.
        above: Whether they are greater.
        fixed: Whether they are as many, without a zero in front; otherwise any digits may follow.
    """
    found = list[str]()
    for index, digit in enumerate(text):
        first = "1" if fixed and index == 0 and len(text) > 1 else "0"
        low, high = (chr(ord(digit) + 1), "9") if above else (first, chr(ord(digit) - 1))
        if low <= high:
            rest = f"[0-9]{{{len(text) - index - 1}}}" if fixed and index + 1 < len(text) else ""
            found.append(f"{text[:index]}[{low}-{high}]{rest}")
    return found
