"""Rules that find places of a text that can be written in several equivalent ways."""

from __future__ import annotations

import itertools
import re
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

from pipeline.errors import UserError, nearest

_WORDS = tomllib.loads(resources.files(__package__).joinpath("english.toml").read_text(encoding="utf-8"))

SETS: dict[str, frozenset[str]] = {name: frozenset(words.split()) for name, words in _WORDS["sets"].items()}
"""Words that separate others, and words of a kind."""

MONTHS: tuple[str, ...] = tuple(_WORDS["months"].split())
UNORDERED = SETS["UNORDERED"] | set(MONTHS)
"""Items whose enumeration keeps its order."""

RULES_VERSION = 1
"""Version of the rules, increased where the same text and seed would give other versions."""

_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*|\d+")
_END = re.compile(r"[.,;:!?)]*(?:[\s—]|\Z)")
_ABBREVIATED = re.compile(
    r"\b(?:[^\W\d_]|Mrs?|Ms|Dr|Prof|Gen|Col|Lt|Sgt|Rev|Hon|St|Jr|Sr|vs|cf|al|etc|No|Nos|Vol|pp|Fig|Co|Inc|Ltd)\.\Z"
)
_PROTECTED = re.compile(
    r"""
    \A---\n.*?\n---(?=\n)                                     # front matter
    | ^[ ]{0,3}(```+|~~~+).*?(?:^[ ]{0,3}\1|\Z)               # fenced code
    | (?<!`)(`{1,3})(?!`).+?(?<!`)\2(?!`)                     # inline code
    | ^(?:[ ]{4}|\t|[ ]{0,3}>)[^\n]*                          # indented code, quoted lines
    | ^(?=[^\n]{0,200}$)[^\n]*?(?:[=!]=|->|=>|\w\(\)|\w\[\w+\]|[;{}]$)[^\n]*     # a line of code outside of fences
    | ^[ ]*(?:def|class|import|from|return|if|elif|else|for|while|try|except|with)\b[^\n]{0,160}:$
    | <!--.*?(?:-->|\Z) | <(code|pre|script|style|q|blockquote|math)\b.*?(?:</\3\s*>|\Z) | </?[A-Za-z][^<>]*>
    | &\#?\w{1,31};
    | \\begin\{(equation|align|gather|verbatim|lstlisting|quote|math)(\*?)\}.*?(?:\\end\{\4\5\}|\Z)
    | \\\(.*?(?:\\\)|\Z) | \\\[.*?(?:\\\]|\Z) | \$\$.*?(?:\$\$|\Z) | (?<!\\)\$(?=\S)[^$\n]*?(?<=[^\s\\])\$(?!\d)
    | \\[A-Za-z]+\*?(?:\[[^\]\n]{0,200}\])?(?:\{[^{}]*\})*
    | (?<![\w+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://\S+ | \bwww\.\S+ | \b(?:doi|mailto|urn):\S+
    | (?<![\w.+-])[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+ | (?<!\w)[@\#][\w-]+
    | (?<![\w.-])[\w-]{1,63}(?:\.[\w-]{1,63}){0,8}\.(?:com|org|net|edu|gov|io|uk|de|fr|eu|info|dev|ai)\b(?:/\S*)?
    | (?<![\w./-])[\w.-]*+(?:/[\w.-]*+)++
    | "[^"]*?(?:"|\n\s*\n|\Z) | “[^”]*?(?:”|\n\s*\n|\Z) | „[^“”]*?(?:[“”]|\n\s*\n|\Z) | «[^»]*?(?:»|\n\s*\n|\Z)
    | (?<![\w'])'(?=\S)(?:[^'\n]|(?<=\w)'(?=\w))*(?<=\S)'(?!\w)
    | (?<!\w)\u2018(?:[^\u2018\u2019\n]|(?<=\w)\u2019(?=\w))*\u2019
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
"""Parts that are never edited: code, addresses, commands, formulas, account names, tags and quotations."""


def spelling_lines() -> Iterator[tuple[str, str]]:
    """Every American spelling with its British one; the kind is the stem."""
    between = _WORDS["spellings_between"]
    for family in _WORDS["stems"].split(";"):
        stems, *suffixes = family.split()
        american, british = stems.split("/")
        bound = bool(suffixes) and suffixes[0].startswith("-")  # a stem that is not a word
        for suffix in [*([] if bound else [""]), *(suffix.lstrip("-") for suffix in suffixes)]:
            yield american, f"{american}{suffix}|{british}{suffix} ; {between.get(american, '')}"
    for stem in _WORDS["ize"].split():
        for suffix in ("e", "es", "ed", "ing", "ation", "ations", "er", "ers"):
            yield "ize", f"{stem}iz{suffix}|{stem}is{suffix}"


def phrase_lines(table: str) -> Iterator[tuple[str, str]]:
    """The families of a table; the kind is the canonical form, for contractions and units the short part."""
    for line in _WORDS[table].strip().split("\n"):
        first = line.split("|")[0]
        yield (first.split()[-1] if table == "contraction" else first.split()[0] if table == "that" else first), line


def number_lines() -> Iterator[tuple[str, str]]:
    """Numbers of counted things, in words and in figures."""
    for value, word in enumerate(_WORDS["numbers"].split(), 2):
        yield word, f"{word}|{value} ; >COUNTED <!LABEL ="


def patterns() -> Iterator[tuple[str, str, list[list[str]]]]:
    """(name, regular expression, families of its matches); capitals in braces denote a set in an expression."""
    sets = {"MONTH": _WORDS["months"], "NUMBER": _WORDS["numbers"], **_WORDS["sets"]}
    for name, entry in _WORDS["patterns"].items():
        families = [family.split("|") for line in entry["families"].strip().split("\n") for family in line.split(";")]
        forms = "|".join(re.escape(form) for family in families for form in sorted(family, key=len, reverse=True))
        expression = entry["pattern"].replace("{FORMS}", f"(?:{forms})")
        for capitals, words in sets.items():
            expression = expression.replace(f"{{{capitals}}}", f"(?:{'|'.join(words.split())})")
        yield name, expression, families


@dataclass(frozen=True, slots=True)
class Site:
    """A place of a text that can be written in several equivalent ways."""

    start: int
    stop: int
    kind: str  # "rule/family"
    forms: tuple[str, ...]  # all forms, the canonical one first
    form: int  # index of the form in the text


@dataclass(frozen=True, slots=True)
class Prose:
    """A text and its words."""

    text: str
    words: list[tuple[int, int, str]]  # start, stop, in lower case with a straight apostrophe
    apostrophe: str  # apostrophe of its contractions

    def before(self, start: int, index: int) -> str:
        """The word before a place; "," where a comma is between, empty where anything else is."""
        if not index:
            return ""
        end = self.words[index - 1][1]
        between = self.text[end:start]
        return _neighbour(self.words[index - 1][2]) if between == " " else "," if between == ", " else ""

    def after(self, stop: int, index: int) -> str:
        """The word after a place, `index` of the words; empty where more than a blank is between."""
        if index == len(self.words) or self.words[index][0] != stop + 1 or self.text[stop] != " ":
            return ""
        return _neighbour(self.words[index][2])


@dataclass(frozen=True, slots=True)
class Family:
    """Equivalent forms, and the neighbouring words that they require."""

    kind: str
    forms: tuple[str, ...]
    after: frozenset[str] | None  # allowed words before it; None: any
    not_after: frozenset[str]
    before: frozenset[str] | None
    not_before: frozenset[str]
    followed: bool  # whether a word must follow
    opening: bool  # whether it opens a sentence and has a comma after it
    lower: bool  # whether it never starts a sentence


@dataclass(frozen=True, slots=True)
class MarkRule:
    """A method that finds sites in texts of one language."""

    name: str
    language: str
    sites: Callable[[Prose], Iterable[Site]]


def find_apostrophe(text: str) -> str:
    """The apostrophe that a text uses."""
    return "\u2019" if "\u2019" in text else "'"


def read_prose(text: str, apostrophe: str) -> Prose:
    """A text with its words."""
    words = [(m.start(), m.end(), m[0].lower().replace("\u2019", "'")) for m in _WORD.finditer(text)]
    return Prose(text, words, apostrophe)


def language_rules(language: str) -> tuple[MarkRule, ...]:
    """The rules of a language.

    Raises:
        UserError: there are none.
    """
    rules = tuple(rule for rule in RULES if rule.language == language)
    if not rules:
        known = dict.fromkeys(rule.language for rule in RULES)
        raise UserError(f"--language {language!r} has no marking rules; {nearest(language, known, 'languages')}")
    return rules


def find_sites(text: str, rules: Sequence[MarkRule], apostrophe: str | None = None) -> list[Site]:
    """The sites of a text in order, without overlaps, none in code, addresses, commands or quotations.

    Of sites that overlap or are adjacent the first is kept, and of those with the same start the longest, so that no
    form of a site affects another site.

    Args:
        text: any text.
        rules: rules of its language.
        apostrophe: apostrophe of contractions; None: the one that the text uses.
    """
    prose = read_prose(text, apostrophe or find_apostrophe(text))
    sites = sorted((site for rule in rules for site in rule.sites(prose)), key=lambda site: (site.start, -site.stop))
    spans = [match.span() for match in _PROTECTED.finditer(text)]
    starts = [start for start, _ in spans]
    kept: list[Site] = []
    for site in sites:
        index = bisect_right(starts, site.stop - 1) - 1
        if (index < 0 or spans[index][1] <= site.start) and (not kept or kept[-1].stop <= site.start):
            kept.append(site)
    return kept


def with_forms(text: str, sites: Sequence[Site], forms: Sequence[int]) -> str:
    """A text with a form at each of its sites.

    Args:
        text: text in which the sites were found.
        sites: sites in order.
        forms: index of the form at each site.
    """
    pieces, at = [], 0
    for site, form in zip(sites, forms, strict=True):
        pieces += [text[at : site.start], site.forms[form]]
        at = site.stop
    return "".join([*pieces, text[at:]])


def canonical(text: str, rules: Sequence[MarkRule]) -> tuple[str, list[Site]] | None:
    """A text with the canonical form at every site, and its sites; None where edits create or remove other sites.

    The result is a fixed point: it is its own canonical text.
    """
    apostrophe = find_apostrophe(text)
    for _ in range(4):
        sites = find_sites(text, rules, apostrophe)
        if not any(site.form for site in sites):
            return text, sites
        text = with_forms(text, sites, [0] * len(sites))
    return None


def _named(names: str) -> list[str]:
    return [",", *filter(None, names.split(","))] if names.startswith(",") else names.split(",")


def _neighbour(word: str) -> str:
    return word if not word[0].isdigit() or word == "1" else "0"


def parse_family(kind: str, line: str) -> Family:
    """Parse the family of a line of a table (`pipeline.mark.rules`)."""
    head, _, tail = line.partition(";")
    sets: dict[str, frozenset[str]] = {}
    for token in tail.split():
        if token[:1] in "<>":
            mark, names = re.match(r"([<>]!?)(.*)", token).groups()  # type: ignore[union-attr]
            sets[mark] = frozenset(word for name in _named(names) for word in SETS.get(name, {name}))
    flags, some = tail.split(), sets.get(">")
    return Family(
        kind,
        tuple(head.strip().split("|")),
        sets.get("<"),
        sets.get("<!", frozenset()),
        None if some is None or "*" in some else some,
        sets.get(">!", frozenset()),
        ">*" in flags,
        "^" in flags,
        "=" in flags,
    )


def lexical(rule: str, lines: Iterable[tuple[str, str]]) -> Callable[[Prose], Iterator[Site]]:
    """A function from a text to the sites of families of words and phrases.

    Args:
        rule: name of the rule.
        lines: (kind, line of a table) of each family.
    """
    table: dict[str, list[tuple[tuple[str, ...], Family, int]]] = {}
    for kind, line in lines:
        family = parse_family(f"{rule}/{kind}", line)
        for number, form in enumerate(family.forms):
            first, *rest = form.lower().split()
            table.setdefault(first, []).append((tuple(rest), family, number))
    for entries in table.values():
        entries.sort(key=lambda entry: -len(entry[0]))

    def sites(prose: Prose) -> Iterator[Site]:
        for index, (_, _, word) in enumerate(prose.words):
            for rest, family, number in table.get(word, ()):
                last = index + len(rest)
                if rest and not _runs_on(prose, index, rest):
                    continue
                site = _fitted(prose, family, number, index, last)
                if site is not None:
                    yield site
                    break

    return sites


def _runs_on(prose: Prose, index: int, rest: Sequence[str]) -> bool:
    """Whether the other words of a phrase follow a word, separated by one blank each."""
    words = prose.words[index : index + len(rest) + 1]
    pairs = zip(itertools.pairwise(words), rest, strict=False)
    return len(words) > len(rest) and all(
        b[2] == word and b[0] == a[1] + 1 and prose.text[a[1]] == " " for (a, b), word in pairs
    )


def _fitted(prose: Prose, family: Family, number: int, index: int, last: int) -> Site | None:
    """The site of a family whose form is at the given words; None where its neighbours do not match."""
    text, start, stop = prose.text, prose.words[index][0], prose.words[last][1]
    if (start and text[start - 1] not in " \n\t(—") or not _END.match(text, stop):
        return None
    shown, form = text[start:stop], family.forms[number]
    capital = shown.replace("\u2019", "'") != form
    if capital and (shown.replace("\u2019", "'") != _capital(form) or family.lower or not _opens(text, start)):
        return None
    before, after = prose.before(start, index), prose.after(stop, last + 1)
    if (family.after is not None and before not in family.after) or before in family.not_after:
        return None
    if (family.before is not None and after not in family.before) or after in family.not_before:
        return None
    if (family.followed and not after) or (family.opening and not (capital and text.startswith(", ", stop))):
        return None
    if capital and after and text[stop + 1].isupper():  # a title
        return None
    if before in ("a", "an") and len({one[0] in "aeiou" for one in family.forms}) > 1:
        return None
    forms = [_capital(one) if capital else one for one in family.forms]
    forms = [one.replace("'", prose.apostrophe) for one in forms]
    forms[number] = shown
    return Site(start, stop, family.kind, tuple(forms), number)


def _capital(form: str) -> str:
    return form[0].upper() + form[1:]


def _opens(text: str, start: int) -> bool:
    """Whether a place starts a sentence or a line."""
    at = start - 1
    while at >= 0 and text[at] in " \t(":
        at -= 1
    if at < 0 or text[at] == "\n":
        return True
    return text[at] in ".!?" and not _ABBREVIATED.search(text, max(0, at - 6), at + 1)


def _pattern(kind: str, pattern: str, families: Sequence[Sequence[str]]) -> Callable[[Prose], Iterator[Site]]:
    """A function from a text to the matches of a pattern, each of which is a form of a family."""
    compiled = re.compile(pattern)
    known = {form: (tuple(family), number) for family in families for number, form in enumerate(family)}

    def sites(prose: Prose) -> Iterator[Site]:
        for match in compiled.finditer(prose.text):
            forms, number = known[match[0]]
            yield Site(match.start(), match.end(), f"{kind}/{forms[0]}", forms, number)

    return sites


_MONTH = "|".join(MONTHS)
_DATE = re.compile(
    rf"(?<![^\s(])(?:(?P<d>\d{{1,2}}) (?P<m>{_MONTH})(?: (?P<y>(?:1[5-9]|20)\d\d))?"
    rf"|(?P<M>{_MONTH}) (?P<D>\d{{1,2}})(?:, (?P<Y>(?:1[5-9]|20)\d\d))?)(?=[.,;:)]*(?:\s|\Z))"
)
_RANGE = ",? (?:to|and|or|through|until)"
_RANGE_BEHIND = re.compile(rf"(?:{_RANGE})? (?:\d|{_MONTH})")
_RANGE_BEFORE = re.compile(rf"(?:\d|{_MONTH})(?:{_RANGE})? \Z")


def _dates(prose: Prose) -> Iterator[Site]:
    """12 March 2024 and March 12, 2024, also without the year."""
    text = prose.text
    for match in _DATE.finditer(text):
        day, month, year = (match[low] or match[low.upper()] for low in "dmy")
        ranged = _RANGE_BEHIND.match(text, match.end()) or _RANGE_BEFORE.search(
            text, max(0, match.start() - 24), match.start()
        )
        if ranged or not 1 <= int(day) <= 31 or (not year and month == "May"):
            continue
        forms = (f"{day} {month} {year}", f"{month} {day}, {year}") if year else (f"{day} {month}", f"{month} {day}")
        if match[0] in forms:
            yield Site(match.start(), match.end(), "date/year" if year else "date/day", forms, forms.index(match[0]))


_THOUSANDS = re.compile(rf"(?<![^\s(])(\d{{1,3}},\d{{3}}|\d{{4,6}})(?= (?:{'|'.join(sorted(SETS['MANY']))})\b)")


def _thousands(prose: Prose) -> Iterator[Site]:
    """12,500 and 12500 for counted things; never a number that may be a year."""
    for match in _THOUSANDS.finditer(prose.text):
        value = int(match[0].replace(",", ""))
        forms = (f"{value:,}", str(value))
        if not 1000 <= value <= 2100 and match[0] in forms:
            yield Site(match.start(), match.end(), "thousands/comma", forms, forms.index(match[0]))


_LIST = re.compile(r"(?<![\w'\u2019-])([A-Za-z]+)((?:, [A-Za-z]+){1,7})(,? )(and|or) ([A-Za-z]+)(?![\w'\u2019-])")
_INTRODUCED = re.compile(r"\b(?:such as|including|include|includes|of|between|among|with|for|from) \Z")
_CLOSED = re.compile(
    r"[.;:)]|,\s|\n|\Z| (?:is|are|was|were|in|on|at|that|which|who|can|will|would|have|has|had|may|must|should)\b"
)
_ORDERED = re.compile(r"[^.\n]{0,300}?\b(?:respectively|order|ordered|then|followed|latter|former|first|last)\b")


def _lists(prose: Prose) -> Iterator[Site]:
    """Enumerations of single words: the comma before the last item and, where nothing depends on it, the order."""
    text = prose.text
    for match in _LIST.finditer(text):
        items = [match[1], *match[2][2:].split(", "), match[5]]
        names, plural = (
            all(item[0].isupper() for item in items),
            all(re.fullmatch("[a-z]{2,}[^siu]s", i) for i in items),
        )
        introduced = bool(_INTRODUCED.search(text, max(0, match.start() - 12), match.start()))
        if any(
            len(item) < 3 or item.lower() in SETS["NO_ITEMS"] or item.endswith("ly") or item in SETS["STATES"]
            for item in items
        ):
            continue
        if not ((len(items) > 3 and (names or all(map(str.islower, items)))) or (plural and introduced)):
            continue
        free = introduced and len(items) <= 4 and len(set(items)) == len(items) and not UNORDERED & set(items)
        if free and _CLOSED.match(text, match.end()) and not _ORDERED.match(text, match.end()):
            orders = itertools.permutations(sorted(items))
            forms = tuple(
                f"{', '.join(order[:-1])}{comma} {match[4]} {order[-1]}" for order in orders for comma in (",", "")
            )
            yield Site(match.start(), match.end(), "list/order", forms, forms.index(match[0]))
        else:
            forms = (f", {match[4]}", f" {match[4]}")
            yield Site(match.start(3), match.end(4), "list/comma", forms, int(match[3] == " "))


_OPENING = re.compile(
    rf"(?:(?<=[.!?] )|^)(?:In (?:(?:early|late|mid) )?(?:(?:{_MONTH}) )?(?:1[5-9]|20)\d\d|Today|Currently|Recently"
    r"|Later|Originally|Eventually|Previously|Traditionally|Historically|Ultimately|Subsequently|Meanwhile|Afterwards?)"
    r"(,? )(?=(?:the(?! same)|he|she|it|they|we|you|his|her|their|its|this|these|there|an?|both|several|many|some)\b)",
    re.MULTILINE,
)


def _openings(prose: Prose) -> Iterator[Site]:
    """The comma after a time or an adverb that opens a sentence."""
    for match in _OPENING.finditer(prose.text):
        yield Site(match.start(1), match.end(1), "comma/opening", (", ", " "), int(match[1] == " "))


RULES = tuple(
    MarkRule(name, "en", sites)
    for name, sites in (  # of sites at one place the first is kept
        *((name, _pattern(name, pattern, families)) for name, pattern, families in patterns()),
        ("spelling", lexical("spelling", spelling_lines())),
        *((table, lexical(table, phrase_lines(table))) for table in ("contraction", "synonym", "that", "unit")),
        ("number", lexical("number", number_lines())),
        ("date", _dates),
        ("thousands", _thousands),
        ("list", _lists),
        ("opening", _openings),
    )
)
"""Rules of every language that can be marked."""
