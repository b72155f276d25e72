"""The text transform of a run: remove dates from every text, or replace every year by one year.

Articles written after a model's training tell their age by their dates. A detector that reacts to dates and not to
membership looks good for the wrong reason. `DATES` lists the patterns of dates, in the order in which they are
searched; `YEAR` is the pattern of a year. Both are English. Numbers such as 2,015 or 3.1999 are no years.
"""

from __future__ import annotations

import re

from pipeline.config.corpus import TransformConfig

MONTH = (
    r"(?:Jan(?:uary|\.)?|Feb(?:ruary|\.)?|Mar(?:ch|\.)?|Apr(?:il|\.)?|May|June?|July?|Aug(?:ust|\.)?|"
    r"Sept?(?:ember|\.)?|Oct(?:ober|\.)?|Nov(?:ember|\.)?|Dec(?:ember|\.)?)"
)

DAY = r"(?:0?[1-9]|[12]\d|3[01])(?:st|nd|rd|th)?"
WEEKDAY = r"(?:(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day,?\s+)?"
YEAR = r"(?<![\d.,/-])(?:1[5-9]|2[01])\d\d(?![\d]|[.,]\d)"
"""1500 to 2199, by itself."""

ANY_YEAR = r"(?:1[5-9]|2[01])\d\d"
DATES = (
    rf"\b{ANY_YEAR}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?\b",  # 2023-05-17T08:30:00Z
    r"(?<![\d./])\d{1,2}([./-])\d{1,2}\1(?:\d{4}|\d\d)(?![\d./])",  # 17/05/2023, 17.5.23
    rf"\b{WEEKDAY}{DAY}(?:\s+of)?\s+{MONTH}(?:,?\s+{ANY_YEAR})?\b",  # Wednesday, 17th of May 2023; 17 May
    rf"\b{WEEKDAY}{MONTH}\s+{DAY}(?:,?\s+{ANY_YEAR})?\b",  # May 17, 2023; May 17
    rf"\b{MONTH},?\s+{ANY_YEAR}\b",  # May 2023
    rf"{YEAR}(?:\s*[-\u2013]\s*(?:{ANY_YEAR}|\d\d)(?!\d))?s?\b",  # 2023, 2019-2023, 1990s
)

_DATES = tuple(re.compile(pattern) for pattern in DATES)
_YEAR = re.compile(rf"(?:{YEAR}|(?<={ANY_YEAR}[-\u2013]){ANY_YEAR}(?!\d))(?!s\b)")
_YEAR_OF_A_DATE = re.compile(rf"(?<=[\d.,/-]){ANY_YEAR}(?!\d)|\b{ANY_YEAR}(?=-\d\d-\d\d)")
_GAPS = ((re.compile(r"\(\s*[,;]?\s*\)"), ""), (re.compile(r"[ \t]{2,}"), " "), (re.compile(r" +([,.;:!?)])"), r"\1"))


def transform(text: str, config: TransformConfig) -> str:
    """The text as the run reads it; a text without a date is returned unchanged."""
    if config.dates == "replace_year":
        year = str(config.year)
        for date in _DATES[:2]:
            text = date.sub(lambda match: _YEAR_OF_A_DATE.sub(year, match[0]), text)
        return _YEAR.sub(year, text)
    removed = text
    for date in _DATES:
        removed = date.sub("", removed)
    if removed == text:
        return text
    for gap, closed in _GAPS:
        removed = gap.sub(closed, removed)
    return removed.strip(" \t")
