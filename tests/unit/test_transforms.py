"""Dates and years in texts."""

import pytest

from pipeline.config.corpus import TransformConfig
from pipeline.corpus.documents import transform

REMOVE = TransformConfig(dates="remove")
REPLACE = TransformConfig(dates="replace_year", year=2000)


@pytest.mark.parametrize(
    ("text", "removed", "replaced"),
    [
        ("It began in 2023.", "It began in.", "It began in 2000."),
        ("On May 17, 2023, it began.", "On, it began.", "On May 17, 2000, it began."),
        ("on Wednesday, 17th of May 2023 it", "on it", "on Wednesday, 17th of May 2000 it"),
        ("Sept. 2021 and Dec 5 were cold", "and were cold", "Sept. 2000 and Dec 5 were cold"),
        ("at 2023-05-17T08:30:00Z exactly", "at exactly", "at 2000-05-17T08:30:00Z exactly"),
        ("on 17/05/2023 or 17.5.23 it", "on or it", "on 17/05/2000 or 17.5.23 it"),
        ("the war (1914-1918) of the 1910s", "the war of the", "the war (2000-2000) of the 1910s"),
        ("2014\u201315 season", "season", "2000\u201315 season"),
    ],
)
def test_dates_are_taken_out_and_years_replaced(text: str, removed: str, replaced: str) -> None:
    assert transform(text, REMOVE) == removed
    assert transform(text, REPLACE) == replaced


@pytest.mark.parametrize(
    "text",
    [
        "It may rain; the march of 12 may be long.",
        "2,015 of 31999 and 3.1999 and 1999.5 km",
        "version 1.2.3 and route 66  with  two spaces ( )",
        "section 12345, room 1499, year 2200",
    ],
)
def test_a_text_without_a_date_is_left_as_it_is(text: str) -> None:
    assert transform(text, REMOVE) == transform(text, REPLACE) == text
