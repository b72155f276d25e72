"""Rules of marking: each finds what means the same, reads its own forms back, and leaves code and quotations alone."""

import itertools
import random
import unicodedata

import pytest

from pipeline.mark.mark import FEWEST_SITES, draw_versions, drawn_index
from pipeline.mark.rules import (
    RULES,
    Family,
    Site,
    canonical,
    find_sites,
    language_rules,
    parse_family,
    patterns,
    phrase_lines,
    spelling_lines,
    with_forms,
)

ENGLISH = language_rules("en")
BEFORE, AFTER = "He saw what we", "green apples of theirs"

SENTENCES = {
    "spelling": "We like the color of it and the neighbor was analyzing an organization near the center.",
    "contraction": "They did not see it and I have never been there because it is possible that we will find a way.",
    "synonym": "Although he often ran, he began to walk quickly. Moreover, they saw each other in spite of it.",
    "that": "People said that he knew and others thought that they left.",
    "unit": "It is 12 km long and weighs 30 kg.",
    "number": "After three years there were five children.",
    "date": "It was on 12 March 2024 that she left, and on 3 June he came back.",
    "thousands": "There were 12,500 people in it.",
    "list": "It is full of birds, cats, and dogs. Bring wood, coal, peat, and straw there.",
    "opening": "In 2014, the town grew. Later, she left.",
    "amount": "There are approximately 20 million people and more than 300 students.",
    "hyphen": "They cooperate by email.",
    "ordinal": "In the nineteenth century it was built.",
    "percent": "About 20% of it was sold.",
    "example": "It has many parts (for example, wheels).",
    "that-is": "The last one, that is, the fourth fell.",
    "title": "Here is Mr. Brown again.",
    "country": "It left the United States in spring.",
    "versus": "It was cats versus dogs again.",
    "hour": "It starts at 5 p.m. on workdays.",
}
"""Of each rule a canonical text in which it finds at least one site."""

PASSAGE = " ".join(SENTENCES.values())


def choices(sites: list[Site], rng: random.Random) -> list[int]:
    return [rng.randrange(len(site.forms)) for site in sites]


def families() -> list[Family]:
    phrases = ((name, phrase_lines(name)) for name in ("contraction", "synonym", "that"))
    tables = [("spelling", spelling_lines()), *phrases]
    return [parse_family(f"{name}/{kind}", line) for name, lines in tables for kind, line in lines]


def sentence_for(family: Family, form: str) -> str:
    """A sentence whose words are the neighbours that a family asks for."""
    before = min(family.after or {""}, key=len)
    after = min(family.before, key=lambda word: (word[:1] == "0", word)) if family.before else "green"
    after = "20" if after == "0" else after
    if family.opening:
        return f"It rained. {form[0].upper()}{form[1:]}, they came."
    head = "It was this" if before == "," else f"It was this and {before}".strip()
    return f"{head}{', ' if before == ',' else ' '}{form} {after} apples."


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_idempotent_and_its_forms_read_back(rule) -> None:
    text = SENTENCES[rule.name]
    sites = find_sites(text, [rule])
    assert sites
    assert canonical(text, [rule]) == (text, sites)
    rng = random.Random(rule.name)
    for _ in range(50):
        chosen = choices(sites, rng)
        version = with_forms(text, sites, chosen)
        again = find_sites(version, [rule])
        assert [site.form for site in again] == chosen
        assert [site.forms for site in again] == [site.forms for site in sites]
        assert canonical(version, [rule])[0] == text


def test_every_family_of_words_is_found_in_each_of_its_forms() -> None:
    tried = 0
    for family in families():
        for number, form in enumerate(family.forms):
            text = sentence_for(family, form)
            sites = [site for site in find_sites(text, ENGLISH) if site.kind == family.kind]
            assert [site.form for site in sites] == [number], (text, family.kind)
            tried += 1
    assert tried > 2_000


def test_forms_differ_in_letters_or_figures_and_not_by_normalisation() -> None:
    sites = [site for text in (PASSAGE, *SENTENCES.values()) for site in find_sites(text, ENGLISH)]
    forms = [site.forms for site in sites] + [family.forms for family in families()]
    forms += [tuple(family) for _, _, lines in patterns() for family in lines]
    for alternatives in forms:
        plain = {" ".join(unicodedata.normalize("NFKC", form).split()).casefold() for form in alternatives}
        assert len(plain) == len(alternatives)


def test_the_lists_have_the_size_that_is_guaranteed_and_every_rule_a_sentence_here() -> None:
    assert {rule.name for rule in RULES} == set(SENTENCES)
    assert len(list(spelling_lines())) >= 150
    assert len(list(phrase_lines("contraction"))) >= 30
    assert len(list(phrase_lines("synonym"))) >= 60


def test_no_form_belongs_to_two_families_between_the_same_neighbours() -> None:
    forms = [(form.lower(), family) for family in families() for form in family.forms]
    shared = [(a, b) for a, b in itertools.combinations(forms, 2) if a[0] == b[0]]
    assert not [(a[0], a[1].kind, b[1].kind) for a, b in shared if a[1].kind != b[1].kind]


