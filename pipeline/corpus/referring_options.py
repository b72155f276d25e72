"""Options that refer to others, such as "all of the above" and "both A and B", or have a place of their own."""

# ruff: noqa: RUF001 (letters of many scripts)
from __future__ import annotations

import re
from collections.abc import Sequence
from unicodedata import normalize

from pipeline.corpus.scripts import has_unspaced

_REFERS = re.compile(
    r"\b(all|none|any|both|neither|either|each|two|one|some) (of )?(the )?(above|below|these|those|them"
    r"|options|answers"
    r"|choices|statements|other|others|preceding|following)\b"
    r"|^\W*(both|neither|either|only)?\W*\(?([a-h]|[1-9]|[ivx]{1,4})\b\)?( only)?(\W*(,|and|or|nor"
    r"|&)\W*\(?([a-h]|[1-9]"
    r"|[ivx]{1,4})\)?)+\W*( only)?\W*$"
    r"|^\W*(all|none|both|neither|other|others|unknown|[a-h] only)\W*$"
    r"|^(it )?(cannot|can not|can't) be (determined|known|inferred|answered)|^not enough information"
    r"|^no (change|error)\b"
    r"|\b(options?|choices?|answers?|statements?) \(?((?-i:[A-H]|[IVX]{1,4})|[1-9])\)?(?!\w)"
    r"|\bthe (above|below|former|latter|other (options?|choices?|answers?))\b|\b(above|below)\W*$"
    r"|^\W*(all|none|both|neither|any|everything|nothing|each)( of (them|these|it))? (are|is|was|were"
    r"|listed)\b"
    r"|\b(everything|anything|nothing|first two|last two|first and second) (listed|mentioned|stated"
    r"|above|below)\b"
    r"|\b(same|identical|equal|equivalent) (as|to) \(?(?-i:[A-H])\b|\bthe (first|last|other) (two"
    r"|three)\W*$"
    r"|^\W*(both|either|neither|only)?\W*\(?(?-i:[A-H])\b\)?\W*(,|and|or|nor|&)\W*\(?(?-i:[A-H])\b"
    r"|^\W*((i )?(don.?t|do not) know|can.?t (tell|say))\b|^\W*(it depends\W*$|others?\W*\()"
    r"|^\W*(not (sure|known|applicable|stated|enough|given)|n/a|no answer|undetermined)\b",
    re.IGNORECASE,
)
_ELSEWHERE = {
    "Spanish": r"\b(todas|todos|ninguna|ninguno|ambas|ambos) (de )?(las |los )?"
    r"(anteriores|opciones|respuestas|otras|son)\b",
    "Portuguese": r"\b(todas|nenhuma|ambas) (d?as )?(anteriores|alternativas|opções|respostas|acima"
    r"|estão)\b",
    "French": r"\bci-dess(us|ous)\b|\b(toutes|aucune|les deux)\b.{0,12}\b(réponses?|propositions?"
    r"|précédentes|sont)\b",
    "German": r"\boben genannt"
    r"|\b(alle|keine[rs]?|beide) (der |die )?(oben|obigen|genannten|antworten|aussagen|vorherigen)\b",
    "Italian": r"\b(tutte|nessuna|entrambe) (d?elle |le )?(precedenti|risposte|opzioni|altre)\b",
    "Dutch": r"\bbovenstaande\b",
    "Russian": r"выше\W{0,2}(перечисл|указан|назван|привед)|указано выше|\bни один из|\bоба (варианта"
    r"|ответа)"
    r"|\bвсе (ответы|варианты|перечисл)|\bничего из|\bнет (верного|правильного)",
    "Polish": r"\bpowyższ",
    "Turkish": r"\b(hepsi|hiçbiri)\b|\byukarıda",
    "Vietnamese": r"\btất cả (các )?(đáp án|câu|ý|phương án)|\bđáp án (trên|khác)|\bcả (a|b|hai|ba"
    r"|[2-9])\b",
    "Indonesian": r"\bsemua (jawaban|benar|salah)|\btidak ada (jawaban|yang)|\b(jawaban|pilihan"
    r"|semua) di atas\b",
    "Chinese": r"^以上|以上(都|皆|全|均|选项|選項|答案|所有|任|三|两|兩|各)|上述|前述"
    r"|^(都|均|皆|全)(是|对|對|不|可|正|错|錯|非)",
    "Japanese": r"以上(の|すべて)|上記|いずれも|どれも|すべて正しい|該当(なし|せず)|^なし\W*$",
    "Korean": r"위의? ?(모두|모든|전부|보기)|모두 ?(맞|옳|정답|틀)|해당 ?(사항)? ?(이 )?없|정답 ?없|답 ?없음",
    "Arabic": r"مما سبق|ما سبق|جميع (ما|الإجابات)|لا شيء|کل ما",
    "Persian": r"همه موارد|هیچ ?کدام|موارد فوق",
    "Hindi": r"उपरोक्त|उपर्युक्त|इनमें से",
    "Thai": r"ถูกทุกข้อ|ถูกทั้ง|ไม่มีข้อ|ทั้งหมดที่กล่าว",
    "Afrikaans": r"\bbogenoemd|\bbostaande\b",
    "Albanian": r"\bmë sipër\b|\basnj(ë|ëra|ëri) (nga|prej)\b|\btë gjitha (më|përgjigjet)",
    "Amharic": r"ከላይ|^\W*ሁሉም",
    "Armenian": r"վերոնշյալ|վերոհիշյալ|վեր(ը|ում) նշված|վերևում|նշվածներից|բոլոր (պատասխան|տարբերակ)"
    r"|ոչ մեկը"
    r"|ոչ մի (պատասխան|տարբերակ)",
    "Azerbaijani": r"\byuxarıda|\bheç biri\b|^\W*hamısı\b",
    "Basque": r"\b(aurreko|goiko) guzti|\b(aurrekoetako|goikoetako)\b",
    "Belarusian": r"вышэй\W{0,2}(перал|назв|згад|ўказ)|\bнічога з\b|\bні(водны|водная|воднае) з\b",
    "Bengali": r"উপর(ে|োক্ত|িউক্ত)|সবগুল|কোনো?টিই|উল্লি?খিত",
    "Bulgarian": r"(из|по|пре)броен|\bгоре\W{0,2}(по|спо|из)|\bгорни(те|ят)?\b|\b(всички|нито ед(ин|на"
    r"|но)|никой|никое|никоя) (от )?"
    r"(посочен|отговор|твърден|верн)|\bи (двете|двата|трите)\b",
    "Burmese": r"အထက်ပါ|အထက်ဖော်ပြ",
    "Catalan": r"\b(totes|tots|cap|ambdues|ambdós) (de )?(les |els )?(anteriors|respostes|opcions)",
    "Croatian and Serbian": r"\b(sve|svi|ništa|nijed(an|no|na)|oba|obje)\b.{0,8}\b(naveden|odgovor"
    r"|gore)|\bgore naveden"
    r"|\b(све|сви|ништа|ниједан|ниједно|ниједна|оба|обе)\b.{0,8}\b(наведен|одговор|горе)|\bгоре наведен",
    "Czech": r"\bvýše\W{0,2}(uved|zmín|jmen)|\b(všechny|žádn[áéý]|obě) (z )?(odpověd|možnost|předchoz"
    r"|uveden|těchto)"
    r"|\bnic z (výše|uveden|předchoz)",
    "Danish and Norwegian": r"\bovenst[åa]ende|\bovenn[æe]vnt|\bovenfor\b"
    r"|\b(alle|alt|ingen|intet|begge) (af |av )?(de |disse |dem )?(svar|mulighed|alternativ|overst"
    r"|nevnt|nævnt)",
    "Estonian": r"\beelneva|\bülal(toodu|nimetat|maini)|\bmitte ükski\b|\bkõik vastused",
    "Filipino": r"\b(lahat|wala)\b.{0,10}\b(nabanggit|itaas|pagpipilian)",
    "Finnish": r"\b(edellä|yllä)\W?(mainit|olev|luetel|esitet)|\bkaikki (vaihtoehdot|vastaukset)"
    r"|\bei mikään (näistä|vaihtoehdoista|vastauksista|edell|yllä)",
    "Galician": r"\b(todas|ningunha|ambas) (d?as )?(anteriores|respostas|opcións)",
    "Georgian": r"ზემოთ|ზემოაღნიშნ|ზემოხსენებ|ჩამოთვლილ|არც ?ერთი|ყველა (პასუხ|ვარიანტ)|^\W*ორივე",
    "Greek": r"παραπ[άα]νω|αν[ωώ]τ[έε]ρω|προαναφερ|\b(όλ|καν[έε]ν|καμ[ίι]).{0,12}\b(προηγο[ύυ]μεν|απαντ"
    r"|επιλογ)"
    r"|^\W*και (τα|οι|τις) (δ[ύυ]ο|τρ[ίι]α|τρεις)\b",
    "Gujarati": r"ઉપરોક્ત|ઉપરના|આમાંથી",
    "Hebrew": r"לעיל|הנ[\"״׳']{1,2}ל|כל התשובות|כל האפשרויות|אף (תשובה|אחת|אחד|לא)|(שתי|שלוש) התשובות"
    r"|\bתשובות [א-ו]['׳]? ?ו",
    "Hungarian": r"\bfenti(ek)?\b|^\W*(mindegyik|egyik sem|mindkett[őo]|mindhárom|semelyik)\b|\begyik sem\b"
    r"|\bminden válasz|\bmindkét válasz",
    "Icelandic": r"\bofangrein|\bofantal|\bekkert af (þess|ofan)",
    "Kannada": r"ಮೇಲಿನ|ಮೇಲ್ಕಂಡ|ಇವುಗಳಲ್ಲಿ",
    "Kazakh": r"жоғарыда|\bдұрыс жауап жоқ|\bбарлық жауап",
    "Khmer": r"ខាងលើ|ទាំងអស់|គ្មានចម្លើយ",
    "Lao": r"ຂ້າງເທິງ|ທຸກຂໍ້",
    "Latvian": r"\biepriekš\W?(minēt|nosaukt)|\bneviens no\b|\bneviena no\b|\bvisas atbildes",
    "Lithuanian": r"\baukščiau\b|\bnė vien(as|a) iš\b|\bvisi (atsakymai|variantai)",
    "Macedonian": r"\bсите (наведени|одговори|горенаведени)|\bниту ед(ен|на|но) од\b|\bгоренаведен",
    "Malay": r"\bsemua jawapan|\btiada (jawapan|yang|di atas)|\bkesemua",
    "Malayalam": r"മുകളിൽ|മേൽപ്പറഞ്ഞ|ഇവയെല്ലാം|ഇവയൊന്നു",
    "Marathi and Nepali": r"वरील|यापैकी|माथि(का|को)|यीमध्ये",
    "Mongolian": r"\bдээрх\b|\bдээр дурдсан|\bаль нь ч",
    "Punjabi": r"ਉਪਰੋਕਤ|ਇਨ੍ਹਾਂ ਵਿੱਚੋਂ",
    "Romanian": r"\bde mai sus\b|\b(toate|niciun(ul|a)?|nici una|nici unul|ambele) (dintre "
    r"|din )?(cele |aceste)?"
    r"(variante|r[ăa]spuns|afirma|op[țţt]iun|preced|enumer)",
    "Sinhala": r"ඉහත",
    "Slovak": r"\bvyššie\W{0,2}(uved|spom)|\b(všetky|žiadn[ae]|obe) (z )?(odpoved|možnost|predchádz"
    r"|uveden|týchto)|\bnič z\b",
    "Slovenian": r"\b(vse|nič|noben[aoi]?|oba|obe)\b.{0,8}\b(naštet|naveden|odgovor|zgoraj)"
    r"|\bzgoraj (našt|nav)",
    "Swahili": r"\bhapo juu\b|\bhakuna kati\b|\bmajibu yote\b",
    "Swedish": r"\bovanstående|\bovannämn|\b(alla|allt|inget|ingen|inga|båda|samtliga) (av )?(ovan"
    r"|alternativ|svar|dessa|de)",
    "Tamil": r"மேற்கண்ட|மேற்கூறிய|மேலே|மேலுள்ள|இவை அனைத்தும்|இவற்றில்|எதுவு",
    "Telugu": r"పైవ|పైవి|పైన |పై అన్ని|ఏదీ కాదు",
    "Ukrainian": r"вище\W{0,2}(перел|зазнач|вказан|назван|навед|згад)|перел[іи]чен|зазначен\w{1,3} вище"
    r"|\bжод(ен|на|не|ної|ного) (із|з|варіант|відповід)|\b(усі|всі|обидва|обидві) (варіанти|відповіді)"
    r"|\bнічого (із|з)\b|\bнемає правильн",
    "Urdu": r"(مندرجہ|درج|مذکورہ|مندرج[ۂہ]) ?(ذیل|بالا)|ان میں سے",
    "Uzbek": r"\byuqorida|\bbarcha javob|\bto.?g.?ri javob yo.?q",
    "more Arabic": r"[كک]ل ما (ذكر|سبق|ورد|تقدم)|كلاهما|كل الإجابات|(أي|ليس أيا|ليس أيًا|لا أحد) مما"
    r"|غير ذلك|المذكور(ة|ين)? أعلاه",
    "more Hindi": r"ऊपर|(ये|उक्त) सभी|^\W*(दोनों|सभी)\b|कोई नहीं",
    "more Persian": r"همه.{0,3}(موارد|گزینه)|تمامی? (موارد|گزینه)|هیچ[ \u200c]?(کدام|یک)|(هر دو"
    r"|هر سه) (مورد|گزینه)|موارد بالا",
    "more Thai": r"ทุกข้อ|ข้างต้น|ไม่ใช่ข้อ|ผิดทุก|ไม่มีคำตอบ|^\W*(ข้อ|ทั้ง) ?[ก-ฉ] ?(และ|กับ|หรือ)",
    "more Turkish": r"\bher (ikisi|üçü)\b|\bhiçbir (şık|seçenek|cevap)|\b(tüm|bütün) (şık|seçenek|cevap)",
    "more Vietnamese": r"\btất cả (đều|những)|\bkhông (có )?(đáp án|câu|ý|phương án) nào|\b(điều|ý|câu"
    r"|đáp án) trên\b|\bở trên\b",
    "single words": r"^\W*(todas|todos|ninguna|ninguno|ambas|ambos|toutes|tous|aucune?|keine[rs]?|alle"
    r"|beide[sn]?|nessun[oa]|tutt[ei]"
    r"|entramb[ei]|geen|allemaal|все|всё|ничего|оба|обе|всі|усі|жоден|жодна|обидва|wszystkie|żadn[ae]"
    r"|oba|obie|alla|ingen|inget|båda"
    r"|begge|molemmat|kaikki|všechny|žádn[áéý]|toate|niciun(ul|a)|ambele|όλα|κανένα|הכל|שתיהן|全部|都|全て"
    r"|どちらも|両方|모두|둘 다)\W*$",
    "circled": r"^\W*[①-⑦ⓐ-ⓖⒶ-Ⓖ]\W*\w{0,2}\W*[①-⑦ⓐ-ⓖⒶ-Ⓖ]",
    "two letters of scripts without blanks": r"^\W*(?-i:[A-GА-ЖΑ-Ηㄱ-ㅅ가-사]) ?(和|与|與|或|及|と|や|과|와) ?"
    r"(?-i:[A-GА-ЖΑ-Ηㄱ-ㅅ가-사])",
    "two letters": r"^\W*(?-i:[A-GА-ЖΑ-Η]) (и|или|y|e|et|und|oder|ou|o|lub|hoặc|và|dan|ve"
    r"|και) (?-i:[A-GА-ЖΑ-Η])\b",
}
_REFERS_ELSEWHERE = re.compile(normalize("NFC", "|".join(_ELSEWHERE.values())), re.IGNORECASE)
"""The same in other languages."""


def refers_to_others(option: str, options: Sequence[str]) -> bool:
    """Whether an option refers to others, in one of some languages, or repeats at least two others ("both X and Y").

    Args:
        option: text of an option.
        options: texts of all options of the item.
    """
    composed = normalize("NFC", option.strip())
    if _REFERS.search(composed) or _REFERS_ELSEWHERE.search(composed):
        return True
    plain = _plain(option)
    others = {_plain(one) for one in options} - {plain, ""}
    return sum(_holds(plain, other) for other in others) > 1


def _plain(option: str) -> str:
    return option.strip().casefold().rstrip(".")


def _holds(text: str, part: str) -> bool:
    """Whether a text has a part, as whole words of scripts that separate words."""
    return part in text and (has_unspaced(part) or re.search(rf"(?<!\w){re.escape(part)}(?!\w)", text) is not None)
