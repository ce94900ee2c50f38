from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.toy import encoder
from trainer.base.data_files import expand, split_of
from trainer.base.data_tables import open_table
from trainer.base.errors import UserError
from trainer.data import FileDataset, Keys, same_data_warning

ROWS = [{"prompt": f"q{i}", "answer": str(i), "response": f"r{i}"} for i in range(5)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        table = pa.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            pq.write_table(table, path, row_group_size=2)
        else:
            with (
                pa.OSFile(str(path), "wb") as sink,
                pa.ipc.new_stream(sink, table.schema) as writer,
            ):
                writer.write_table(table)
    return path


def open_(*paths: Path, **options: Any) -> FileDataset:
    keys = options.pop("keys", Keys())
    return FileDataset(paths, keys, options.pop("encoder", encoder()), **options)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow"])
def test_every_format_gives_the_same_samples(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"d{suffix}", ROWS)
    ds = open_(path, keys=Keys(response="response"))
    assert len(ds) == 5
    e = ds[3]
    assert "".join(map(chr, e.prompt_ids)) == "<user>q3<assistant>"
    assert "".join(map(chr, e.response_ids or [])) == "r3\0"
    assert (e.ground_truth, e.index, e.file) == ("3", 3, str(path))
    assert e.data_source == (tmp_path.name if suffix == ".arrow" else "d")
    assert e.row == (4 if suffix == ".jsonl" else 3)
    assert not [p for p in tmp_path.iterdir() if p != path]  # the spool file is gone


def test_several_files_follow_one_another(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", ROWS[:2])
    b = write(tmp_path / "b.parquet", ROWS[2:])
    ds = open_(a, b)
    assert [ds[i].ground_truth for i in range(len(ds))] == list("01234")
    assert (ds[4].file, ds[4].row) == (str(b), 2)
    assert len(open_(a, b, limit=3)) == 3


def test_blank_lines_and_a_missing_last_newline_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('\n{"prompt": "a", "answer": 1}\r\n   \n\n{"prompt": "b", "answer": 2}')
    ds = open_(path)
    assert [(ds[i].ground_truth, ds[i].row) for i in range(len(ds))] == [(1, 2), (2, 5)]


def test_verls_layout_is_read(tmp_path: Path) -> None:
    """Chat messages, reward_model.ground_truth, data_source and extra_info, as verl prepares
    them.
    """
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1?", "name": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0},
    }
    e = open_(write(tmp_path / "d.parquet", [row]))[0]
    assert "".join(map(chr, e.prompt_ids)) == "<user>1+1?<assistant>"
    assert (e.ground_truth, e.data_source) == ("2", "openai/gsm8k")
    assert e.extra_info == {"split": "train", "index": 0}


def test_gsm8k_answers_end_after_the_hashes(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"question": "q", "answer": "so 1,200\n#### 1,234"}])
    e = open_(path, keys=Keys(prompt="question", response="answer"))[0]
    assert e.ground_truth == "1234"
    assert "".join(map(chr, e.response_ids or [])) == "so 1,200\n#### 1,234\0"


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        (
            {"promt": "a"},
            Keys(),
            r"row 1: no field 'prompt' \(data.prompt_key\). Found: promt; did you mean 'promt'\?",
        ),
        ({"a": {"b": "x"}}, Keys(), r"Found: a, a.b; set data.prompt_key to one of them"),
        ({"prompt": "a"}, Keys(), r"no field 'answer' \(data.answer_key\)"),
        ({"prompt": "a", "answer": " "}, Keys(), r"row 1: field 'answer' is empty"),
        (
            {"prompt": " ", "answer": "1"},
            Keys(),
            r"row 1: field 'prompt' is empty; fill it in or remove the row",
        ),
        ({"prompt": [], "answer": "1"}, Keys(), r"row 1: field 'prompt' is empty"),
        (
            {"prompt": None, "answer": "1"},
            Keys(),
            r"must be a text or a list of chat messages, found nothing \(null\)",
        ),
        ({"prompt": 3, "answer": "1"}, Keys(), r"found int '3'"),
        (
            {"prompt": [{"text": "a"}], "answer": "1"},
            Keys(),
            r"message 0 must have 'role' and 'content'.* with text",
        ),
        (
            {"prompt": [{"role": "user", "content": " "}], "answer": "1"},
            Keys(),
            r"no user message with text",
        ),
        (
            {
                "prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
                "answer": "1",
            },
            Keys(),
            r"ends with an assistant message",
        ),
        (
            {"prompt": "a", "answer": "1"},
            Keys(response="chosen"),
            r"no field 'chosen' \(data.response_key\)",
        ),
        ({"prompt": "a", "answer": "1", "r": ""}, Keys(response="r"), r"field 'r' is empty"),
    ],
)
def test_wrong_rows_name_file_row_field_and_remedy(
    tmp_path: Path, row: dict[str, Any], keys: Keys, message: str
) -> None:
    """At once for the first row, when its turn comes for the others."""
    path = write(tmp_path / "d.jsonl", [row])
    with pytest.raises(UserError, match=re.escape(str(path)) + ", .*" + message):
        open_(path, keys=keys)
    good = {"prompt": "a", "answer": "1", "chosen": "x", "r": "y"}
    later = open_(write(path, [good, row]), keys=keys)
    assert later[0].row == 1
    with pytest.raises(UserError, match="row 2: "):
        later[1]


