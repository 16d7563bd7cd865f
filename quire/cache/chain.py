"""The chain of hashes that names a prefix by its content, the same on every device and for every page size.

A link covers 16 tokens: its key is a hash of the link before it and of its tokens. The first link follows a root, which
is a hash of the weights' version, the adapter's digest and the salt. So a key says which bytes belong to it: those that
these weights compute for these tokens, for this tenant. A page is named by the key at its last token.
"""

from __future__ import annotations

from hashlib import blake2b

from quire.types.plans import TOKEN_BYTES

KEY_BYTES = 20  # 160 bits: collisions are out of reach of an attacker
LINK_TOKENS = 16
LINK_BYTES = LINK_TOKENS * TOKEN_BYTES


def root_key(weights: bytes = b"", adapter: bytes = b"", salt: bytes = b"") -> bytes:
    """Return the key before the first token. `weights`: their version; `adapter`: its digest, empty without one."""
    parts = b"".join(len(part).to_bytes(4, "little") + part for part in (weights, adapter, salt))
    return blake2b(b"quire/prefix/2" + parts, digest_size=KEY_BYTES).digest()


def link_key(parent: bytes, tokens: bytes) -> bytes:
    """Return the key after `tokens`, at most one link's, which follow the link or root `parent`."""
    return blake2b(parent + tokens, digest_size=KEY_BYTES).digest()


def link_keys(parent: bytes, tokens: bytes) -> list[bytes]:
    """Return the key of each link of `tokens`, a whole number of links that follow the link or root `parent`."""
    keys = []
    for begin in range(0, len(tokens), LINK_BYTES):  # no call of `link_key`: a long prompt has thousands of links
        parent = blake2b(parent + tokens[begin : begin + LINK_BYTES], digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys
