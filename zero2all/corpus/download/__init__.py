"""`z2a corpus download`: files of a Hugging Face-style hub (hub, transfer, fetch)."""

from zero2all.corpus.download.fetch import (
    MANIFEST_NAME,
    STATE_FOLDER,
    DownloadRequest,
    DownloadResult,
    download,
    in_words,
)

__all__ = ["MANIFEST_NAME", "STATE_FOLDER", "DownloadRequest", "DownloadResult", "download", "in_words"]
