"""Files become windows and tasks as they stand there; what is wrong is named, never quoted."""

import json
from pathlib import Path

import numpy as np
import pytest

from zen_jax.evaluation.generated import GENERATED, skill_sets
from zen_jax.evaluation.questions import Limits, read_tasks, read_text
from zen_jax.tokenizer import Tokenizer
from zen_jax.training.bytes_tokenizer import BOS, EOS, VOCAB_SIZE, decode, write_tokenizer
from zen_jax.training.tasks import SKILLS, held_out

LIMITS = Limits(VOCAB_SIZE, 256, length=16, windows=1000, examples=1000)
SECRET = "a-secret-word"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 256)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def without_start(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 256)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": False}))
    return Tokenizer.from_folder(folder)


def _file(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "file.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("start", [True, False])
def test_windows_count_each_token_of_a_text_once(
    tokenizer, without_start, tmp_path, start: bool
) -> None:
    text = "".join(chr(97 + i % 26) for i in range(100)) + "äöü€"
    asked = read_text(
        _file(tmp_path, text), tokenizer if start else without_start, LIMITS, edge=True
    )
    sheet = asked.sheet
    assert (asked.name, asked.edge, sheet.answers) == ("file", True, False)
    assert sheet.counted.all() and sheet.counted.shape[1] == 16
    asked_of = sheet.tokens[:, 1:].ravel().tolist()
    first = 0 if start else 1  # nothing predicts the first token of a text without a start
    whole = text.encode()[first:]
    assert asked_of == list(whole[: len(whole) // 16 * 16])
    assert (sheet.tokens[:, 0] == BOS).all() == start
    assert asked.row_bytes.tolist() == [16] * len(sheet.tokens)


def test_fewer_windows_are_spread_over_the_text(tokenizer, tmp_path) -> None:
    limits = Limits(VOCAB_SIZE, 256, length=4, windows=3)
    sheet = read_text(_file(tmp_path, "aaaabbbbccccddddeeee"), tokenizer, limits).sheet
    assert [decode(row.tolist()) for row in sheet.tokens] == ["aaaa", "cccc", "eeee"]


def test_a_short_text_is_one_short_window(tokenizer, tmp_path) -> None:
    asked = read_text(_file(tmp_path, "abc"), tokenizer, LIMITS)
    assert asked.sheet.tokens[0, :4].tolist() == [BOS, *b"abc"]
    assert asked.sheet.counted.sum() == 3 and asked.row_bytes.tolist() == [3]


def test_tasks_end_and_keep_their_order(tokenizer, tmp_path) -> None:
    lines = [{"prompt": "ab\n", "answer": "AB"}, {"prompt": "c\n", "answer": "C", "id": 3}]
    path = _file(tmp_path, "\n\n".join(map(json.dumps, lines)) + "\n")
    sheet = read_tasks(path, tokenizer, LIMITS).sheet
    assert sheet.answers
    assert sheet.tokens[0, :7].tolist() == [BOS, *b"ab\nAB", EOS][:7]
    answers = [
        row[1:][counted].tolist() for row, counted in zip(sheet.tokens, sheet.counted, strict=True)
    ]
    assert answers == [[*b"AB", EOS], [*b"C", EOS]]
    chat = read_tasks(path, tokenizer, LIMITS, chat=True).sheet
    assert chat.tokens[1, :4].tolist() == [BOS, *b"c\n\n"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; expected lines"),
        (f"{SECRET}", "line 1 is no JSON; expected an object"),
        (f'\n{{"prompt": "{SECRET}"', "line 2 is no JSON"),
        (f'["{SECRET}"]', "line 1 is no JSON object"),
        (f'{{"prompt": "{SECRET}"}}', "line 1 has no text called 'answer'"),
        (f'{{"prompt": "{SECRET}", "answer": 3}}', "line 1 has no text called 'answer'"),
        (f'{{"prompt": "{SECRET}", "answer": ""}}', "line 1 has no text called 'answer'"),
        (f'{{"prompt": "{SECRET * 30}", "answer": "x"}}', "line 1 has 393 tokens; at most 256"),
        (b'{"prompt": "\xff", "answer": "x"}', "line 1 is no UTF-8"),
        (f'{{"prompt": "{SECRET}\\ud800", "answer": "x"}}', "not valid Unicode"),
    ],
)
def test_bad_tasks_are_named_not_quoted(tokenizer, tmp_path, content, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_tasks(_file(tmp_path, content), tokenizer, LIMITS)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is empty"), (" \n\t", "is empty"), (b"abc\xff", "no UTF-8 text: byte 3 is wrong")],
)
def test_bad_texts(tokenizer, tmp_path, content, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_text(_file(tmp_path, content), tokenizer, LIMITS)


def test_tokens_that_not_all_models_have(tokenizer, tmp_path) -> None:
    few = Limits(100, 256, length=16)
    with pytest.raises(ValueError, match="has the token 122; not all models have more than 100"):
        read_text(_file(tmp_path, "xyz"), tokenizer, few)


@pytest.mark.parametrize("name", GENERATED)
def test_skills_are_right_unseen_and_harder_at_the_edge(tokenizer, name: str) -> None:
    limits = Limits(VOCAB_SIZE, 256, examples=30)
    within, edge = skill_sets(name, tokenizer, limits, 7)
    assert (within.edge, edge.edge) == (False, True) and edge.name == f"{name}-edge"
    again, _ = skill_sets(name, tokenizer, limits, 7)
    assert again.sheet.digest == within.sheet.digest
    assert skill_sets(name, tokenizer, limits, 8)[0].sheet.digest != within.sheet.digest
    for asked in (within, edge):
        assert len(asked.sheet.tokens) == 30
        for tokens, counted in zip(asked.sheet.tokens, asked.sheet.counted, strict=True):
            first, last = np.flatnonzero(counted)[[0, -1]] + 1
            prompt, answer = decode(tokens[1 : first - 1].tolist()), tokens[first:last].tolist()
            skill = name
            if name == "ultra":
                skill, _, prompt = prompt.partition(": ")
            assert decode(answer) == SKILLS[skill].answer(prompt)
            assert tokens[last] == EOS and tokens[first - 1] == 10
            if skill in ("upper", "rot13", "reverse", "sort", "morse"):
                assert held_out(prompt) and (len(prompt) == 8 or not asked.edge)
            if skill == "add":
                assert held_out(prompt)


def test_words_of_a_file(tokenizer, tmp_path) -> None:
    words = [f"w{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"]
    path = tmp_path / "words"
    path.write_text("\n".join(words))
    within, _ = skill_sets("upper", tokenizer, Limits(VOCAB_SIZE, 256, examples=5), 0, path)
    for row in within.sheet.tokens:
        prompt = decode(row[1:4].tolist())
        assert prompt in words and held_out(prompt)
    path.write_text("one")
    with pytest.raises(ValueError, match="cannot be split"):
        skill_sets("upper", tokenizer, LIMITS, 0, path)
    with pytest.raises(ValueError, match="no skill is called 'nope'; there are upper"):
        skill_sets("nope", tokenizer, LIMITS, 0)
