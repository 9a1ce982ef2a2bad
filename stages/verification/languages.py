"""Which language and script a text is written in (reward.language, and the constraints that name a language)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

#: Scripts that a language is written in, by its code; languages of one script cannot be told apart by it.
SCRIPTS = {
    **dict.fromkeys(
        ("en", "de", "fr", "es", "it", "pt", "nl", "pl", "cs", "sv", "da", "no", "fi", "tr", "ro", "hu", "vi", "id"),
        ("LATIN",),
    ),
    **dict.fromkeys(("ru", "uk", "bg", "sr"), ("CYRILLIC",)),
    "zh": ("CJK",),
    "ja": ("CJK", "HIRAGANA", "KATAKANA"),
    "ko": ("HANGUL", "CJK"),
    **dict.fromkeys(("ar", "fa", "ur"), ("ARABIC",)),
    **dict.fromkeys(("hi", "mr", "ne"), ("DEVANAGARI",)),
    "he": ("HEBREW",),
    "th": ("THAI",),
    "bn": ("BENGALI",),
    "ta": ("TAMIL",),
    "te": ("TELUGU",),
}
_NO_PROSE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\(.*?\\\)|\\\[.*?\\\]", re.S)
_JOINS = "\u200c\u200d\u30fc\uff70"  # zero-width joiner and non-joiner, and the sign of a long vowel of Japanese


def language_share(text: str, scripts: Sequence[str], unit: str = "word") -> float:
    """Share of the words (``unit="char"``: letters) of a text that are of the given scripts; 1 without any
    (reward.language).

    Words are runs of letters of one script, with the vowel signs and accents between them; an ideograph is a word of
    its own; code and formulas do not count.
    """
    from stages.measures.text import script_of

    counts, previous = {True: 0, False: 0}, ""
    for character in _NO_PROSE.sub(" ", text):
        script = script_of(character)
        # part of the word that it stands in
        if not script and (character in _JOINS or unicodedata.category(character)[0] == "M"):
            continue
        if script and (unit == "char" or script == "CJK" or script != previous):
            counts[script in scripts] += 1
        previous = script
    return counts[True] / (counts[True] + counts[False]) if any(counts.values()) else 1.0


def language_of(row: dict) -> tuple[str, ...] | None:
    """Scripts that an answer to a prompt row is expected in: those of its column language, else the most frequent one
    of the prompt. None for a language that has no entry in ``SCRIPTS``, or a prompt without letters."""
    from stages.measures.text import script_of

    if row.get("language"):
        return SCRIPTS.get(row["language"].lower().replace("_", "-").split("-")[0])
    letters = [
        script
        for message in row.get("prompt") or ()
        for character in _NO_PROSE.sub(" ", message.get("content") or "")
        if (script := script_of(character))
    ]
    if not letters:
        return None
    most = max(sorted(set(letters)), key=letters.count)
    # Japanese of many ideographs
    if most == "CJK" and 10 * sum(letter in ("HIRAGANA", "KATAKANA") for letter in letters) > letters.count("CJK"):
        return SCRIPTS["ja"]
    return {"HIRAGANA": SCRIPTS["ja"], "KATAKANA": SCRIPTS["ja"], "HANGUL": SCRIPTS["ko"]}.get(most, (most,))


#: Ranges of the characters of each script, by the language that is guessed from it alone.
_CHARACTERS = {
    "el": "\u0370-\u03ff",
    "ru": "\u0400-\u052f",
    "he": "\u0590-\u05ff",
    "ar": "\u0600-\u06ff\u0750-\u077f\ufb50-\ufdff\ufe70-\ufeff",
    "hi": "\u0900-\u097f",
    "bn": "\u0980-\u09ff",
    "pa": "\u0a00-\u0a7f",
    "gu": "\u0a80-\u0aff",
    "ta": "\u0b80-\u0bff",
    "te": "\u0c00-\u0c7f",
    "kn": "\u0c80-\u0cff",
    "ml": "\u0d00-\u0d7f",
    "th": "\u0e00-\u0e7f",
    "ko": "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af",
    "ja": "\u3040-\u30ff",
    "zh": "\u4e00-\u9fff",
    "en": "A-Za-z\u00aa-\u024f\u1e00-\u1eff",
}
#: Frequent words, by language that shares its script with others; the first of a script is the guess where none occurs.
_STOP_WORDS = {
    "en": {
        "en": (
            "the of and to in is that it for was with as on are be this by at from have not you i we they he she or a"
            " an my your will can but what when if so all do how his her has had there their which who more about would"
            " could should does did than then some any only one out up its our been were into them these those make me"
            " write like just because after where why much many most each"
        ),
        "de": (
            "der die das und ist nicht ein eine einen einem zu mit den dem von auf für im sich es sie ich wir ihr auch"
            " als wie an bei aus oder haben sind wird werden guten"
        ),
        "fr": (
            "le la les et est un une des du que qui dans pour pas ne sur avec au aux il elle je nous vous ce cette sont"
            " être plus par mais ou où bonjour"
        ),
        "es": (
            "el la los las y es un una de del que en por para con no se su al lo como más pero este esta son muy hola"
            " está o también yo a me mi mí sobre cuando hay sin porque qué"
        ),
        "pt": (
            "o a os as e é um uma de do da dos das que em por para com não se seu sua no na ao como mais mas este esta"
            " são muito olá está ou também eu você me à pela pelo quando sem foi isso"
        ),
        "it": (
            "il lo la i gli le e è un una di del della dei che in per con non si su al come più ma questo questa sono"
            " molto ciao anche nel alla io a mi mia mio quando cosa hanno"
        ),
        "nl": (
            "de het een en is van ik je dat niet in op te voor met zijn er aan ook als maar om hij wij ze dit naar bij"
            " uit worden"
        ),
        "sv": (
            "och att det som en på är av för med den till inte jag har de ett om vi du men han hon eller från kan hur"
            " vad när"
        ),
        "fi": (
            "ja on ei se että hän oli mutta myös kuin joka tämä ovat minä sinä olen voi jos niin kun sen mitä tai ole"
            " hyvää"
        ),
        "pl": "i w na z się nie to że do jest jak o co ale po dla tak od czy są był przez ten już tylko a ma ale",
        "tr": "ve bir bu da de için ile çok ama ne gibi daha var olarak ben sen değil olan kadar sonra her",
        "id": "dan yang di untuk dengan ini itu tidak dari dalam adalah pada akan saya ke juga anda atau ada bisa apa",
        "sw": (
            "na ya wa kwa ni katika la za kuwa hii cha kama yake si sana watu lakini pia au mimi huu hiyo ili yangu"
            " wetu vya"
        ),
        "vi": "và là của có một không những được cho các trong người với tôi này đã để như khi bạn từ cũng về rất",
    },
    "ru": {
        "ru": "и в не на я что он с как это по но они мы к у вы за бы так от все она его для был ещё из о",
        "bg": (
            "и в не на е се да от за с че са като по до това ще или може си но беше при съм аз много ни към след което"
        ),
        "uk": "і в не на що я з у як це та він до й за але ми є вони від для був про його або ще також",
    },
    "ar": {
        "ar": "في من على إلى أن هذا هذه التي الذي ما لا هو هي كان مع عن أو و كل قد ذلك بين ثم إن لم",
        "fa": "و در به از که این را با است برای آن یک می تا بر هم شد شما من ما هر یا اما خود کند های بود باشد",
        "ur": "کے کی میں ہے اور سے کا کو نے پر یہ وہ کہ ہیں بھی ایک اس تھا نہیں آپ ہو لیے کر ہم تو جو",
    },
    "hi": {
        "hi": "है के की का में और को से पर यह हैं ने भी एक वह नहीं कि हो था लिए कर आप हम तो जो इस या मैं",
        "mr": ("आहे आणि मी या ते तो ही हे त्या आहेत नाही एक च्या ला होते होता पण करून साठी काय तुम्ही आम्ही की असे मध्ये आपण"),
        "ne": "छ र को मा हो यो छन् पनि लाई गर्न भने त्यो एक तर म हामी तपाईं गरेको थियो हुन्छ का ले बाट यस हुन् छैन",
    },
}


def guess_language(text: str) -> str | None:
    """Code of the language that a text is most likely written in: by the script of most letters, and by frequent words
    where languages share it; None without a letter.
    """
    letters = {name: len(re.findall(f"[{span}]", text)) for name, span in _CHARACTERS.items()}
    if not any(letters.values()):
        return None
    script = max(letters, key=letters.get)
    if script == "zh" and letters["ja"] * 10 > letters["zh"]:
        return "ja"
    if script not in _STOP_WORDS:
        return script
    words = re.findall(r"[^\W\d_](?:[^\W\d_]|[\u0300-\u036f\u0900-\u097f])*", text.lower())
    counts = {
        name: sum(word in found for word in words)
        for name, found in ((n, set(w.split())) for n, w in _STOP_WORDS[script].items())
    }
    return max(counts, key=counts.get)


LANGUAGES = {*_CHARACTERS, *(name for group in _STOP_WORDS.values() for name in group)}
