"""Data paths in files: what they stand for, and what is wrong with those that stand for nothing."""

import json

import pytest

from megatron.core.config import DataConfig
from megatron.core.datasets.data_paths import read_path_files, split_blends


def test_a_file_stands_for_what_would_follow_data_path(tmp_path):
    file = tmp_path / "blend.txt"
    file.write_text('0.3 /data/a\n  0.7\t"/data/with space/b"\n')
    config = read_path_files(DataConfig(data_args_path=str(file), split="9,1,0"))
    assert config == DataConfig(data_path=("0.3", "/data/a", "0.7", "/data/with space/b"), split="9,1,0")
    assert split_blends(config)["train"].weights == (0.3, 0.7)


def test_a_table_stands_for_the_three_paths(tmp_path):
    file = tmp_path / "blend.json"
    file.write_text(json.dumps({"train": [0.5, "a", "1", "b"], "valid": "c 'd e'", "test": []}))
    config = read_path_files(DataConfig(per_split_data_args_path=str(file)))
    assert config == DataConfig(train_data_path=("0.5", "a", "1", "b"), valid_data_path=("c", "d e"))
    blends = split_blends(config, validation_sets=True)
    assert [blends["train"].prefixes, blends["valid"].prefixes, blends["test"]] == [
        ("a", "b"),
        ("c", "d e"),
        None,
    ]


@pytest.mark.parametrize(
    ("field", "content", "reason"),
    [
        ("data_args_path", b"", "names no data"),
        ("data_args_path", b"0.5 a 'b", "No closing quotation"),
        ("data_args_path", b"--data-path a", "holds the flag --data-path, .* given as @FILE"),
        ("data_args_path", b"0 a 0 b", r"the weights \[0.0, 0.0\] must be 0 or above, and not all 0"),
        ("data_args_path", b"\xff\xfe", "is no text in UTF-8"),
        ("data_args_path", None, "No such file or directory"),
        ("per_split_data_args_path", None, "No such file or directory"),
        ("per_split_data_args_path", b'{"train": [\n"a",]}', "no JSON at line 2, column "),
        ("per_split_data_args_path", b'["a"]', "it must hold .*train"),
        ("per_split_data_args_path", b'{"training": ["a"]}', "there is no split 'training'"),
        ("per_split_data_args_path", b'{"train": {"a": 1}}', '"train": .* is no list of data paths'),
        ("per_split_data_args_path", b'{"valid": ["a", true]}', '"valid": true is neither a data path nor'),
        ("per_split_data_args_path", b'{"test": [-1, "a", 2, "b"]}', r'"test": the weights \[-1.0, 2.0\]'),
    ],
)
def test_a_file_that_stands_for_nothing_is_named_with_the_reason(tmp_path, field, content, reason):
    file = tmp_path / "paths"
    if content is not None:
        file.write_bytes(content)
    spelling = "--" + field.replace("_", "-")
    with pytest.raises(ValueError, match=f"^{spelling} {file}.*{reason}"):
        read_path_files(DataConfig(**{field: str(file)}))


def test_ways_to_name_data_exclude_each_other():
    ways = {
        "data_path": ("a",),
        "test_data_path": ("a",),
        "data_args_path": "a",
        "per_split_data_args_path": "a",
        "mock_data": True,
    }
    for first in ways:
        for second in ways:
            if first != second:
                with pytest.raises(ValueError, match="exclude each other"):
                    DataConfig(**{first: ways[first], second: ways[second]})


def test_validation_sets_are_refused_where_no_datasets_are_for_validation_alone():
    for config in (DataConfig(data_path=("a", "b")), DataConfig(mock_data=True)):
        with pytest.raises(ValueError, match=r"--multiple-validation-sets evaluates each .* there is none"):
            split_blends(config, validation_sets=True)
