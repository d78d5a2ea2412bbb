"""Opens a file of readings whatever it is packed in, and says what is wrong with it."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from fedjax_hk.data.errors import DataError
from fedjax_hk.data.meters.columns import missing_file

# What a file begins with says more than its name.
_PACKED = {b"\x1f\x8b": "gz", b"\xfd7zXZ\x00": "xz", b"BZh": "bz2", b"PK\x03\x04": "zip"}
_OPEN: dict[str, Callable[..., Any]] = {"gz": gzip.open, "xz": lzma.open, "bz2": bz2.open}
_BROKEN = (EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, gzip.BadGzipFile)
PARQUET = b"PAR1"


class File(NamedTuple):
    """A file that can be read: `packing` is "", "gz", "xz", "bz2" or "zip"."""

    path: Path
    packing: str
    digest: str
    num_bytes: int


def examine(path: str | Path) -> File:
    """The file's packing and the sha256 of its content.

    Errors: DataError if it is missing, a folder, unreadable or empty.
    """
    path = Path(path)
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir() if {".csv", ".parquet"} & {*p.suffixes})
        hint = f" It holds {', '.join(names[:5])}." if names else ""
        raise DataError(f"{path} is a folder. Name a file in it.{hint}")
    if not path.exists():
        raise DataError(missing_file(path))
    try:
        with path.open("rb") as stream:
            start = stream.read(8)
            stream.seek(0)
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            num_bytes = stream.tell()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. Check its permissions."
        ) from error
    if not start:
        raise DataError(f"{path} is empty. A table has a header and one row a time.")
    packing = next((name for magic, name in _PACKED.items() if start.startswith(magic)), "")
    said = path.suffix.lower().removeprefix(".")
    if not packing and said in _PACKED.values():
        raise DataError(f"{path} is no whole .{said} file: its first bytes are {start!r}. Fetch it "
                        "again.")  # fmt: skip
    return File(path, packing, digest, num_bytes)


@contextlib.contextmanager
def unpacked(file: File) -> Iterator[IO[bytes]]:
    """A stream of the unpacked content.

    Errors: DataError, also out of the body, if the file is broken; or if a zip does not hold
      exactly one table.
    """
    with contextlib.ExitStack() as stack:
        try:
            if file.packing == "zip":
                archive = stack.enter_context(zipfile.ZipFile(file.path))
                stream = archive.open(_only_table(file.path, archive))
            else:
                stream = _OPEN.get(file.packing, open)(file.path, "rb")
            yield stack.enter_context(stream)
        except _BROKEN as error:
            raise DataError(
                f"{file.path} is no whole .{file.packing} file ({error}). Fetch it again."
            ) from error
        except RuntimeError as error:  # zipfile's word for a password
            if file.packing != "zip":
                raise
            raise DataError(f"{file.path}: {error}. Unpack it first.") from error


def _only_table(path: Path, archive: zipfile.ZipFile) -> str:
    names = [
        name
        for name in archive.namelist()
        if not name.endswith("/") and not name.startswith("__MACOSX/")
    ]
    tables = [n for n in names if n.lower().endswith((".csv", ".txt", ".tsv", ".parquet"))]
    tables = names if len(names) == 1 else tables
    if len(tables) != 1:
        found = f"{len(tables)} tables ({', '.join(tables[:5])})" if tables else "no table"
        raise DataError(f"{path} holds {found}. Give a zip with one table, or unpack it.")
    return tables[0]


def as_text(path: Path, content: bytes, first_row: int = 1) -> str:
    """The content as text, without a byte order mark; it begins at `first_row` of the file.

    Errors: DataError with row and byte if it is no UTF-8.
    """
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is UTF-16 text. Save it as UTF-8 CSV.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = content.count(b"\n", 0, error.start) + first_row
        raise DataError(
            f"{path}, row {row}: no UTF-8 text (byte {error.start} is "
            f"{content[error.start]:#04x}). Save it as UTF-8 CSV (.csv, .csv.gz, .csv.xz, .zip)."
        ) from error
