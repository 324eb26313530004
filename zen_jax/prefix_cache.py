"""Names of what pages of the cache hold: a chain of hashes over a sequence's beginning.

The keys and values of a page follow from the model that made them and from all tokens up to its
end. So a page's key is a SHA-256 hash of the key of the page before it and of its own tokens, and
the chain begins with who may share it and with what it was made by. Every part is preceded by its
length: no two different sequences of parts are the same bytes.
"""

import hashlib
import struct
from collections.abc import Sequence

# Changes when keys, or what pages hold, are made in another way.
_FORM = b"zen-kv-1"


def root(tenant: str, variant: str, base: str, page_size: int) -> bytes:
    """What the chain of a request begins with, 32 bytes.

    Args:
      tenant: requests of different tenants share nothing.
      variant: the digest of the variant; empty for the base.
      base: the digest of the base.
      page_size: P.
    """
    return _hash(_FORM, tenant.encode(), variant.encode(), base.encode(), b"%d" % page_size)


def page_keys(before: bytes, tokens: Sequence[int], page_size: int) -> tuple[bytes, ...]:
    """The keys of all whole pages of a sequence.

    Args:
      before: of `root`.
      tokens: of the sequence, from its beginning; a page that they do not fill gets no key.
      page_size: P.
    """
    made, last = [], before
    for start in range(0, len(tokens) - page_size + 1, page_size):
        own = struct.pack(f"<{page_size}I", *tokens[start : start + page_size])
        last = _hash(last, own)
        made.append(last)
    return tuple(made)


def _hash(*parts: bytes) -> bytes:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.digest()
