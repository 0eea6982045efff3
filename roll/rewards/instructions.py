"""Checks of single instructions: `IFEVAL` by the names of IFEval, `ROLL` by those of RLVR-IFEval, which ROLL reads too.

Each takes the response, without spaces around it, and the arguments of the data by name. The two differ where the same
name means another count: IFEval asks for at least so many, RLVR-IFEval for exactly so many. Sentences are split by
punctuation, without a model.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence

SCRIPTS = {
    "ar": ("ARABIC",),
    "bg": ("CYRILLIC",),
    "bn": ("BENGALI",),
    "el": ("GREEK",),
    "fa": ("ARABIC",),
    "gu": ("GUJARATI",),
    "he": ("HEBREW",),
    "hi": ("DEVANAGARI",),
    "ja": ("HIRAGANA", "KATAKANA", "CJK"),
    "kn": ("KANNADA",),
    "ko": ("HANGUL",),
    "ml": ("MALAYALAM",),
    "mr": ("DEVANAGARI",),
    "ne": ("DEVANAGARI",),
    "pa": ("GURMUKHI",),
    "ru": ("CYRILLIC",),
    "ta": ("TAMIL",),
    "te": ("TELUGU",),
    "th": ("THAI",),
    "uk": ("CYRILLIC",),
    "ur": ("ARABIC",),
    "zh": ("CJK",),
}
"""Language -> first words of the Unicode names of its letters; languages in Latin script cannot be distinguished."""

SCRIPT_SHARE = 0.8
"""Least share of letters in the script of the language; names and formulas may be in another."""

ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""The responses that `detectable_format:constrained_response` allows."""


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _sentences(text: str) -> int:
    return len([part for part in re.split(r"(?<=[.!?\u3002\uff01\uff1f])[\"')\]]*\s+", text) if _words(part)])


def _relates(count: int, relation: str, wanted: float) -> bool:
    if relation == "at least":
        return count >= wanted
    if relation == "less than":
        return count < wanted
    raise ValueError(f"relation {relation!r} is not `at least` or `less than`")


def _about(count: int, quantifier: str, wanted: float, tolerance: float) -> bool:
    if quantifier == "around":
        return abs(count - wanted) <= tolerance
    if quantifier in ("at least", "at most"):
        return count >= wanted if quantifier == "at least" else count <= wanted
    raise ValueError(f"quantifier {quantifier!r} is not `at least`, `at most` or `around`")


# Instructions of both


def language(text: str, language: str) -> bool:
    """The letters are those of a language.

    Raises:
        ValueError: the language is in Latin script, whose letters do not identify a language.
    """
    if language not in SCRIPTS:
        raise ValueError(f"language {language!r} cannot be verified by its letters; known: {', '.join(SCRIPTS)}")
    letters = [unicodedata.name(letter, "") for letter in text if letter.isalpha()]
    fitting = sum(name.startswith(SCRIPTS[language]) for name in letters)
    return bool(letters) and fitting >= SCRIPT_SHARE * len(letters)


def json_format(text: str) -> bool:
    """The whole text is JSON, also between marks of a code block."""
    content = re.sub(r"^```(?:json)?\s*|\s*```$", "", text, flags=re.IGNORECASE)
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def two_responses(text: str) -> bool:
    """Two different texts, separated by six asterisks."""
    parts = [part.strip() for part in text.split("******")]
    if parts and not parts[0]:
        parts = parts[1:]
    if parts and not parts[-1]:
        parts = parts[:-1]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def title(text: str) -> bool:
    """There is a title in double angular brackets."""
    lines = (line.partition("<<")[2].rpartition(">>")[0] for line in text.split("\n"))
    return any(line.strip(" <>") for line in lines)


def no_comma(text: str) -> bool:
    return "," not in text


def quotation(text: str) -> bool:
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


# IFEval


def keywords_existence(text: str, keywords: Sequence[str]) -> bool:
    """Every keyword occurs, in any case."""
    return all(re.search(re.escape(keyword), text, re.IGNORECASE) for keyword in keywords)


def keyword_frequency(text: str, keyword: str, frequency: float, relation: str) -> bool:
    """A keyword occurs so often, in any case."""
    return _relates(len(re.findall(re.escape(keyword), text, re.IGNORECASE)), relation, frequency)


def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """None of the words occurs, as a whole word in any case."""
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: float, let_relation: str) -> bool:
    """A letter occurs so often, in any case."""
    return _relates(text.lower().count(letter.lower()), let_relation, let_frequency)


def number_sentences(text: str, num_sentences: float, relation: str) -> bool:
    """The text has so many sentences."""
    return _relates(_sentences(text), relation, num_sentences)


def number_words(text: str, num_words: float, relation: str) -> bool:
    """The text has so many words."""
    return _relates(len(_words(text)), relation, num_words)