def test_an_answer_may_be_missing_when_it_is_not_required(tmp_path: Path) -> None:
    ds = open_(write(tmp_path / "d.jsonl", [{"prompt": "a"}]), keys=Keys(answer_required=False))
    assert ds[0].ground_truth is None


def test_damaged_files_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": \n[1]\n')
    ds = open_(bad)
    with pytest.raises(UserError, match=r"bad.jsonl, row 2: not valid JSON"):
        ds[1]
    with pytest.raises(
        UserError, match=r"bad.jsonl, row 3: a JSON object per line is wanted, found list"
    ):
        ds[2]
    for name, content, message in (
        ("e.jsonl", "", "is empty"),
        ("blank.jsonl", "\n\n", "data.train_files: blank.jsonl has no rows"),
        ("x.parquet", "not parquet at all", "x.parquet is not a valid Parquet file"),
        ("x.arrow", "not arrow at all", "x.arrow "),
        ("lines.json", '{"a": 1}\n{"a": 2}\n', r"belongs in a .jsonl file"),
        ("obj.json", '{"a": 1}', r"a JSON array of objects is wanted, found dict"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=message):
            open_(tmp_path / name)


def test_a_corrupt_parquet_file_and_a_full_disk_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"question {i} " * 9, "answer": "1"} for i in range(500)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet", use_dictionary=False)
    content = bytearray((tmp_path / "d.parquet").read_bytes())
    content[100:3000] = bytes(range(256)) * 11 + bytes(84)
    (tmp_path / "bad.parquet").write_bytes(content)
    with pytest.raises(
        UserError, match=r"bad.parquet (can't be read|is not a valid Parquet file): "
    ):
        open_(tmp_path / "bad.parquet")

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainer.base.arrow_tables.pa.OSFile", full)
    with pytest.raises(
        UserError, match=r"d.parquet can't be unpacked into .*No space left .*; set TMPDIR"
    ):
        open_(tmp_path / "d.parquet")


def test_a_folder_saved_by_datasets_is_read(tmp_path: Path) -> None:
    part = write(tmp_path / "data-00000-of-00001.arrow", ROWS)
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    assert expand(str(tmp_path), "k") == [part]
    assert len(open_(part)) == 5


