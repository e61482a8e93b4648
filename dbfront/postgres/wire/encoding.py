"""A connection's client_encoding, in which its SQL text and our error messages travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tierkv.kvcore.errors import FeatureNotSupportedError

_CODECS: Final = {
    "UTF8": "utf-8",
    "SQL_ASCII": "utf-8",
    "LATIN1": "latin-1",
    "LATIN2": "iso8859-2",
    "LATIN9": "iso8859-15",
    "WIN1250": "cp1250",
    "WIN1251": "cp1251",
    "WIN1252": "cp1252",
    "KOI8R": "koi8-r",
    "EUC_JP": "euc_jp",
    "SJIS": "shift_jis",
    "EUC_KR": "euc_kr",
    "GBK": "gbk",
    "GB18030": "gb18030",
    "BIG5": "big5",
}


def _codec(parameters: Mapping[str, str]) -> str:
    return _CODECS.get(parameters.get("client_encoding", "UTF8").upper(), "")


def decoded(data: bytes, parameters: Mapping[str, str]) -> str:
    """Read text that the client or PostgreSQL sent.

    Bytes that are no text survive, so that PostgreSQL is the one to refuse them.

    Raises:
        FeatureNotSupportedError: an encoding we can't read.
    """
    codec = _codec(parameters)
    if not codec:
        raise FeatureNotSupportedError(
            f"AI calls can't be read in client_encoding {parameters.get('client_encoding')}",
            hint="SET client_encoding = 'UTF8'.",
        )
    return data.decode(codec, "surrogateescape")


def encoded(text: str, parameters: Mapping[str, str]) -> bytes:
    """Write SQL text as the connection expects it."""
    return text.encode(_codec(parameters) or "utf-8", "surrogateescape")


def shown(text: str, parameters: Mapping[str, str]) -> bytes:
    """Write a message for the client; what its encoding lacks becomes a question mark."""
    return text.replace("\0", "").encode(_codec(parameters) or "utf-8", "replace")
