"""The built-in segments: short prompts in several languages, chat templates, and what must not mislead."""

from __future__ import annotations

import time

import pytest

from autospec.segments import OTHER, SEGMENTS, Prompt, Segmenter
from autospec.segments.features import Sign, classify, score, signs
from autospec.segments.prompts import CUT, MAX_CHARACTERS, excerpt, shortened
from autospec.segments.turns import Turn, turns_of
from autospec.segments.words import cues

CODE = """def total(items):
    result = 0
    for item in items:
        result += item.price * item.count
    return result
"""
C_CODE = """#include <stdio.h>
int main(void) {
    for (int i = 0; i < 10; i++) {
        printf("%d\\n", i);
    }
    return 0;
}
"""
ENGLISH_STORY = "The ferry left the harbour late that evening, and nobody on the quay knew why it had waited. " * 25
GERMAN_STORY = (
    "Die Fähre verließ den Hafen an diesem Abend spät, und niemand am Kai wusste, warum sie gewartet hatte. " * 25
)
RUSSIAN_STORY = "Паром вышел из гавани поздно вечером, и никто на причале не знал, почему он так долго ждал. " * 25
CHINESE_STORY = "那天晚上渡轮很晚才离开港口,码头上没有人知道它为什么等了那么久,也没有人愿意去问船长。" * 25

EXAMPLES = [
    ("code", "Write a Python function that reverses a list without using slicing."),
    ("code", "Schreibe eine Python-Funktion, die eine Liste umdreht."),
    ("code", "用Python写一个函数,把列表反转。"),
    ("code", "Напиши функцию на Python, которая переворачивает список."),
    ("code", f"What does this do?\n\n```python\n{CODE}```"),
    ("code", f"Find the bug:\n{C_CODE}"),
    ("code", f"Wo ist der Fehler?\n{CODE}"),
    ("code", "Refactor this JavaScript code so that it uses async functions."),
    ("structured_output", "Extract the names and ages from this text and answer in JSON: Anna is 31, Ben is 28."),
    ("structured_output", "Extrahiere Namen und Alter als JSON: Anna ist 31, Ben ist 28."),
    ("structured_output", "请从下面的文本中提取姓名和年龄,用JSON格式回答:安娜31岁,本28岁。"),
    ("structured_output", "Извлеки имена и возраст в формате JSON: Анне 31 год, Бену 28 лет."),
    ("structured_output", 'Fill in: {"name": "Anna", "age": 31, "city": ""}'),
    ("structured_output", "List the planets as YAML."),
    ("translation", "Translate to French: The ferry left the harbour late that evening."),
    ("translation", "Übersetze ins Englische: Die Fähre verließ den Hafen spät am Abend."),
    ("translation", "把下面的句子翻译成英文:那天晚上渡轮很晚才离开港口。"),
    ("translation", "Переведи на английский: Паром вышел из гавани поздно вечером."),
    ("translation", "Traduis en anglais : le bateau est parti tard."),
    ("translation", "de -> en: Die Fähre verließ den Hafen."),
    ("mathematics", "A baker sells 12 rolls for 3 euros. How many rolls can Ana buy with 20 euros?"),
    ("mathematics", "Ein Bäcker verkauft 12 Brötchen für 3 Euro. Wie viele bekommt Ana für 20 Euro?"),
    ("mathematics", "小明有5个苹果,吃了2个,又买了7个,现在有多少个苹果?"),
    ("mathematics", "В коробке 12 яблок. Съели 5 и купили 7. Сколько яблок стало?"),  # noqa: RUF001
    ("mathematics", "Solve the equation x^2 - 5x + 6 = 0."),
    ("mathematics", "Löse die Gleichung 2x + 3 = 11."),
    ("mathematics", "Вычислите интеграл от x^2."),
    ("mathematics", "求解方程 2x + 3 = 11"),
    ("mathematics", r"Show that \frac{1}{n} \leq 1 for all n."),
    ("mathematics", "What is 17 + 25?"),
    ("long_context", f"Summarize: {ENGLISH_STORY}"),
    ("long_context", f"Fasse den folgenden Text zusammen: {GERMAN_STORY}"),
    ("long_context", f"Кратко изложи текст: {RUSSIAN_STORY}"),
    ("long_context", f"请总结下面的文章:{CHINESE_STORY}"),
    ("long_context", f"{ENGLISH_STORY}\n\nWhy did the ferry leave late?"),
    ("long_context", f"{GERMAN_STORY}\n\nWarum fuhr die Fähre so spät?"),
    ("long_context", f"{RUSSIAN_STORY}\n\nПочему паром вышел поздно?"),  # noqa: RUF001
    ("dialogue", "Hello! How are you today?"),
    ("dialogue", "Hallo, wie geht es dir?"),
    ("dialogue", "你好,你今天怎么样?"),
    ("dialogue", "Привет! Как дела?"),
    ("dialogue", "Who was the first person on the moon?"),
    ("dialogue", "Wer war der erste Mensch auf dem Mond?"),
    ("dialogue", "Anna: Did you see it?\nBen: No.\nAnna: You should.\nBen: Maybe tomorrow."),
    ("other", "Compose a poem about the sea and the people who live beside it."),
    ("other", "Schreibe ein Gedicht über das Meer."),
    ("other", "写一首关于大海的诗。"),
    ("other", "Напиши стихотворение о море."),  # noqa: RUF001
    ("other", ""),
    ("other", "   \n "),
]


def assigned(text: str, **options: object) -> str:
    return Segmenter(builtin=True).assign(Prompt.of_text(text, **options)).segment  # type: ignore[arg-type]