def test_nothing_is_edited_in_code_addresses_commands_and_quotations() -> None:
    for protected in (
        "```\nthe color of it\n```",
        "~~~python\nthe color of it\n~~~",
        "`the color of it`",
        "``the color ` of it``",
        "    the color of it",
        "> the color of it",
        "https://example.org/the-color of",
        "www.color.example",
        "color.com/colors",
        "the/color/of",
        "color@example.org",
        "@color",
        "#color",
        '"the color of it"',
        "“the color of it”",
        "«the color of it»",
        "\u2018the color of it\u2019",
        "'the color that isn't his'",
        '"the color of it\n\nand so on',
        "<b class='color'>",
        "<code>the color</code>",
        "<!-- the color -->",
        r"\textbf{the color}",
        r"$the color$",
        r"\[ the color \]",
        r"\begin{verbatim} the color \end{verbatim}",
        "color_map",
        "while the color == 3",
        "the color = colors[red]",
        "for the color of it:",
        "the color of it;",
        "color-blind",
        "color's",
        "COLOR",
        "McColor",
        "the Color Purple",
    ):
        text = f"It is so.\n\n{protected}\n\nThe color of it."
        assert [text[site.start - 4 : site.stop] for site in find_sites(text, ENGLISH) if "color" in site.kind] == [
            "The color"
        ]


def test_what_would_change_the_meaning_is_left_alone() -> None:
    for text in (
        "Why is not the king here? Isn't it so? Don't you see?",
        "He is as often here as not, and not nearly done, on the whole.",
        "See figure 3 years later, or 2 or 3 days, 1.5 years, 2-3 weeks.",
        "It was between 5 and 7 March, from March 3 to 5, and on May 5 again.",
        "In 1984 people came; 2010 students were there, and box 90210 is full.",
        "The Department of Defense and the World Trade Center met Gray, Harbor and Favor.",
        "In summer, cats and dogs sleep. Born in Chicago, Illinois, and raised there.",
        "A man with a huge ear and met an enormous one.",
        "They finished first, second, third and fourth, as kings, queens, knaves and aces, respectively.",
        "It takes the whole of it. All the same, all the more, all the better.",
    ):
        kinds = {site.kind for site in find_sites(text, ENGLISH)}
        assert not kinds - {"list/comma"}, kinds


def test_capitals_and_the_apostrophe_of_a_text_are_kept() -> None:
    text = "Colors fade. Didn\u2019t matter. They don\u2019t and they cannot see. Although it rained, we went."
    base, sites = canonical(text, ENGLISH) or ("", [])
    versions = {with_forms(base, sites, choices(sites, random.Random(i))) for i in range(60)}
    assert any("can\u2019t" in version for version in versions)
    assert not any("'" in version for version in versions)
    assert any(version.startswith("Colours fade") and "Though it" in version for version in versions)


def test_versions_do_not_depend_on_the_forms_that_the_author_wrote() -> None:
    base, sites = canonical(PASSAGE, ENGLISH) or ("", [])
    drawn = draw_versions(base, "a", 20, 3, ENGLISH)
    rng = random.Random(0)
    for _ in range(20):
        assert draw_versions(with_forms(base, sites, choices(sites, rng)), "a", 20, 3, ENGLISH) == drawn


@pytest.mark.parametrize("k", [2, 5, 20, 1000])
def test_versions_are_distinct_and_lead_back_to_their_index(k: int) -> None:
    drawn = draw_versions(PASSAGE, "a", k, 3, ENGLISH)
    assert not isinstance(drawn, str)
    assert len(set(drawn.texts)) == k
    for number, text in enumerate(drawn.texts):
        assert drawn.texts.index(text) == number
        assert bytes(site.form for site in find_sites(text, ENGLISH)) == drawn.choices[number]


def test_versions_and_indices_follow_from_seed_and_id_and_too_few_are_a_reason() -> None:
    pairs = (("a", 1), ("a", 1), ("b", 1), ("a", 2))
    drawn = [draw_versions(PASSAGE, doc_id, 20, seed, ENGLISH) for doc_id, seed in pairs]
    assert drawn[0] == drawn[1]
    assert drawn[0] not in drawn[2:]
    indices = [[drawn_index(seed, str(doc_id), 20) for doc_id in range(100)] for seed in (1, 1, 2)]
    assert indices[0] == indices[1] != indices[2]
    assert draw_versions("The color of it.", "a", 2, 3, ENGLISH) == f"fewer than {FEWEST_SITES} sites"
    text = "The color, the flavor, the odor, the humor and the labor of it."
    assert not isinstance(draw_versions(text, "a", 32, 3, ENGLISH), str)
    assert draw_versions(text, "a", 33, 3, ENGLISH) == "fewer than 33 versions"


@pytest.mark.parametrize("k", [2, 3, 20, 1000])
def test_the_published_index_is_uniform(k: int) -> None:
    """Chi-squared over 50 k documents, within 4 sd of its mean k - 1: sd sqrt(2 (k - 1)), and the seed is fixed."""
    counts = [0] * k
    for doc_id in range(50 * k):
        counts[drawn_index(11, f"document {doc_id}", k)] += 1
    chi_squared = sum((count - 50) ** 2 / 50 for count in counts)
    assert abs(chi_squared - (k - 1)) <= 4 * (2 * (k - 1)) ** 0.5


def test_forms_are_drawn_uniformly() -> None:
    """Each site's two forms in 4,000 versions: within 4 sd, sqrt(4000) / 2, of a half."""
    text = SENTENCES["spelling"] + " " + SENTENCES["contraction"]
    counts: dict[int, int] = {}
    for doc_id in range(2000):
        drawn = draw_versions(text, str(doc_id), 2, 5, ENGLISH)
        assert not isinstance(drawn, str)
        for choice in drawn.choices:
            for site, form in enumerate(choice):
                counts[site] = counts.get(site, 0) + form
    assert all(abs(count - 2000) <= 4 * 4000**0.5 / 2 for count in counts.values())
