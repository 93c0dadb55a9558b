"""The objects directly below a URL of an fsspec file system: list, create exclusively, remove, and the claim."""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from statexchange.errors import (
    NotFoundError,
    StateExchangeError,
    StorageError,
    TargetExistsError,
    UnsupportedError,
    without_secrets,
)
from statexchange.storage.files import audit
from statexchange.storage.fsspec_store import (
    FsspecStore,
    file_system,
    is_missing_bucket,
    storage_errors,
    version_of_info,
)
from statexchange.storage.publish.claim import CLAIM_NAME, Claim

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

_log = logging.getLogger(__name__)
_PART_BYTES = 16 << 20  # of a multipart upload; stores require at least 5 MiB
_MAX_PARTS = 9000  # S3 takes 10,000
_COPIED_BYTES = 256 << 20  # a part that a store copies itself, which takes it seconds
_COPIES = 8  # parts that are copied at a time
_LEAST_PART_BYTES = 5 << 20  # S3 takes smaller ones only as the last
_LEAST_COPIED_BYTES = 16 << 20  # what is smaller is uploaded as fast
_READ_ONLY = ("http", "https", "data", "github", "zip", "tar")


@contextlib.contextmanager
def conditional(doing: str, url: str) -> Iterator[None]:
    """Translate errors like `storage_errors`; a failed condition (s3fs reports EINVAL) becomes TargetExistsError."""
    try:
        with storage_errors(doing, url):
            yield
    except StorageError as error:
        if error.errno == errno.EINVAL and "pre-condition" in error.message:
            raise TargetExistsError("the object exists, or was changed", path=error.path) from None
        raise


