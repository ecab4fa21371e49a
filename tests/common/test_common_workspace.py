"""The stamp that makes a folder a workspace, and the corpus that later stages read from it."""

import pytest

from zero2all import __version__
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json, write_json
from zero2all.common.records import corpus_sources, iter_records, training_text
from zero2all.common.workspace import LAYOUT, STAMP_NAME, open_workspace, require_output


def test_a_folder_without_a_stamp_is_no_workspace_and_a_new_one_gets_a_stamp_and_opens_again(tmp_path):
    with pytest.raises(UsageError, match=r"is not a workspace \(it has no workspace\.json\).*--work"):
        open_workspace(tmp_path)
    assert list(tmp_path.iterdir()) == []
    root = tmp_path / "new" / "work"
    open_workspace(root, create=True)
    assert read_json(root / STAMP_NAME) == {"layout": LAYOUT, "zero2all": __version__}
    workspace = open_workspace(root)
    assert (workspace.run("a"), open_workspace(root, create=True)) == (root / "runs" / "a", workspace)


@pytest.mark.parametrize("layout", [LAYOUT + 1, None])
def test_a_workspace_of_another_layout_is_refused_with_both_versions(tmp_path, layout):
    write_json(tmp_path / STAMP_NAME, {"layout": layout, "zero2all": "9.9"})
    said = rf"layout {layout}; this version, {__version__}, uses layout {LAYOUT}.*--work.*wrote it \(9\.9\)"
    for create in (False, True):
        with pytest.raises(BadInputError, match=said):
            open_workspace(tmp_path, create=create)


def test_a_stamp_that_is_not_ours_and_a_path_where_no_workspace_can_be_are_refused(tmp_path):
    write_json(tmp_path / STAMP_NAME, ["a", "list"])
    with pytest.raises(BadInputError, match="another version"):
        open_workspace(tmp_path)
    (tmp_path / "file").write_text("text")
    with pytest.raises(BadInputError, match="is a file, not a folder"):
        open_workspace(tmp_path / "file", create=True)
    with pytest.raises(BadInputError, match=r"Cannot create a workspace in .*Not a directory.*--work"):
        open_workspace(tmp_path / "file" / "below", create=True)


def test_a_run_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    workspace = open_workspace(tmp_path, create=True)
    with pytest.raises(BadInputError, match=r"has no run `first`\. It has no runs yet: train one with `z2a train`"):
        workspace.existing_run("first")
    workspace.run("first-run").mkdir(parents=True)
    with pytest.raises(BadInputError, match="Did you mean `first-run`"):
        workspace.existing_run("first")
    assert workspace.existing_run("first-run") == workspace.run("first-run")


def test_without_a_report_there_is_no_corpus_and_a_source_that_it_lists_must_be_whole(tmp_path):
    with pytest.raises(BadInputError, match=r"no finished corpus .*Run `z2a corpus build` first"):
        corpus_sources(tmp_path)
    write_json(tmp_path / "report.json", {"sources": {"en": {}}})
    with pytest.raises(BadInputError, match=r"no finished corpus in .*en"):
        corpus_sources(tmp_path)


def test_records_come_shard_by_shard_and_a_damaged_line_is_named(tmp_path):
    folder = tmp_path / "en" / "train"
    folder.mkdir(parents=True)
    (folder / "part-00001.jsonl").write_bytes(b'{"id": 3}\n{"id": \n')
    (folder / "part-00000.jsonl").write_bytes(b'{"id": 1}\n{"id": 2}\n')
    records = iter_records(tmp_path, "en", "train")
    assert [next(records)["id"] for _ in range(3)] == [1, 2, 3]
    with pytest.raises(BadInputError, match=r"part-00001\.jsonl is damaged: it is not JSON at line 2.*corpus build`"):
        next(records)
    assert list(iter_records(tmp_path, "en", "valid")) == []


def test_a_title_is_part_of_the_text_unless_the_text_opens_with_it():
    assert training_text({"title": "Rain", "content": "It fell."}) == "Rain\nIt fell."
    assert training_text({"title": "Rain", "content": "Rain fell."}) == "Rain fell."
    assert training_text({"title": "", "content": "It fell."}) == "It fell."
    assert training_text({"content": "It fell."}) == "It fell."


def test_a_result_never_replaces_a_file_that_a_stage_has_written(tmp_path):
    open_workspace(tmp_path, create=True)
    of_stages = ("corpus/en/train/part-00000.jsonl", "tokenizer/tokenizer.json", "runs/a/metrics/000.jsonl")
    for name in of_stages:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "link.json").symlink_to(tmp_path / of_stages[0])
    for name in (*of_stages, "workspace.json", "link.json", "corpus/../tokenizer/tokenizer.json"):
        with pytest.raises(BadInputError, match=r"already exists inside .* delete the file first"):
            require_output(tmp_path / name, "--json")


def test_a_result_never_replaces_a_file_in_a_folder_with_a_manifest_wherever_that_lies(tmp_path):
    (tmp_path / "copied/train").mkdir(parents=True)
    (tmp_path / "copied/train/tokens.bin").write_bytes(b"")
    (tmp_path / "copied/manifest.json").write_text('{"kind": "packed", "zero2all": "0.1"}')
    for name in ("manifest.json", "train/tokens.bin"):
        with pytest.raises(BadInputError, match="already exists"):
            require_output(tmp_path / "copied" / name, "--json")
    (tmp_path / "copied/manifest.json").write_text('{"name": "a web page"}')
    require_output(tmp_path / "copied/train/tokens.bin", "--json")


def test_a_result_may_be_new_in_a_workspace_or_replace_one_beside_the_stages_or_a_picture(tmp_path):
    open_workspace(tmp_path, create=True)
    for name in ("stats.json", "own/stats.json", "runs/a/curves.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    for name in ("stats.json", "own/stats.json", "runs/a/curves.png", "runs/a/new.json"):
        require_output(tmp_path / name, "--json")
    require_output(tmp_path / "runs/a", "--out", is_folder=True)
