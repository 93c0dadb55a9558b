"""Object stores that several processes share: one on the disk, and a client of S3 that starts fast."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from statexchange.storage.publish.object_build import ObjectBuild


class DiskFileSystem(LocalFileSystem):
    """An object store for several processes: small objects appear whole, and puts have no condition but create."""

    protocol = "disk"

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return super()._strip_protocol(path.removeprefix("disk://"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        path = self._strip_protocol(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{os.path.dirname(os.path.dirname(path))}/tmp-{os.urandom(8).hex()}"
        Path(temporary).write_bytes(value)
        if mode == "create":
            try:
                os.link(temporary, path)
            finally:
                os.unlink(temporary)
        else:
            os.replace(temporary, path)


def use_object_stores(*, take_over_s: float = 0.4, renew_s: float = 0.1) -> None:
    fsspec.register_implementation("disk", DiskFileSystem, clobber=True)
    ObjectBuild.take_over_s, ObjectBuild.renew_s = take_over_s, renew_s


def import_s3() -> None:
    """Import what a client of S3 needs, and keep what it reads from files, so that forked processes find it.

    Half of the processor time of a publication to S3 goes into that otherwise.
    """
    import botocore.session
    import s3fs  # noqa: F401 (fsspec imports it at the first s3:// otherwise)
    from botocore.loaders import JSONFileLoader, Loader

    load = cache(JSONFileLoader().load_file)

    class LoadOnce(JSONFileLoader):
        def load_file(self, file_path: str) -> Any:
            return load(file_path)

    Loader.FILE_LOADER_CLASS = LoadOnce
    botocore.session.get_session().create_client("s3")


def names_at(url: str) -> list[str]:
    """Return the names of the objects below a URL."""
    system, path = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    try:
        return sorted(name.rstrip("/").rpartition("/")[2] for name in system.ls(path, detail=False))
    except FileNotFoundError:
        return []


def uploads_in(url: str) -> list[str]:
    """Return the names whose uploads to the bucket of a URL are neither complete nor cancelled."""
    answer = fsspec.filesystem("s3").call_s3("list_multipart_uploads", Bucket=url.split("/")[2])
    return [upload["Key"] for upload in answer.get("Uploads") or ()]
