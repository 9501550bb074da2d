"""What has become of the output directory when a run can't write there any more: told instead of a traceback."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

_LIMITS = {errno.EDQUOT, errno.EFBIG}
_TORCH_WRITES = re.compile(r"PytorchStreamWriter failed writing|inline_container\.cc.*unexpected pos|iostream error")
"""What torch says of a file that it could not write."""

_LITTLE = 256 * 1024
"""Bytes left with which a disk counts as full."""


def output_lost(output_dir: Path, error: BaseException | None = None) -> str | None:
    """Why nothing can be written to `output_dir`, in words; None if that is not what is wrong.

    Args:
        error: what was raised; it may be the consequence of anything.
    """
    where = f"output_dir={output_dir}"
    if not output_dir.is_dir():
        return f"{where}: the directory was deleted while the run wrote to it"
    try:
        space = os.statvfs(output_dir)
    except OSError as problem:
        return f"{where}: {problem.strerror}"
    if space.f_flag & os.ST_RDONLY:
        return f"{where}: the file system can only be read"
    codes = {link.errno for link in _chain(error) if isinstance(link, OSError) and _is_in(link, output_dir)}
    if space.f_bavail * space.f_frsize < _LITTLE or errno.ENOSPC in codes:
        return f"{where}: no space is left on this disk"
    if codes & _LIMITS or any(
        isinstance(link, RuntimeError) and _TORCH_WRITES.search(str(link)) for link in _chain(error)
    ):
        return f"{where}: a file could not be written to its end: no space, a quota, or a limit (ulimit -f)"
    if codes & {errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE, errno.EISDIR, errno.ENOTDIR, errno.EEXIST}:
        worst = next(link for link in _chain(error) if isinstance(link, OSError) and _is_in(link, output_dir))
        return f"{worst.filename}: cannot be written: {worst.strerror}"
    return None


def _is_in(error: OSError, directory: Path) -> bool:
    return isinstance(error.filename, str | os.PathLike) and Path(error.filename).is_relative_to(directory)


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links
