"""Keys and signatures of reports: Ed25519 (RFC 8032), in the files that other tools read, such as OpenSSL.

A private key is PKCS 8 in PEM, readable by its owner only; a public key is SubjectPublicKeyInfo in PEM; a signature is
the 64 bytes of Ed25519 over the bytes of the file.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from rapid.errors import InputError

OTHERS = 0o077


def new_key(path: Path) -> Path:
    """Make a key: the private one at `path`, the public one beside it with the suffix `.pub`.

    Args:
        path: a new file, which gets mode 600.

    Returns:
        The file of the public key.

    Raises:
        InputError: one of the files exists, or cannot be written.
    """
    public = path.with_suffix(".pub") if path.name else path
    if public == path:
        raise InputError("new_key", "is the private key's file, such as key.pem; key.pub is written beside it", path)
    for taken in (path, public):
        if os.path.lexists(taken):
            raise InputError("new_key", "exists already, and no key is overwritten; choose another name", taken)
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_new(path, pem, 0o600)
        try:
            _write_new(public, public_pem(key.public_key()), 0o644)
        except OSError:
            # half a pair is of no use, and would be in the way
            path.unlink()
            raise
    except OSError as error:
        raise InputError("new_key", f"cannot be written ({error.strerror})", path) from None
    return public


def read_private_key(path: Path, field: str = "key") -> Ed25519PrivateKey:
    """Read a private key.

    Raises:
        InputError: missing, readable by others, encrypted, or not an Ed25519 key.
    """
    content = _read(path, field)
    if path.stat().st_mode & OTHERS:
        raise InputError(field, "can be read by others; chmod 600, or make a new key with --new-key", path)
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except TypeError:
        raise InputError(field, "is encrypted; give an unencrypted key", path) from None
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(field, "is no private key in PEM; make one with --new-key", path) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(field, "is not an Ed25519 key; make one with --new-key", path)
    return key


def read_public_key(path: Path, field: str = "public_key") -> Ed25519PublicKey:
    """Read a public key.

    Raises:
        InputError: missing, or not an Ed25519 key.
    """
    try:
        key = serialization.load_pem_public_key(_read(path, field))
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(field, "is no public key in PEM; give the .pub file of the signer", path) from None
    if not isinstance(key, Ed25519PublicKey):
        raise InputError(field, "is not an Ed25519 key; give the .pub file of the signer", path)
    return key


def public_pem(key: Ed25519PublicKey) -> bytes:
    """The public key in PEM."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def fingerprint(key: Ed25519PublicKey) -> str:
    """sha256 (hex) of the public key in DER, by which people compare keys."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def is_signed(key: Ed25519PublicKey, signature: bytes, content: bytes) -> bool:
    """Whether the signature of the content is that of the key."""
    try:
        key.verify(signature, content)
    except InvalidSignature:
        return False
    return True


def _write_new(path: Path, content: bytes, mode: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(handle)
    except OSError:
        path.unlink()
        raise


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(field, f"cannot be read ({error.strerror}); give a file in PEM", path) from None
