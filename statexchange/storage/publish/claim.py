"""The claim: an object in a directory of an object store that names the process publishing there.

An object store can neither rename a directory nor lock one. The claim stands in for both. Its states:

* absent: no process publishes here. A manifest, if there is one, describes a whole checkpoint.
* present, no manifest: a publisher is writing, or died while it wrote. Readers refuse the directory.
* present, manifest present: a publisher is about to remove the claim, or died before it could. The checkpoint is whole.

Only the publisher writes the claim: it creates it exclusively, renews it while it writes, and removes it after the
manifest. After a failure another publisher replaces it. object_build.py has the protocol; readers need only `claim_of`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statexchange.errors import CorruptError, NotFoundError, ReplacedError
from statexchange.processes import Owner
from statexchange.storage.location import parse_json
from statexchange.storage.store import Budget

if TYPE_CHECKING:
    from collections.abc import Iterable

    from statexchange.storage.store import Store

CLAIM_NAME = ".statexchange-claim.json"
_SCHEMA = 1
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Claim:
    """A publisher's claim.

    Attributes:
        nonce: random digits that identify the build.
        owner: the publisher's process.
        since: start time, in ISO format.
        plan: digest of the merge plan.
        names: objects that the publisher may put, and objects of earlier publishers that it will remove.
        renewal: counter of renewals, so that no two contents of a claim are equal.
    """

    nonce: str
    owner: Owner
    since: str
    plan: str
    names: frozenset[str]
    renewal: int = 0

    @classmethod
    def new(cls, nonce: str, plan: str, names: Iterable[str]) -> Claim:
        """Return a claim of this process with the present time."""
        from datetime import datetime, timezone  # for writers only

        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(nonce, Owner.current(), since, plan, frozenset(names))

    def to_bytes(self) -> bytes:
        """Return the object's content."""
        record = {
            "schema": _SCHEMA,
            "nonce": self.nonce,
            "owner": self.owner.to_json(),
            "since": self.since,
            "plan": self.plan,
            "names": sorted(self.names),
            # Nobody reads them, but statexchange up to 0.2 refuses a claim without.
            "versions": {},
            "renewal": self.renewal,
        }
        return json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def parse(cls, data: bytes, path: str) -> Claim:
        """Return the claim that `to_bytes` encoded; raise CorruptError for anything else."""
        raw: Any = parse_json(data, path, Budget(path))
        try:
            if raw["schema"] != _SCHEMA or type(raw["renewal"]) is not int:
                raise ValueError("unknown schema")
            names = raw["names"]
            texts = [raw["nonce"], raw["since"], raw["plan"], *names]
            if not all(isinstance(text, str) for text in texts) or not isinstance(names, list):
                raise ValueError("a name is not text")
            # The next publisher removes these objects, whoever has written the claim.
            for name in names:
                if not {"", ".", ".."}.isdisjoint(name.split("/")):
                    raise ValueError("the name of an object leads out of the directory")
            owner = Owner.from_json(raw["owner"])
            return cls(raw["nonce"], owner, raw["since"], raw["plan"], frozenset(names), raw["renewal"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"broken claim: {error}", path=path) from None

    def __str__(self) -> str:
        return f"{self.owner} has been publishing here since {self.since}"


def claim_of(store: Store) -> str | None:
    """Describe the process that publishes in a directory or was interrupted there; None without a claim.

    Not collective.
    """
    if CLAIM_NAME not in store.listing:
        return None
    try:
        return str(Claim.parse(store.read_small(CLAIM_NAME, _MAX_BYTES), store.path_of(CLAIM_NAME)))
    except (NotFoundError, ReplacedError):  # removed meanwhile
        return None
    except CorruptError:
        return "a process whose claim cannot be read has been publishing here"
