"""Writing so that it is on disk: whole files, folders, renames."""

import errno
import os
from pathlib import Path

# What file systems answer that cannot sync a folder (some network and user-space ones).
_CANNOT_SYNC_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file at ``path``, on disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path`` in one step: a reader sees the old file or the new one, whole."""
    beside = path.with_name(path.name + ".new")
    write_durably(beside, content)
    os.replace(beside, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in ``folder`` to disk, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_FOLDERS:
            raise
    finally:
        os.close(descriptor)