def test_files_folders_and_globs(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", ROWS), write(tmp_path / "b.parquet", ROWS)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "sub").mkdir()
    assert expand(str(tmp_path), "k") == [a, b]
    assert expand([str(tmp_path / "*.jsonl"), str(b)], "k") == [a, b]
    for pattern, message in (
        (str(tmp_path / "a.json"), r"^k: there is no file .*a.json; did you mean 'a.jsonl'\?"),
        (str(tmp_path / "nowhere" / "a.jsonl"), r"nowhere does not exist either"),
        (str(tmp_path / "*.csv"), r"no file matches"),
        (str(tmp_path / "notes.txt"), r"is not one of .jsonl"),
        (str(tmp_path / "sub"), r"has no .*file$"),
        ([str(a), str(a)], r"named more than once"),
    ):
        with pytest.raises(UserError, match=message):
            expand(pattern, "k")


def test_a_folder_with_several_splits_is_read_by_split(tmp_path: Path) -> None:
    names = ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")
    one, two, test = (write(tmp_path / f"{name}.parquet", ROWS) for name in names)
    assert expand(str(tmp_path), "data.train_files") == [one, two]
    assert expand(str(tmp_path), "data.val_files") == [test]
    assert expand(str(tmp_path / "train-*"), "data.train_files") == [one, two]
    with pytest.raises(
        UserError,
        match=r"^data.train_files: .* matches files of several splits: 1 of test \(test-00000-of-"
        r"00001.parquet\), 2 of train \(train-00000-of-00002.parquet\); name the files$",
    ):
        expand(str(tmp_path / "*.parquet"), "data.train_files")
    validation = write(tmp_path / "gsm8k_dev.jsonl", ROWS)
    assert expand(str(tmp_path), "data.train_files") == [one, two]
    with pytest.raises(
        UserError, match=r"data.val_files: the folder .* 1 of validation .gsm8k_dev"
    ):
        expand(str(tmp_path), "data.val_files")
    validation.rename(tmp_path / "more.jsonl")
    with pytest.raises(
        UserError, match=r"data.train_files: the folder .* 1 of no split .more.json"
    ):
        expand(str(tmp_path), "data.train_files")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"),
        ("my_data-TRAINING-1.parquet", "train"),
        ("dev.json", "validation"),
        ("eval 2.jsonl", "test"),
        ("constraints.jsonl", None),
        ("latest.jsonl", None),
        ("train_test.jsonl", None),
    ],
)
def test_a_split_is_a_word_of_its_own(name: str, split: str | None) -> None:
    assert split_of(Path(name)) == split


@pytest.mark.parametrize("workers", [0, 2])
def test_overlong_prompts_are_filtered_before_the_first_epoch(tmp_path: Path, workers: int) -> None:
    rows = [{"prompt": "x" * (i % 5), "answer": str(i)} for i in range(1, 600) if i % 5]
    path = write(tmp_path / "d.jsonl", rows)
    short = encoder(max_prompt_length=len("<user>xx<assistant>"))
    ds = open_(path, encoder=short, filter_prompts=True, num_workers=workers)
    assert [int(ds[k].ground_truth) for k in range(len(ds))] == [
        i for i in range(1, 600) if 0 < i % 5 <= 2
    ]
    with pytest.raises(
        UserError, match=r"all 480 prompts .* are longer than data.max_prompt_length"
    ):
        open_(path, encoder=encoder(max_prompt_length=3), filter_prompts=True, num_workers=workers)


def test_the_fingerprint_follows_the_content_not_the_path(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    a = open_(write(tmp_path / "d.jsonl", ROWS)).fingerprint
    assert open_(write(tmp_path / "moved" / "d.jsonl", ROWS)).fingerprint == a
    changed = [*ROWS[:4], {**ROWS[4], "answer": "5"}]
    assert open_(write(tmp_path / "d.jsonl", changed)).fingerprint.digest != a.digest
    assert open_(write(tmp_path / "d.jsonl", ROWS), limit=4).fingerprint.digest != a.digest
    assert open_(tmp_path / "d.jsonl", keys=Keys(prompt="answer")).fingerprint.digest != a.digest


def test_training_on_the_validation_set_is_a_warning(tmp_path: Path) -> None:
    ds = open_(write(tmp_path / "d.jsonl", ROWS))
    assert "says nothing about new prompts" in (same_data_warning(ds, ds) or "")
    assert same_data_warning(ds, open_(tmp_path / "d.jsonl", limit=2)) is None


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_half_a_character_names_its_row(tmp_path: Path, suffix: str) -> None:
    rows = [ROWS[0], {**ROWS[1], "prompt": "a\ud83db"}]
    path = write(tmp_path / f"half{suffix}", rows)
    row = {".jsonl": 2, ".json": 1}[suffix]
    with pytest.raises(UserError, match=rf"half\{suffix}, row {row}: the escape .ud83d is half"):
        open_(path)[1]
    whole = write(tmp_path / f"whole{suffix}", [{**ROWS[1], "prompt": "a\U0001f600b"}])
    assert open_table(whole).read(0)["prompt"] == "a\U0001f600b"


def test_a_missing_answer_that_a_table_wrote_as_nan_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "nan.jsonl", [{**ROWS[0], "answer": float("nan")}])
    for rule in (True, False):
        with pytest.raises(UserError, match="row 1: field 'answer' is NaN"):
            open_(path, keys=Keys(maths_rule=rule))[0]
