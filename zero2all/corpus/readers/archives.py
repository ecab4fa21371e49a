"""Archives, member by member: tar and zip by our own walk over their headers, 7z and rar by libarchive.

Nothing is ever written under a member's name; still, one that points outside (`../x`, `/etc/x`, `C:\\x`) is refused.
zipfile keeps every entry in memory (1 GB for a million), and tarfile and libarchive end at a damaged tar header: hence
our own walks, which use the header parsers of the standard library.
"""

from __future__ import annotations

import lzma
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, cast

from zero2all.corpus.readers.items import EXCERPT_CHARS, first_line_of
from zero2all.corpus.readers.streams import CHUNK_BYTES, FileSlice, Guard, Read, Stream, StreamError, decompress

INSTALL_LIBARCHIVE = (
    "reading 7z and rar needs libarchive: apt install libarchive13 (Debian, Ubuntu), dnf install libarchive (Fedora), "
    "brew install libarchive (macOS), conda install libarchive, and pip install libarchive-c"
)
TAR_BLOCK = 512
MAX_NAME_BYTES = 1 << 20
"""A long-name or attribute header of a tar above this is damage."""
DIRECTORY_BYTES = 1 << 20
LIBARCHIVE_BLOCK = 1 << 18
ENCRYPTED = 0x1
TAR_DEVICES = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)


@dataclass(slots=True)
class ArchiveMember:
    """One entry of an archive. Those of tar, 7z and rar must be read before the next one is asked for."""

    number: int
    name: str
    size: int
    """As the archive says; 0 when it does not."""
    skip: str = ""
    """Why it holds nothing to read: `folder`, `link` …"""
    error: StreamError | None = None
    """Why it cannot be read."""
    open: Callable[[], Stream] | None = None


def _member(number: int, name: str, size: int, skip: str, opened: Callable[[], Stream]) -> ArchiveMember:
    return ArchiveMember(number, name, 0 if skip else size, skip, open=opened)


def _why_skipped(is_folder: bool, is_link: bool, is_file: bool) -> str:
    """What an entry is that holds nothing to read; empty for a file."""
    return "folder" if is_folder else "link" if is_link else "" if is_file else "not a file"


def is_safe_name(name: str) -> bool:
    """Whether an archive member stays below the folder it would be unpacked in."""
    parts = name.replace("\\", "/").split("/")
    absolute = name.startswith(("/", "\\")) or (len(name) > 1 and name[1] == ":" and name[0].isalpha())
    return bool(name) and not absolute and ".." not in parts and "\0" not in name


def is_hidden(name: str) -> bool:
    """What an archiver added on its own: `.DS_Store`, `__MACOSX/`, and everything with a leading dot."""
    parts = name.split("/")
    return any(part.startswith(".") and part != "." for part in parts) or parts[0] == "__MACOSX"


def has_libarchive() -> bool:
    """Whether 7z and rar can be read here."""
    try:
        import libarchive  # noqa: F401
    except (ImportError, OSError, TypeError, AttributeError):  # without the C library the import fails in odd ways
        return False
    return True


# ---- tar ------------------------------------------------------------------------------------------------------


