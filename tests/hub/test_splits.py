"""Which files of a dataset a subset and a split are."""

from __future__ import annotations

import pytest

from roll.hub.splits import SplitError, choose_files, matching_files

GSM8K = [
    "README.md",
    "main/train-00000-of-00001.parquet",
    "main/test-00000-of-00001.parquet",
    "socratic/train-00000-of-00001.parquet",
    "socratic/test-00000-of-00001.parquet",
]

CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# Grade school math
"""


def test_a_card_names_the_files_of_a_subset_and_split() -> None:
    assert choose_files(GSM8K, CARD, "main", ["train"]) == ["main/train-00000-of-00001.parquet"]
    assert choose_files(GSM8K, CARD, "main", ["validation", "test"]) == ["main/test-00000-of-00001.parquet"]


def test_a_subset_must_be_chosen_unless_one_is_the_default() -> None:
    with pytest.raises(SplitError, match="has the subsets main, socratic; choose one with data_args.subset"):
        choose_files(GSM8K, CARD, None, ["train"])
    with pytest.raises(SplitError, match="has no subset algebra; its subsets: main, socratic"):
        choose_files(GSM8K, CARD, "algebra", ["train"])
    marked = CARD.replace("config_name: socratic", "config_name: socratic\n  default: true")
    assert choose_files(GSM8K, marked, None, ["train"]) == ["socratic/train-00000-of-00001.parquet"]


def test_a_split_that_is_missing_is_answered_with_those_that_exist() -> None:
    with pytest.raises(SplitError, match="has no split validation; its splits: test, train"):
        choose_files(GSM8K, CARD, "main", ["validation"])


@pytest.mark.parametrize(
    ("paths", "split", "chosen"),
    [
        (["train.jsonl", "test.jsonl"], "train", ["train.jsonl"]),
        (["data/valid.parquet", "data/train_0.parquet"], "validation", ["data/valid.parquet"]),
        (["data/train_sft-00000-of-00002.parquet", "data/train_gen-00000-of-00002.parquet"], "train_sft", None),
        (["dev/a.jsonl", "train/a.jsonl", "train/b.jsonl"], "train", ["train/a.jsonl", "train/b.jsonl"]),
        (["problems.jsonl"], "train", ["problems.jsonl"]),
        (["dataset_infos.json", "constraints.parquet"], "train", ["constraints.parquet"]),
    ],
)
def test_without_a_card_names_of_files_tell_the_split(paths: list[str], split: str, chosen: list[str] | None) -> None:
    assert choose_files(paths, "", None, [split]) == (chosen or paths[:1])


def test_a_card_may_give_one_pattern_or_a_folder() -> None:
    one = "---\nconfigs:\n- config_name: default\n  data_files: '**/a*.jsonl'\n---\n"
    assert choose_files(["x/a1.jsonl", "a2.jsonl", "b.jsonl"], one, None, ["train"]) == ["a2.jsonl", "x/a1.jsonl"]
    folder = "---\nconfigs:\n- config_name: hard\n  data_dir: hard\n---\n"
    assert choose_files(["hard/test.jsonl", "easy/test.jsonl"], folder, None, ["test"]) == ["hard/test.jsonl"]


def test_a_broken_card_is_no_card() -> None:
    assert choose_files(["train.jsonl"], "---\n: [\n---\n", None, ["train"]) == ["train.jsonl"]


def test_files_that_cannot_be_read_are_named() -> None:
    with pytest.raises(SplitError, match=r"no file ending in .jsonl, .json, .parquet; its files end in .csv, .md"):
        choose_files(["README.md", "train.csv"], "", None, ["train"])
    with pytest.raises(SplitError, match=r"split 'train\[:10\]' is more than a name"):
        choose_files(["train.jsonl"], "", None, ["train[:10]"])


def test_patterns_do_not_cross_folders_unless_they_say_so() -> None:
    paths = ["a.parquet", "x/a.parquet", "x/y/a.parquet"]
    assert matching_files(paths, "*.parquet") == ["a.parquet"]
    assert matching_files(paths, "x/*.parquet") == ["x/a.parquet"]
    assert matching_files(paths, "**/*.parquet") == paths
