"""`z2a corpus download`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli.verb import Subparsers, add_output, add_verb, whole
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.corpus.download.fetch import DownloadRequest, DownloadResult

RESUME_NOTE = "run the same command again to resume an interrupted download; every file is checked"
EXAMPLES = f"""z2a corpus download wikimedia/wikipedia --include '20231101.zh/*' --to raw/wiki_zh
  z2a corpus download OWNER/MODEL --type model --exclude '*.bin' --endpoint https://mirror.example
  z2a corpus download OWNER/DATASET --dry-run

{RESUME_NOTE}"""


def register(inner: Subparsers) -> None:
    """Add the verb."""
    verb = add_verb(inner, "download", "fetch a data set or a model from a Hugging Face-style hub", EXAMPLES, _download)
    verb.add_argument("repo", metavar="OWNER/NAME", help="repository on the hub")
    verb.add_argument(
        "--type", choices=("dataset", "model"), default="dataset", help="kind of the repository (default dataset)"
    )
    patterns: Any = {"action": "append", "default": [], "metavar": "PATTERN"}
    about = "only files such as 'data/*.parquet', where * also matches slashes; may be repeated (default: all)"
    verb.add_argument("--include", help=about, **patterns)
    verb.add_argument("--exclude", help="skip files that match this; may be repeated", **patterns)
    add_output(verb, "--to", is_folder=True, help="folder to write to (default: raw/NAME, for models models/NAME)")
    verb.add_argument("--revision", default="main", help="branch, tag or commit (default main)")
    verb.add_argument("--endpoint", metavar="URL", help="hub or mirror (default: HF_ENDPOINT, or the hub)")
    about = (
        "environment variable that holds the token; without it, mirrors get no token (default: "
        "HF_TOKEN or `hf auth login`)"
    )
    verb.add_argument("--token-env", metavar="VARIABLE", help=about)
    about = "files or parts of files fetched in parallel (default 4)"
    verb.add_argument("--connections", type=whole(1), default=4, metavar="N", help=about)
    verb.add_argument("--verify", action="store_true", help="also verify files that are already here")
    verb.add_argument("--update", action="store_true", help="replace local files with the current ones of the revision")
    verb.add_argument("--dry-run", action="store_true", help="list the files and stop")


def _download(arguments: argparse.Namespace) -> None:
    from zero2all.common.progress import say
    from zero2all.corpus.download.fetch import DownloadRequest, download

    name = arguments.repo.rstrip("/").rpartition("/")[2]
    folder = arguments.to or Path("models" if arguments.type == "model" else "raw") / name
    same = ("repo", "revision", "endpoint", "token_env", "connections", "verify", "update", "dry_run")
    request = DownloadRequest(
        folder=folder,
        kind=arguments.type,
        include=tuple(arguments.include),
        exclude=tuple(arguments.exclude),
        **{name: getattr(arguments, name) for name in same},
    )
    result = download(request, announce=say)
    if request.dry_run:
        _print_files(result)
    else:
        _print_summary(request, result)


def _print_files(result: DownloadResult) -> None:
    from zero2all.cli.table import print_table
    from zero2all.common.files import human_bytes
    from zero2all.corpus.download.fetch import in_words

    missing = {file.name for file in result.missing}
    rows = [
        [file.name, human_bytes(file.size_bytes), "no" if file.name in missing else "yes", file.algorithm]
        for file in result.files
    ]
    print_table([["file", "size", "here", "checked by"], *rows])
    print(t(f"would fetch {in_words(result.missing)}"))


def _print_summary(request: DownloadRequest, result: DownloadResult) -> None:
    from zero2all.common.files import human_bytes
    from zero2all.common.progress import counted, human_seconds
    from zero2all.corpus.download.fetch import MANIFEST_NAME, STATE_FOLDER, in_words

    if result.missing:
        print(
            t(
                f"fetched {counted(len(result.missing), 'file')}, {human_bytes(result.bytes_fetched)} in "
                f"{human_seconds(result.seconds)}, all checksums match"
            )
        )
        if result.interruptions:
            print(t(f"lost connections that were resumed: {result.interruptions:,}"))
    elif request.verify:
        print(t("nothing to do: all files are here, and their checksums match"))
    else:
        print(t("nothing to do: all files are here, and their sizes match (--verify also checks their content)"))
    print(t(f"{request.folder}: {in_words(result.files)}, commit {result.commit[:12]}"))
    print(t(f"manifest: {request.folder / STATE_FOLDER / MANIFEST_NAME}"))
    if request.kind == "dataset":
        print(t(f"next: z2a corpus build {request.folder.name}={request.folder} --work my-workspace"))
    else:
        print(t(f"next: z2a import {request.folder} --work my-workspace --name NAME"))
