"""Words that tell what a prompt asks for, in several languages, with their weights."""

from __future__ import annotations

import re
from typing import NamedTuple

CODE = "code"
STRUCTURED = "structured_output"
TRANSLATION = "translation"
LONG_CONTEXT = "long_context"
DIALOGUE = "dialogue"
MATHEMATICS = "mathematics"


class Cue(NamedTuple):
    """A word found in a prompt, and what it speaks for."""

    segment: str
    weight: float
    word: str
    kind: str  # `task`: what is to be done; `topic`: what it is about


# A star stands for any ending. Words in scripts without spaces between words are found anywhere.
_TABLE: tuple[tuple[str, str, float, str], ...] = (
    (CODE, "task", 1.5, "python* javascript* typescript* java kotlin golang rust php sql html css bash regex* regexp*"),
    (CODE, "task", 1.0, "code coding codes function* debug* bug bugs compil* algorithm* traceback refactor* api"),
    (CODE, "task", 0.75, "program programs programming script scripts implement* variable variables array arrays"),
    (CODE, "task", 1.0, "funktion* programm* skript* quelltext* quellcode* algorithmus* implementier* fonction*"),
    (
        CODE,
        "task",
        1.0,
        "función* funcion* código* codigo* função* funzione* codice программ* скрипт* функци* код кода",
    ),
    (
        CODE,
        "task",
        1.0,
        "коде алгоритм* 代码 代碼 函数 函數 脚本 编程 算法 程序 コード 関数 スクリプト プログラム 코드 함수",
    ),
    (STRUCTURED, "task", 2.0, "json* yaml xml csv toml"),
    (STRUCTURED, "task", 0.75, "schema* structured extract* extrahier* extraer extraire извлек* 提取 抽取 抽出"),
    (STRUCTURED, "topic", 0.5, "table tabelle* field fields key keys tabla tableau таблиц* 表格 字段"),
    (TRANSLATION, "task", 2.5, "translat* übersetz* uebersetz* tradu* перевед* перевод* перевест* vertaal* çevir*"),
    (TRANSLATION, "task", 2.5, "tłumacz* přelož* ترجم* 翻译 翻譯 翻訳 译成 译为 번역"),
    (TRANSLATION, "topic", 0.75, "english german french spanish italian portuguese russian chinese mandarin japanese"),
    (TRANSLATION, "topic", 0.75, "korean arabic dutch polish turkish hindi englisch* deutsch* französisch* spanisch*"),
    (
        TRANSLATION,
        "topic",
        0.75,
        "italienisch* russisch* chinesisch* japanisch* anglais* allemand* français* espagnol*",
    ),
    (TRANSLATION, "topic", 0.75, "inglés inglese alemán francés español* английск* немецк* французск* русск* китайск*"),
    (TRANSLATION, "topic", 0.75, "испанск* 英语 英文 英語 中文 德语 法语 俄语 日语 日本語 中国語 영어 한국어"),
    (LONG_CONTEXT, "task", 2.0, "summar* tldr zusammenfass* résum* resum* riassu* резюм* изложи* перескаж* обобщ*"),
    (LONG_CONTEXT, "task", 2.0, "samenvat* özet* streszcz* 总结 概括 摘要 归纳 要約 まとめ 요약"),
    (LONG_CONTEXT, "task", 1.0, "fasse zusammen кратко краткое"),
    (LONG_CONTEXT, "topic", 0.75, "article* passage* document* context paragraph* excerpt* transcript* artikel*"),
    (LONG_CONTEXT, "topic", 0.75, "dokument* absatz artículo* documento* стать* документ* отрывок отрывк* текст*"),
    (LONG_CONTEXT, "topic", 0.75, "文章 文档 上下文 段落 根据 本文 記事 기사"),
    (MATHEMATICS, "task", 1.5, "equation* integral* derivative* probabilit* theorem* polynomial* algebra* arithmetic*"),
    (MATHEMATICS, "task", 1.5, "gleichung* wahrscheinlichkeit* équation* dérivée* ecuación* ecuaciones equazion*"),
    (
        MATHEMATICS,
        "task",
        1.5,
        "уравнен* интеграл* производн* вероятност* теорем* 方程 积分 导数 概率 定理 求解 方程式 確率 방정식",
    ),
    (MATHEMATICS, "task", 1.0, "solve* calculat* compute prove* proof sum percent* triangle* berechn* löse summe"),
    (
        MATHEMATICS,
        "task",
        1.0,
        "prozent* dreieck* beweis* calcul* résou* resuelv* risolv* вычисл* реши* посчита* сумм*",
    ),
    (MATHEMATICS, "task", 1.0, "процент* докаж* треугольник* 计算 計算 证明 三角形 之和"),
    (MATHEMATICS, "topic", 0.75, "wieviel* combien cuánto* cuánta* quanti quanto сколько 多少 いくつ 얼마 몇"),
    (DIALOGUE, "task", 1.0, "hello hi hey thanks hallo danke bonjour merci hola gracias ciao olá привет здравствуй*"),
    (DIALOGUE, "task", 1.0, "спасибо 你好 您好 谢谢 こんにちは ありがとう 안녕"),
)
_PHRASES = {"how many": MATHEMATICS, "how much": MATHEMATICS, "wie viel": MATHEMATICS}
_PHRASE_WEIGHT = 0.75

_NO_SPACES = r"\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # Thai, kana, Han, Hangul
_WORD = re.compile(rf"[^\W\d_{_NO_SPACES}]+")
_BETWEEN = {code: " " for code in range(128) if not chr(code).isalpha()}  # the same for ASCII, and faster
_HAS_NO_SPACES = re.compile(f"[{_NO_SPACES}]")


def cues(text: str) -> list[Cue]:
    """The known words of a short text, each once.

    Args:
        text: the places where a prompt says what is wanted; a few hundred words at most.
    """
    lowered = text.lower()
    found: dict[str, Cue] = {}
    for word in set(lowered.translate(_BETWEEN).split() if lowered.isascii() else _WORD.findall(lowered)):
        if (cue := _WORDS.get(word)) is not None:
            found[cue.word] = cue
            continue
        if word[:_SHORTEST] not in _BEGINNINGS:
            continue
        for length in _STEM_LENGTHS:
            if length > len(word):
                break
            if (cue := _STEMS.get(word[:length])) is not None:
                found[cue.word] = cue
                break
    if _HAS_NO_SPACES.search(lowered):
        found.update({part: cue for part, cue in _PARTS.items() if part in lowered})
    for phrase, segment in _PHRASES.items():
        if phrase in lowered:
            found[phrase] = Cue(segment, _PHRASE_WEIGHT, phrase, "topic")
    return sorted(found.values(), key=lambda cue: (-cue.weight, cue.word))


_WORDS: dict[str, Cue] = {}
_STEMS: dict[str, Cue] = {}
_PARTS: dict[str, Cue] = {}
for _segment, _kind, _weight, _line in _TABLE:
    for _entry in _line.split():
        _word = _entry.removesuffix("*")
        _place = _PARTS if _HAS_NO_SPACES.search(_word) else _STEMS if _entry.endswith("*") else _WORDS
        _place[_word] = Cue(_segment, _weight, _word, _kind)
_STEM_LENGTHS = sorted({len(stem) for stem in _STEMS})
_SHORTEST = _STEM_LENGTHS[0]
_BEGINNINGS = frozenset(stem[:_SHORTEST] for stem in _STEMS)
