"""What tests read in the SVG pictures that the package draws."""

from __future__ import annotations

import xml.etree.ElementTree as ET

__all__ = ["SVG", "texts"]

SVG = "{http://www.w3.org/2000/svg}"
"""What stands before the name of each element."""


def texts(root: ET.Element) -> list[str]:
    """Return the contents of all texts of a picture, in the order of the file."""
    return [text.text or "" for text in root.iter(f"{SVG}text")]
