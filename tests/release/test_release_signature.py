"""Keys and signatures, compared with OpenSSL where it is installed."""

from __future__ import annotations

import hashlib
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from rapid.errors import InputError
from rapid.release.signature import fingerprint, is_signed, new_key, read_private_key, read_public_key


def test_a_new_key_is_secret_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "key.pem"
    public = new_key(path)
    assert public == tmp_path / "keys" / "key.pub"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"PRIVATE" not in public.read_bytes()
    before = path.read_bytes(), public.read_bytes()
    with pytest.raises(InputError, match="no key is overwritten"):
        new_key(path)
    path.rename(tmp_path / "moved.pem")
    with pytest.raises(InputError, match="no key is overwritten"):
        new_key(path)
    assert ((tmp_path / "moved.pem").read_bytes(), public.read_bytes()) == before
    assert not path.exists()
    (tmp_path / "link.pem").symlink_to(tmp_path / "nowhere")
    for bad in (tmp_path / "link.pem", tmp_path / "key.pub", public / "key.pem", Path(), Path("/")):
        with pytest.raises(InputError):
            new_key(bad)
    assert not (tmp_path / "nowhere").exists()
    # the public key's file cannot be written: nothing is left
    long = tmp_path / f"{'x' * 252}.p"
    with pytest.raises(InputError, match="cannot be written"):
        new_key(long)
    assert not long.exists()


def test_vector_of_rfc_8032() -> None:
    """Section 7.1, test 2."""
    public = Ed25519PublicKey.from_public_bytes(
        bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
    )
    signature = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    assert is_signed(public, signature, b"\x72")
    assert not is_signed(public, signature, b"\x73")
    assert not is_signed(public, signature[:-1], b"\x72")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_openssl_agrees(tmp_path: Path) -> None:
    public = new_key(tmp_path / "key.pem")
    key = read_private_key(tmp_path / "key.pem")
    (tmp_path / "content").write_bytes(b"content")
    (tmp_path / "signature").write_bytes(key.sign(b"content"))
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin", "-in", tmp_path / "content"]
    command += ["-sigfile", tmp_path / "signature"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-in", public, "-outform", "DER"], capture_output=True, check=True
    ).stdout
    assert fingerprint(read_public_key(public)) == hashlib.sha256(der).hexdigest()
    (tmp_path / "content").write_bytes(b"contend")
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_other_keys_are_refused(tmp_path: Path) -> None:
    public, path = new_key(tmp_path / "key.pem"), tmp_path / "key.pem"
    pem = serialization.Encoding.PEM
    pkcs8 = serialization.PrivateFormat.PKCS8
    locked = Ed25519PrivateKey.generate().private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"secret"))
    other = rsa.generate_private_key(65537, 2048)
    files = {
        "locked.pem": (locked, "is encrypted"),
        "rsa.pem": (other.private_bytes(pem, pkcs8, serialization.NoEncryption()), "not an Ed25519 key"),
        "text.pem": (b"hello", "no private key in PEM"),
        "public.pem": (public.read_bytes(), "no private key in PEM"),
    }
    for name, (content, words) in files.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o600)
        with pytest.raises(InputError, match=words):
            read_private_key(tmp_path / name)
    path.chmod(0o640)
    with pytest.raises(InputError, match="can be read by others"):
        read_private_key(path)
    rsa_public = other.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "rsa.pub").write_bytes(rsa_public)
    for bad in (tmp_path / "rsa.pub", path, tmp_path / "none.pub", tmp_path):
        with pytest.raises(InputError):
            read_public_key(bad)
