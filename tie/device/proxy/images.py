"""Images as OpenAI's API has them: in a data URL (RFC 2397). Other addresses are refused: nobody fetches anything."""

import binascii
from typing import Final

from tie.device.proxy.failures import invalid, unsupported

_DATA: Final = "data:"
_BASE64: Final = ";base64"


def from_url(field: str, url: str) -> bytes:
    """The file in a data URL. Nobody looks into it here; what it is said to be does not matter.

    Raises:
        ApiError: it is another address, or not in base64.
    """
    if not url[: len(_DATA)].lower() == _DATA:
        raise unsupported(field, "must be a data URL: images are not fetched from anywhere")
    head, comma, content = url[len(_DATA) :].partition(",")
    if not comma or not head.lower().endswith(_BASE64):
        raise invalid(field, "must be a data URL in base64")
    try:
        file = binascii.a2b_base64(content.strip().encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        raise invalid(field, "is not base64") from None
    if not file:
        raise invalid(field, "is empty")
    return file