@pytest.mark.parametrize(("segment", "text"), EXAMPLES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_short_prompts(segment: str, text: str) -> None:
    found = Segmenter(builtin=True).assign(Prompt.of_text(text))
    assert (found.segment, found.origin) == (segment, "built-in"), found.why


@pytest.mark.parametrize(
    "template",
    [
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
        "<|im_start|>assistant\n",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: 26 Jul 2024<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<bos><start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
        "<s>[INST] {} [/INST]",
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n{} [/INST]",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c><\uff5cUser\uff5c>{}<\uff5cAssistant\uff5c>",
        "<|user|>\n{}<|end|>\n<|assistant|>\n",
    ],
    ids=["chatml", "llama 3", "gemma", "mistral", "llama 2", "deepseek", "phi"],
)
@pytest.mark.parametrize(("segment", "text"), EXAMPLES[::3], ids=lambda value: value[:20])
def test_chat_templates_change_nothing(template: str, segment: str, text: str) -> None:
    assert assigned(template.replace("{}", text)) == segment


class TestTurns:
    def test_roles(self) -> None:
        text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nUser stories?"
        assert turns_of(text) == [Turn("user", "Hi"), Turn("assistant", "Hello"), Turn("user", "User stories?")]
        assert turns_of("<s>[INST] a [/INST] b</s>[INST] c [/INST]") == [
            Turn("user", "a"),
            Turn("assistant", "b"),
            Turn("user", "c"),
        ]
        assert turns_of("<start_of_turn>model\nx<end_of_turn>") == [Turn("assistant", "x")]
        assert turns_of("User stories are short.") == [Turn("user", "User stories are short.")]
        assert turns_of("") == turns_of("<s></s>") == []

    def test_earlier_turns_are_a_dialogue(self) -> None:
        chat = "".join(f"<|{role}|>\nTell me more about it.\n" for role in ("user", "assistant") * 2)
        assert assigned(f"{chat}<|user|>\nAnd then.") == "dialogue"

    def test_a_task_in_the_system_part_counts(self) -> None:
        assert (
            assigned("<|system|>\nTranslate all that the user says to German.\n<|user|>\nGood morning.")
            == "translation"
        )

    def test_a_document_in_a_conversation_is_long_context(self) -> None:
        text = f"<|user|>\n{ENGLISH_STORY}\n<|assistant|>\nI see.\n<|user|>\nSummarize the passage."
        assert assigned(text) == "long_context"


class TestSigns:
    def test_words_inside_a_passage_do_not_count(self) -> None:
        body = "He had to translate the equation into Python code, and to summarise the JSON. " * 40
        text = f"{ENGLISH_STORY[:600]}{body}{ENGLISH_STORY[:600]}"
        assert assigned(text) == "long_context"

    def test_constrained_tokens(self) -> None:
        prompt = Prompt.of_text("Describe Anna.", decoding="greedy prefix_allowed_tokens_fn")
        assert Segmenter(builtin=True).assign(prompt).segment == "structured_output"
        assert assigned("Describe Anna.", decoding="greedy logits_processor") == OTHER

    def test_years_are_no_sums(self) -> None:
        assert assigned("Which films came out in 1994, 1995 and 1999?") == "dialogue"

    def test_a_summary_of_nothing_long(self) -> None:
        assert assigned("Summarise the plot of Hamlet.") == OTHER

    def test_several_words_do_not_outweigh_without_bound(self) -> None:
        words = [sign for sign in signs("json yaml xml csv toml schema extract", 10) if sign.what.startswith("word")]
        assert sum(sign.weight for sign in words) == 3.0

    def test_ties_go_to_the_earlier_segment(self) -> None:
        found = [Sign(segment, 2.0, "x") for segment in reversed(SEGMENTS)]
        assert list(score(found)) == list(SEGMENTS)
        assert classify(found) == SEGMENTS[0]
        assert classify([Sign("code", 1.4, "x")]) == OTHER
        assert classify([]) == OTHER

    def test_each_word_once(self) -> None:
        assert [cue.word for cue in cues("Python PYTHON pythons 翻译翻译")] == ["翻译", "python"]


class TestExcerpt:
    class Counting:
        """A tokenizer of one letter a token that knows how much it was asked for."""

        def __init__(self) -> None:
            self.tokens = 0

        def decode(self, ids: list[int]) -> str:
            self.tokens += len(ids)
            return "".join(chr(97 + i % 26) for i in ids)

    def test_never_the_whole_prompt(self) -> None:
        tokenizer = self.Counting()
        ids = list(range(100_000))
        text = excerpt(ids, tokenizer)
        assert tokenizer.tokens <= 400
        head, tail = text.split(CUT)
        assert head == tokenizer.decode(ids)[: len(head)]
        assert tail == tokenizer.decode(ids)[-len(tail) :]

    def test_short_prompts_as_they_are(self) -> None:
        assert excerpt(list(range(300)), self.Counting()) == self.Counting().decode(list(range(300)))

    def test_long_tokens_are_bounded_too(self) -> None:
        class Wide:
            def decode(self, ids: list[int]) -> str:
                return "x" * 1000 * len(ids)

        for count in (10, 10_000):
            assert len(excerpt(list(range(count)), Wide())) <= 2 * MAX_CHARACTERS + len(CUT)
        assert len(shortened("x" * 10**6)) == 2 * MAX_CHARACTERS + len(CUT)


@pytest.mark.parametrize(
    "unit", ["a ", "1 ", '"', "<|", "[", "{", "a:\n", "```", "1 - ", "\\", "\u4f60", "<|user|>\n", "x = 1\n"]
)
def test_hostile_texts_cost_little(unit: str) -> None:
    text = (unit * MAX_CHARACTERS)[: 2 * MAX_CHARACTERS]
    started = time.perf_counter()
    assert assigned(text) in SEGMENTS
    assert time.perf_counter() - started < 0.25