def number_paragraphs(text: str, num_paragraphs: float) -> bool:
    """The text has exactly so many paragraphs, separated by `***`."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    inner = parts[1:-1]
    return all(part.strip() for part in inner) and sum(bool(part.strip()) for part in parts) == num_paragraphs


def nth_paragraph_first_word(text: str, num_paragraphs: float, nth_paragraph: int, first_word: str) -> bool:
    """There are exactly so many paragraphs, separated by empty lines, and one of them begins with a word."""
    parts = [part.strip() for part in re.split(r"\n\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    word = parts[int(nth_paragraph) - 1].split()[0].lstrip("'\"").lower()
    return re.split(r"[.,?!'\"]", word)[0] == first_word.lower()


def number_placeholders(text: str, num_placeholders: float) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    """A line begins with the marker of a postscript, in any case and with or without spaces between its letters."""
    letters = [re.escape(part) for part in postscript_marker.lower().replace(" ", "").rstrip(".").split(".")]
    return re.search(r"^[^\S\n]*" + r"\.\s?".join(letters), text.lower(), re.MULTILINE) is not None


def number_bullets(text: str, num_bullets: float) -> bool:
    """There are exactly so many items of a list, with `*` or `-`."""
    return len(re.findall(r"^[^\S\n]*(?:\*[^*\n]|-).*$", text, re.MULTILINE)) == num_bullets


def constrained_response(text: str) -> bool:
    return any(answer in text for answer in ANSWERS)


def highlighted_sections(text: str, num_highlights: float) -> bool:
    """At least so many parts are emphasized with single or double asterisks."""
    double = [part for part in re.findall(r"\*\*([^\n*]*)\*\*", text) if part.strip()]
    single = [part for part in re.findall(r"(?<!\*)\*([^\n*]*)\*(?!\*)", text) if part.strip()]
    return len(double) + len(single) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: float) -> bool:
    """At least so many sections begin with the mark and a number; the argument has IFEval's spelling."""
    return len(re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)) >= num_sections


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(text: str, capital_frequency: float, capital_relation: str) -> bool:
    """So many words are in capital letters."""
    return _relates(sum(word.isupper() for word in _words(text)), capital_relation, capital_frequency)


def uppercase(text: str) -> bool:
    return text.isupper()


def lowercase(text: str) -> bool:
    return text.islower()


IFEVAL: dict[str, Callable[..., bool]] = {
    "keywords:existence": keywords_existence,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullets,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": uppercase,
    "change_case:english_lowercase": lowercase,
    "punctuation:no_comma": no_comma,
}


# RLVR-IFEval


def all_keywords(text: str, keyword_list: Sequence[str]) -> bool:
    return all(keyword.lower() in text.lower() for keyword in keyword_list)


def word_count(text: str, word: str, N: int) -> bool:
    return [each.lower() for each in _words(text)].count(word.lower()) == N


def no_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(word.lower() in text.lower() for word in forbidden_words)


def letter_count(text: str, letter: str, N: int) -> bool:
    return text.count(letter) == N


def paragraphs(text: str, N: int) -> bool:
    """There are exactly so many paragraphs, separated by `* * *`; none is empty."""
    parts = text.split("* * *")
    return len(parts) == N and all(part.strip() for part in parts)


def words(text: str, N: int, quantifier: str) -> bool:
    return _about(len(text.split()), quantifier, N, max(round(N * 0.1), 1))


def sentences(text: str, N: int, quantifier: str) -> bool:
    return _about(_sentences(text), quantifier, N, 1)


def paragraph_start(text: str, N: int, first_word: str, i: int) -> bool:
    """There are exactly so many paragraphs, separated by empty lines, and number `i` begins with a word."""
    parts = text.split("\n\n")
    return len(parts) == N and 1 <= i <= N and parts[i - 1].strip().startswith(first_word)


def marked_postscript(text: str, postscript_marker: str) -> bool:
    """The marker of a postscript occurs, with text after it."""
    _, marker, rest = text.partition(postscript_marker)
    return bool(marker and rest.strip())


def placeholders(text: str, N: int) -> bool:
    return number_placeholders(text, N)


def bullets(text: str, N: int) -> bool:
    return sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N


def one_of_options(text: str, options: Sequence[str]) -> bool:
    return text in options


def highlights(text: str, N: int) -> bool:
    return highlighted_sections(text, N)


def sections(text: str, N: int, section_splitter: str) -> bool:
    """There are exactly so many sections, each of which begins with the mark."""
    parts = text.split(section_splitter)
    return len(parts[1:] if not parts[0] else parts) == N


def repeated_prompt(text: str, original_prompt: str) -> bool:
    return text.startswith(original_prompt)


def capital_words(text: str, N: int, quantifier: str) -> bool:
    return _about(len(re.findall(r"\b[A-Z]+\b", text)), quantifier, N, 0)


def ends_with(text: str, end_phrase: str) -> bool:
    return text.endswith(end_phrase)


ROLL: dict[str, Callable[..., bool]] = {
    "verify_keywords": all_keywords,
    "verify_keyword_frequency": word_count,
    "validate_forbidden_words": no_words,
    "verify_letter_frequency": letter_count,
    "validate_response_language": language,
    "verify_paragraph_count": paragraphs,
    "validate_word_constraint": words,
    "verify_sentence_constraint": sentences,
    "validate_paragraphs": paragraph_start,
    "verify_postscript": marked_postscript,
    "validate_placeholders": placeholders,
    "verify_bullet_points": bullets,
    "validate_title": title,
    "validate_choice": one_of_options,
    "validate_highlighted_sections": highlights,
    "validate_sections": sections,
    "validate_json_format": json_format,
    "validate_repeat_prompt": repeated_prompt,
    "validate_two_responses": two_responses,
    "validate_uppercase": uppercase,
    "validate_lowercase": lowercase,
    "validate_frequency_capital_words": capital_words,
    "validate_end": ends_with,
    "validate_quotation": quotation,
    "validate_no_commas": no_comma,
}
