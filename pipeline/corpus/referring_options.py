"""Options that refer to others, such as "all of the above" and "both A and B", or have a place of their own."""

# ruff: noqa: RUF001 (letters of many scripts)
from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.corpus.scripts import has_unspaced

_REFERS = re.compile(
    r"\b(all|none|any|both|neither|either|each|two|one|some) (of )?(the )?(above|below|these|those|them|options|answers"
    r"|choices|statements|other|others|preceding|following)\b"
    r"|^\W*(both|neither|either|only)?\W*\(?([a-h]|[1-9]|[ivx]{1,4})\b\)?( only)?(\W*(,|and|or|nor|&)\W*\(?([a-h]|[1-9]"
    r"|[ivx]{1,4})\)?)+\W*( only)?\W*$"
    r"|^\W*(all|none|both|neither|other|others|unknown|[a-h] only)\W*$"
    r"|^(it )?(cannot|can not|can't) be (determined|known|inferred|answered)|^not enough information"
    r"|^no (change|error)\b"
    r"|\b(options?|choices?|answers?|statements?) \(?((?-i:[A-H]|[IVX]{1,4})|[1-9])\)?(?!\w)"
    r"|\bthe (above|below|former|latter|other (options?|choices?|answers?))\b|\b(above|below)\W*$"
    r"|^\W*(all|none|both|neither|any|everything|nothing|each)( of (them|these|it))? (are|is|was|were|listed)\b"
    r"|\b(everything|anything|nothing|first two|last two|first and second) (listed|mentioned|stated|above|below)\b"
    r"|\b(same|identical|equal|equivalent) (as|to) \(?(?-i:[A-H])\b|\bthe (first|last|other) (two|three)\W*$"
    r"|^\W*(both|either|neither|only)?\W*\(?(?-i:[A-H])\b\)?\W*(,|and|or|nor|&)\W*\(?(?-i:[A-H])\b"
    r"|^\W*((i )?(don.?t|do not) know|can.?t (tell|say))\b|^\W*(it depends\W*$|others?\W*\()"
    r"|^\W*(not (sure|known|applicable|stated|enough|given)|n/a|no answer|undetermined)\b",
    re.IGNORECASE,
)
_ELSEWHERE = {
    "Spanish": r"\b(todas|todos|ninguna|ninguno|ambas|ambos) (de )?(las |los )?"
    r"(anteriores|opciones|respuestas|otras|son)\b",
    "Portuguese": r"\b(todas|nenhuma|ambas) (d?as )?(anteriores|alternativas|opções|respostas|acima|estão)\b",
    "French": r"\bci-dess(us|ous)\b|\b(toutes|aucune|les deux)\b.{0,12}\b(réponses?|propositions?|précédentes|sont)\b",
    "German": r"\boben genannt"
    r"|\b(alle|keine[rs]?|beide) (der |die )?(oben|obigen|genannten|antworten|aussagen|vorherigen)\b",
    "Italian": r"\b(tutte|nessuna|entrambe) (d?elle |le )?(precedenti|risposte|opzioni|altre)\b",
    "Dutch": r"\bbovenstaande\b",
    "Russian": r"выше\W{0,2}(перечисл|указан|назван|привед)|указано выше|\bни один из|\bоба (варианта|ответа)"
    r"|\bвсе (ответы|варианты|перечисл)|\bничего из|\bнет (верного|правильного)",
    "Polish": r"\bpowyższ",
    "Turkish": r"\b(hepsi|hiçbiri)\b|\byukarıda",
    "Vietnamese": r"\btất cả (các )?(đáp án|câu|ý|phương án)|\bđáp án (trên|khác)|\bcả (a|b|hai|ba|[2-9])\b",
    "Indonesian": r"\bsemua (jawaban|benar|salah)|\btidak ada (jawaban|yang)|\b(jawaban|pilihan|semua) di atas\b",
    "Chinese": r"^以上|以上(都|皆|全|均|选项|選項|答案|所有|任|三|两|兩|各)|上述|前述"
    r"|^(都|均|皆|全)(是|对|對|不|可|正|错|錯|非)",
    "Japanese": r"以上(の|すべて)|上記|いずれも|どれも|すべて正しい|該当(なし|せず)|^なし\W*$",
    "Korean": r"위의? ?(모두|모든|전부|보기)|모두 ?(맞|옳|정답|틀)|해당 ?(사항)? ?(이 )?없|정답 ?없|답 ?없음",
    "Arabic": r"مما سبق|ما سبق|جميع (ما|الإجابات)|لا شيء|کل ما",
    "Persian": r"همه موارد|هیچ ?کدام|موارد فوق",
    "Hindi": r"उपरोक्त|उपर्युक्त|इनमें से",
    "Thai": r"ถูกทุกข้อ|ถูกทั้ง|ไม่มีข้อ|ทั้งหมดที่กล่าว",
    "circled": r"^\W*[①-⑦ⓐ-ⓖⒶ-Ⓖ]\W*\w{0,2}\W*[①-⑦ⓐ-ⓖⒶ-Ⓖ]",
    "two letters of scripts without blanks": r"^\W*(?-i:[A-GА-ЖΑ-Ηㄱ-ㅅ가-사]) ?(和|与|與|或|及|と|や|과|와) ?"
    r"(?-i:[A-GА-ЖΑ-Ηㄱ-ㅅ가-사])",
    "two letters": r"^\W*(?-i:[A-GА-ЖΑ-Η]) (и|или|y|e|et|und|oder|ou|o|lub|hoặc|và|dan|ve|και) (?-i:[A-GА-ЖΑ-Η])\b",
}
_REFERS_ELSEWHERE = re.compile("|".join(_ELSEWHERE.values()), re.IGNORECASE)
"""The same in other languages."""


def refers_to_others(option: str, options: Sequence[str]) -> bool:
    """Whether an option refers to others, in one of some languages, or repeats at least two others ("both X and Y").

    Args:
        option: text of an option.
        options: texts of all options of the item.
    """
    if _REFERS.search(option.strip()) or _REFERS_ELSEWHERE.search(option.strip()):
        return True
    plain = _plain(option)
    others = {_plain(one) for one in options} - {plain, ""}
    return sum(_holds(plain, other) for other in others) > 1


def _plain(option: str) -> str:
    return option.strip().casefold().rstrip(".")


def _holds(text: str, part: str) -> bool:
    """Whether a text has a part, as whole words of scripts that separate words."""
    return part in text and (has_unspaced(part) or re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text) is not None)
