"""`z2a corpus download`: files of a Hugging Face-style hub, whole, checked and of one commit.

hub       what a repo holds, and what to do when the hub says no       transfer  one file, in pieces, resumable
fetch     the whole folder: plan, pinned commit, manifest
"""

from zero2all.corpus.download.fetch import (
    MANIFEST_NAME,
    STATE_FOLDER,
    DownloadRequest,
    DownloadResult,
    download,
    in_words,
)

__all__ = ["MANIFEST_NAME", "STATE_FOLDER", "DownloadRequest", "DownloadResult", "download", "in_words"]