class Objects:
    """The objects directly below a URL, by name."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.path = without_secrets(self.url)
        scheme = url.partition("://")[0].partition("::")[0]  # of the outermost file system of a chain
        if scheme in _READ_ONLY:
            raise UnsupportedError(
                f"{scheme}:// is read-only: publish to a directory or an object store", path=self.path
            )
        self._system, path = file_system(url)
        self._base = path.rstrip("/")
        protocols = self._system.protocol  # a text, or several
        self._has_conditions = "s3" in ([protocols] if isinstance(protocols, str) else protocols)

    def path_of(self, name: str) -> str:
        """Return the URL of an object, for messages."""
        return f"{self.path}/{name}"

    def store(self) -> FsspecStore:
        """Return a new store of the directory; its listing raises NotFoundError if it does not exist."""
        return FsspecStore(self.url, self._system, self._base)

    def list_infos(self) -> dict[str, Mapping[str, Any]]:
        """List all objects below the directory: fsspec's info of each by its path in the directory."""
        audit("list", self.path)
        # fsspec file systems remember listings, and other processes put objects.
        self._system.invalidate_cache()
        infos: dict[str, Mapping[str, Any]] = {}
        base = self._base.strip("/")
        folders = [self._base]
        while folders:
            folder = folders.pop()
            for info in self._list(folder):
                path = str(info["name"]).rstrip("/")
                name = path.strip("/")
                if info["type"] == "directory":
                    # Some file systems list a directory itself, too.
                    if name != folder.strip("/"):
                        folders.append(path)
                elif name == base:  # `ls` of an object lists the object itself
                    raise TargetExistsError("the target is an object, not a directory", path=self.path)
                else:
                    infos[name.removeprefix(f"{base}/")] = info
        return infos

    def _list(self, path: str) -> list[Mapping[str, Any]]:
        """Return fsspec's info of each entry of a directory; [] if it does not exist."""
        try:
            with storage_errors("list", self.url):
                # Not `find`: that of most file systems takes a directory that cannot be listed for an empty one.
                entries: list[Mapping[str, Any]] = self._system.ls(path, detail=True)
        except NotFoundError as error:
            if is_missing_bucket(error):
                raise
            return []
        return entries

    def version(self, name: str) -> str | None:
        """Return an object's version; None if it does not exist."""
        try:
            with storage_errors("look up", f"{self.url}/{name}"):
                self._system.invalidate_cache()
                return version_of_info(self._system.info(f"{self._base}/{name}")) or ""
        except NotFoundError:
            return None

    def put(self, name: str, data: bytes, *, overwrite: bool = False) -> None:
        """Put a small object; raise TargetExistsError if the name exists, unless with `overwrite`."""
        audit("put", self.path_of(name))
        with conditional("put", f"{self.url}/{name}"):
            self._system.pipe_file(f"{self._base}/{name}", data, mode="overwrite" if overwrite else "create")

    def open_new(self, name: str, nbytes: int) -> Any:
        """Begin to upload an object of `nbytes` bytes; closing it raises TargetExistsError if the name exists then."""
        audit("create", self.path_of(name))
        part_bytes = max(_PART_BYTES, -(-nbytes // _MAX_PARTS))
        with conditional("create", f"{self.url}/{name}"):
            return self._system.open(f"{self._base}/{name}", "xb", block_size=part_bytes)

    def original(self, url: str, version: str, nbytes: int) -> str | None:
        """Return the path of the object at a URL, from which `copy_new` copies, if it has this version.

        None also if it is small, or if this store does not create a copy exclusively: of those of fsspec only S3 does.
        """
        if not self._has_conditions or nbytes < _LEAST_COPIED_BYTES:
            return None
        folder, _, name = url.rpartition("/")
        others = Objects(folder)
        return f"{others._base}/{name}" if others.version(name) == version else None

    def copy_new(self, name: str, original: str, version: str, nbytes: int, progress: Callable[[], object]) -> None:
        """Have S3 copy an object of this version; raise TargetExistsError if the name exists then.

        It is copied in parts, as an upload, since only the end of an upload can be made to fail if the name exists.

        S3 makes the ETag of an upload from the bytes of its parts. A removal must not take another publisher's copy of
        the same original for its own, so the first part has one of millions of sizes, which makes the ETag another one.
        """
        bucket, _, key = f"{self._base}/{name}".partition("/")
        source_bucket, _, source_key = original.partition("/")
        source = {"CopySource": {"Bucket": source_bucket, "Key": source_key}, "CopySourceIfMatch": version}
        part_bytes = max(_COPIED_BYTES, -(-nbytes // _MAX_PARTS))
        first_bytes = _LEAST_PART_BYTES + secrets.randbelow(min(part_bytes, nbytes - _LEAST_PART_BYTES))
        # Part number n is the bytes from bounds[n - 1] to bounds[n]; S3 counts parts from 1.
        bounds = [0, *range(first_bytes, nbytes, part_bytes), nbytes]
        url = self.path_of(name)
        audit("create", url)
        with storage_errors("copy", url):
            upload = self._system.call_s3("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
        target = {"Bucket": bucket, "Key": key, "UploadId": upload}

        def copied(number: int) -> dict[str, Any]:
            extent = {"CopySourceRange": f"bytes={bounds[number - 1]}-{bounds[number] - 1}"}  # with the last byte
            # Not `conditional`, which would take an original of another version for a name that exists.
            with storage_errors("copy", url):
                answer = self._system.call_s3("upload_part_copy", **target, **source, **extent, PartNumber=number)
            progress()
            return {"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]}

        try:
            with ThreadPoolExecutor(_COPIES) as pool:
                parts = list(pool.map(copied, range(1, len(bounds))))
            audit("put", url)
            last = {"MultipartUpload": {"Parts": parts}, "IfNoneMatch": "*"}
            with conditional("put", url):
                self._system.call_s3("complete_multipart_upload", **target, **last)
        except BaseException:  # an interrupt, too: parts of an upload that is not cancelled cost money
            with contextlib.suppress(Exception):  # the first failure counts, and the next publisher cancels it, too
                self._system.abort_mpu(bucket, key, upload)
            raise

    def remove(self, name: str, version: str) -> bool:
        """Remove the object if it still has this version; return False if it has another one. It may be absent.

        S3 compares and removes in one request. For other stores the caller has looked the version up just before.
        """
        key = f"{self._base}/{name}"
        try:
            with conditional("remove", f"{self.url}/{name}"):
                if self._has_conditions:
                    audit("remove if unchanged", self.path_of(name))
                    bucket, _, in_bucket = key.partition("/")
                    self._system.call_s3("delete_object", Bucket=bucket, Key=in_bucket, IfMatch=version)
                else:
                    self._system.rm_file(key)
        except NotFoundError:
            pass
        except TargetExistsError:
            return False
        return True

    def cancel_uploads(self, names: Collection[str]) -> None:
        """Cancel unfinished uploads of these objects, which killed processes have left; for S3 only.

        Their parts are invisible and cost money. A failure is only logged: a user may lack permission to list uploads.
        """
        if not self._has_conditions:
            return
        bucket, _, base = self._base.partition("/")
        audit("cancel uploads", self.path)
        try:
            with storage_errors("list uploads", self.url):
                answer = self._system.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{base}/")
                for upload in answer.get("Uploads") or ():
                    folder, _, name = str(upload["Key"]).rpartition("/")
                    if folder == base and name in names:
                        self._system.abort_mpu(bucket, upload["Key"], upload["UploadId"])
        except StateExchangeError as error:
            _log.debug("unfinished uploads stay until the bucket's rules remove them: %s", error)

    # The claim

    def read_claim(self) -> Claim | None:
        """Return the present claim; None without one."""
        path = self.path_of(CLAIM_NAME)
        try:
            with storage_errors("read", path):
                data = self._system.cat_file(f"{self._base}/{CLAIM_NAME}")
        except NotFoundError:
            return None
        return Claim.parse(bytes(data), path)

    def replace_claim(self, claim: Claim, present: Claim) -> None:
        """Replace the claim `present`, unless it has changed or was removed."""
        path = self.path_of(CLAIM_NAME)
        audit("renew" if claim.nonce == present.nonce else "take over", path)
        # The version before the content: if the claim changes between the two, S3 refuses the put.
        version = self.version(CLAIM_NAME)
        if self.read_claim() != present:
            return
        condition = {"IfMatch": version} if self._has_conditions else {}
        try:
            with conditional("put", path):
                self._system.pipe_file(f"{self._base}/{CLAIM_NAME}", claim.to_bytes(), mode="overwrite", **condition)
        except (TargetExistsError, NotFoundError):  # another publisher has replaced the claim, or it was removed
            return