class TarReader:
    """The members of a tar, from a stream or a file. A damaged header costs the members up to the next good one."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._file = stream, stream.file
        self._at = 0
        """Offset of the next header."""
        self._position = 0
        """Offset of the next byte to read."""
        self._size = self._file.seek(0, os.SEEK_END) if self._file is not None else 0

    def members(self) -> Iterator[ArchiveMember]:
        """All entries. Raises StreamError where the archive breaks off."""
        number = 0
        long_name = ""
        pax: dict[str, str] = {}
        while block := self._block():
            if not block.strip(b"\0"):
                return
            try:
                info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except tarfile.HeaderError as error:
                lost = self._to_next_header()
                detail = f"tar header: {first_line_of(error)}; {lost:,} bytes skipped"
                yield ArchiveMember(number, "", lost, error=StreamError("damaged_archive", detail))
                number += 1
                long_name, pax = "", {}
                continue
            data_at, size = self._at, info.size
            if info.type in (b"L", b"K", b"x", b"g", b"X"):
                data = self._small(data_at, size)
                self._at += _padded(size)
                if info.type == b"L":
                    long_name = data.rstrip(b"\0").decode("utf-8", "replace")
                elif info.type in (b"x", b"X"):
                    pax = _pax_headers(data)
                continue
            raw_name = pax.get("path") or long_name or info.name
            name = raw_name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            stated = pax.get("size", "")
            has_data = not (info.isdir() or info.issym() or info.islnk() or info.type in TAR_DEVICES)
            if stated.isdigit() and int(stated) != size:
                size, has_data = int(stated), True
            self._at += _padded(size) if has_data else 0
            yield self._member(info, number, name, data_at, size)
            number += 1
            long_name, pax = "", {}
        if number == 0 or self._at > (self._position if self._file is None else self._size):
            raise StreamError("cut_off", "the tar ends inside an entry")

    def _member(self, info: tarfile.TarInfo, number: int, name: str, at: int, size: int) -> ArchiveMember:
        if info.type == tarfile.GNUTYPE_SPARSE:
            return ArchiveMember(
                number, name, size, error=StreamError("sparse_file", "sparse tar entries are not read")
            )
        is_link, is_file = info.issym() or info.islnk(), info.type not in TAR_DEVICES
        skip = _why_skipped(info.isdir(), is_link, is_file)
        return _member(number, name, size, skip, lambda: self._open(at, size))

    def _open(self, at: int, size: int) -> Stream:
        if self._file is not None and at + size <= self._size:
            part = FileSlice(self._file, at, size)
            return Stream(part.read, cast(BinaryIO, part))
        self._position = max(self._position, at)
        end = at + size

        def read(wanted: int) -> bytes:
            wanted = min(wanted, end - self._position)
            data = self._read(wanted) if wanted > 0 else b""
            if wanted > 0 and not data:
                raise StreamError("cut_off", "the tar ends inside this entry")
            return data

        return Stream(read)

    def _block(self) -> bytes:
        """The next header; nothing at the end of the data."""
        data = self._small(self._at, TAR_BLOCK, may_end=True)
        self._at += len(data)
        return data

    def _small(self, at: int, size: int, may_end: bool = False) -> bytes:
        if size > MAX_NAME_BYTES:
            raise StreamError("damaged_archive", f"a tar header of {size:,} bytes")
        self._go_to(at)
        data = b""
        while len(data) < size and (more := self._read(size - len(data))):
            data += more
        if len(data) < size and not (may_end and not data):
            raise StreamError("cut_off", "the tar ends inside a header")
        return data

    def _go_to(self, at: int) -> None:
        if self._file is not None:
            self._position = at
        while self._position < at:
            if not self._read(min(at - self._position, CHUNK_BYTES)):
                raise StreamError("cut_off", "the tar ends inside an entry")

    def _read(self, size: int) -> bytes:
        if self._file is not None:
            self._file.seek(self._position)
            data = self._file.read(size)
        else:
            data = self._stream.read_or_raise(size)
        self._position += len(data)
        return data

    def _to_next_header(self) -> int:
        """Go to the next header that is sound; returns how many bytes were passed over."""
        start = self._at - TAR_BLOCK
        try:
            while block := self._block():
                if block[257:262] == b"ustar":
                    try:
                        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
                    except tarfile.HeaderError:
                        continue
                    self._at -= TAR_BLOCK
                    self._position -= TAR_BLOCK
                    if self._file is None:
                        self._stream.unread(block)
                    return self._at - start
            raise StreamError("damaged_archive", "nothing readable follows a damaged tar header")
        except StreamError as error:
            error.lost_bytes = self._at - start
            raise


def _padded(size: int) -> int:
    return -(-size // TAR_BLOCK) * TAR_BLOCK


def _pax_headers(data: bytes) -> dict[str, str]:
    headers = {}
    while data:
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or not 5 <= int(length) <= len(data):
            break
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        headers[key.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
        data = data[int(length) :]
    return headers


# ---- zip ------------------------------------------------------------------------------------------------------


class ZipReader:
    """The members of a zip by its central directory, without holding it in memory."""

    def __init__(self, file: BinaryIO, guard: Guard) -> None:
        self._file, self._guard = file, guard
        self._size = file.seek(0, os.SEEK_END)
        self.entries, self._directory_at, self._directory_bytes, self._shift = self._find_directory()

    def members(self, start: int = 0, end: int | None = None) -> Iterator[ArchiveMember]:
        """Entries number `start` to `end`. Raises StreamError where the directory is damaged."""
        for number, info in islice(enumerate(self.directory()), start, end):
            yield self._member(number, info)

    def directory(self) -> Iterator[zipfile.ZipInfo]:
        """Every entry."""
        part = FileSlice(self._file, self._directory_at, self._directory_bytes)
        buffer = b""
        for _ in range(self.entries):
            while len(buffer) < 46 or len(buffer) < 46 + sum(struct.unpack_from("<3H", buffer, 28)):
                more = part.read(DIRECTORY_BYTES)
                if not more:
                    raise StreamError("damaged_archive", "the zip directory ends too early")
                buffer += more
            if buffer[:4] != b"PK\x01\x02":
                raise StreamError("damaged_archive", "an entry of the zip directory is damaged")
            info, length = _zip_info(buffer)
            buffer = buffer[length:]
            yield info

    def _member(self, number: int, info: zipfile.ZipInfo) -> ArchiveMember:
        is_link = info.create_system == 3 and stat.S_ISLNK(info.external_attr >> 16)
        skip = _why_skipped(info.is_dir(), is_link, True)
        member = _member(number, info.filename, info.file_size, skip, lambda: self._open(info))
        if not member.skip and info.flag_bits & ENCRYPTED:
            member.error = StreamError("encrypted", "this zip entry needs a password")
        elif not member.skip:
            try:
                self._guard.check(info.compress_size, info.file_size, 0)
            except StreamError as error:
                member.error = error
        return member

    def _open(self, info: zipfile.ZipInfo) -> Stream:
        at = info.header_offset + self._shift
        self._file.seek(at)
        header = self._file.read(30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            return _failed_stream(StreamError("damaged_archive", "the zip entry has no header of its own"))
        at += 30 + sum(struct.unpack_from("<2H", header, 26))
        part = FileSlice(self._file, at, info.compress_size)
        if info.compress_type == 93:
            return Stream(decompress(part.read, "zstd", self._guard))
        try:
            plain = zipfile.ZipExtFile(cast(Any, part), "r", info)
        except (NotImplementedError, zipfile.BadZipFile) as error:
            return _failed_stream(StreamError("unknown_compression", first_line_of(error)))
        read = _watched(_zip_read(plain), info.file_size, lambda: info.compress_size, self._guard)
        return Stream(read, cast(BinaryIO, part) if info.compress_type == zipfile.ZIP_STORED else None)

    def _find_directory(self) -> tuple[int, int, int, int]:
        """(entries, offset, length, shift of all offsets) of the central directory."""
        tail_bytes = min(self._size, 22 + 65535)
        self._file.seek(self._size - tail_bytes)
        tail = self._file.read(tail_bytes)
        found = tail.rfind(b"PK\x05\x06")
        if found < 0 or len(tail) - found < 22:
            raise StreamError("cut_off", "the zip has no directory at its end")
        entries, length, offset = struct.unpack_from("<H2I", tail, found + 10)
        end_at = self._size - tail_bytes + found
        if entries == 0xFFFF or length == 0xFFFFFFFF or offset == 0xFFFFFFFF:
            self._file.seek(max(end_at - 20, 0))
            locator = self._file.read(20)
            if locator[:4] == b"PK\x06\x07":
                end_at = struct.unpack_from("<Q", locator, 8)[0]
                self._file.seek(end_at)
                record = self._file.read(56)
                if record[:4] != b"PK\x06\x06" or len(record) < 56:
                    raise StreamError("damaged_archive", "the zip64 directory is damaged")
                entries, length, offset = struct.unpack_from("<3Q", record, 32)
        start = end_at - length
        if start < 0 or start < offset:
            raise StreamError("damaged_archive", "the zip directory is not where it should be")
        return entries, start, length, start - offset  # something may have been put before the zip


def _zip_info(data: bytes) -> tuple[zipfile.ZipInfo, int]:
    fields = struct.unpack_from("<4s4B4HL2L5H2L", data)
    name_bytes, extra_bytes, comment_bytes = fields[12:15]
    raw_name = data[46 : 46 + name_bytes]
    info = zipfile.ZipInfo(_zip_name(raw_name, fields[5]))
    info.create_system, info.flag_bits, info.compress_type = fields[2], fields[5], fields[6]
    info.CRC, info.compress_size, info.file_size = fields[9:12]
    info.external_attr, info.header_offset = fields[17], fields[18]
    extra = data[46 + name_bytes : 46 + name_bytes + extra_bytes]
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<2H", extra)
        if kind == 1:
            values = list(struct.unpack_from(f"<{min(size, len(extra) - 4) // 8}Q", extra, 4))
            for field in ("file_size", "compress_size", "header_offset"):
                if getattr(info, field) == 0xFFFFFFFF and values:
                    setattr(info, field, values.pop(0))
        extra = extra[4 + size :]
    return info, 46 + name_bytes + extra_bytes + comment_bytes


def _zip_name(raw: bytes, flags: int) -> str:
    """Old zips do not say their encoding: UTF-8 where it fits, else GB18030 (Chinese Windows), else as in DOS."""
    for encoding in ("utf-8", "gb18030"):
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError:
            if flags & 0x800:
                break
    return raw.decode("cp437")


def _zip_read(file: zipfile.ZipExtFile) -> Read:
    """The data of an entry; its check sum is compared at its end."""

    def read(size: int) -> bytes:
        try:
            return file.read1(size)
        except EOFError as error:
            raise StreamError("cut_off", "the zip entry ends too early") from error
        except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, ValueError) as error:
            raise StreamError("damaged_compression", f"zip: {first_line_of(error)}") from error

    return read


# ---- 7z, rar, and zips without a directory --------------------------------------------------------------------


def libarchive_members(file: BinaryIO, guard: Guard, formats: str) -> Iterator[ArchiveMember]:
    """The members of an archive by libarchive. Raises StreamError where the archive breaks off.

    `formats`: `7zip`, `rar` (both generations), or `zip_streamable`, which walks a zip without its directory.
    """
    import libarchive

    stream = _Countable(file, seekable=formats != "zip_streamable")
    format_name = "all" if formats == "rar" else formats
    try:
        with libarchive.stream_reader(stream, format_name, "none", LIBARCHIVE_BLOCK) as archive:
            for number, entry in enumerate(archive):
                yield _libarchive_member(number, entry, stream, guard)
    except ValueError as error:
        raise StreamError("needs_libarchive", f"this libarchive does not read {formats}") from error
    except libarchive.ArchiveError as error:
        raise _libarchive_error(error, stream) from error


def _libarchive_error(error: Any, stream: _Countable) -> StreamError:
    if stream.error is not None:
        return StreamError("read_error", first_line_of(stream.error))
    text = error.msg.decode(errors="replace") if isinstance(error.msg, bytes) else str(error.msg)
    reason = "damaged_archive"
    if re.search("truncated|premature|unexpected end", text, re.IGNORECASE):
        reason = "cut_off"
    elif re.search("encrypt|passphrase", text, re.IGNORECASE):
        reason = "encrypted"
    return StreamError(reason, f"libarchive: {text}"[:EXCERPT_CHARS])  # str(error) has the address of a pointer in it


def _libarchive_member(number: int, entry: Any, stream: _Countable, guard: Guard) -> ArchiveMember:
    def opened() -> Stream:
        # A solid block may be unpacked ahead of the entry that needs it: measured against all that was read.
        return Stream(_watched(_libarchive_read(entry, stream), entry.size, lambda: stream.bytes_read, guard))

    is_link = entry.issym or entry.islnk
    skip = _why_skipped(entry.isdir, is_link, entry.isreg)
    return _member(number, entry.pathname or "", entry.size or 0, skip, opened)


def _libarchive_read(entry: Any, stream: _Countable) -> Read:
    import libarchive

    blocks = iter(entry.get_blocks(LIBARCHIVE_BLOCK))

    def read(_: int) -> bytes:
        try:
            return next(blocks, b"")
        except libarchive.ArchiveError as error:
            raise _libarchive_error(error, stream) from error

    return read


class _Countable(FileSlice):
    """A file that counts what is read from it, and may pretend that it cannot seek."""

    def __init__(self, file: BinaryIO, seekable: bool) -> None:
        super().__init__(file, 0, file.seek(0, os.SEEK_END))
        self._seekable = seekable
        self.bytes_read = 0
        self.error: OSError | None = None

    def seekable(self) -> bool:
        return self._seekable

    def readinto(self, buffer: Any) -> int:
        try:
            size = super().readinto(buffer)
        except OSError as error:  # must not leave through C
            self.error = error
            return -30  # ARCHIVE_FATAL
        self.bytes_read += size
        return size


# ---- entries --------------------------------------------------------------------------------------------------


def _watched(read: Read, size: int | None, packed_bytes: Callable[[], int], guard: Guard) -> Read:
    """The data of an entry: its ratio is checked as it is read, and its `size` at its end."""
    out = 0

    def watched(wanted: int) -> bytes:
        nonlocal out
        data = read(wanted)
        out += len(data)
        guard.check(packed_bytes(), out, len(data))
        if not data and size is not None and out < size:
            raise StreamError("cut_off", "the entry is shorter than the archive says")
        return data

    return watched


def _failed_stream(error: StreamError) -> Stream:
    stream = Stream(lambda _: b"")
    stream.broken = error
    return stream
