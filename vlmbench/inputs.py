"""The photograph and the prompt: what goes into a model, the same on every run.

Needs pillow and numpy only; turning pictures into pixels is the family's image processor's work.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from vlmbench.errors import UsageError

#: Pictures above this many pixels are refused before they are decoded (a decompression bomb, or a scan
#: that would only be shrunk): 50 megapixels, more than a full-frame camera takes.
MAX_PIXELS = 50_000_000
FORMATS = ("JPEG", "PNG", "WEBP")

#: Text of the prompt where a real tokenizer makes it; repeated or cut to the number of tokens asked for.
QUESTION = (
    "Describe the picture in detail: what is shown, where it was taken, which colours and materials stand "
    "out, what the light is like, and what might have happened just before and will happen next. "
)


def photograph() -> Path:
    """Path of the photograph that the package carries (NASA, public domain; see data/astronaut.txt)."""
    return Path(str(resources.files("vlmbench") / "data" / "astronaut.jpg"))


def load_image(path: str) -> Image.Image:
    """The picture at `path` (the package's if empty) as RGB, turned upright as its EXIF data say.

    Raises UsageError for a file that is missing, no JPEG, PNG or WebP, cut off or above MAX_PIXELS.
    """
    where = Path(path) if path else photograph()
    try:
        with Image.open(where, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise UsageError(
                    f"image '{where}' has {image.width} x {image.height} pixels, more than {MAX_PIXELS}: "
                    "shrink it first"
                )
            return (ImageOps.exif_transpose(image) or image).convert("RGB")
    except FileNotFoundError:
        raise UsageError(f"image '{where}' does not exist: give the path of a JPEG, PNG or WebP file") from None
    except (UnidentifiedImageError, Image.DecompressionBombError):
        raise UsageError(f"image '{where}' is not a readable {', '.join(FORMATS)} file: convert it first") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"image '{where}' cannot be read ({error}): is it complete?") from None


def pictures(path: str, batch: int, images: int) -> list[list[Image.Image]]:
    """`images` pictures for each of `batch` rows: the photograph, every second one mirrored.

    Rows differ too (the whole row is flipped), so that mixing rows up changes the output.
    """
    if images == 0:
        return [[] for _ in range(batch)]
    image = load_image(path)
    turned = [image, ImageOps.mirror(image), ImageOps.flip(image), ImageOps.flip(ImageOps.mirror(image))]
    return [[turned[2 * (row % 2) + i % 2] for i in range(images)] for row in range(batch)]


def text_tokens(count: int, low: int, high: int, seed: int) -> list[int]:
    """`count` token ids in [low, high), the same for the same seed on every machine."""
    return random.Random(seed).choices(range(low, high), k=count)


def fingerprint(tensors: Iterable[tuple[str, Any]]) -> str:
    """Hash of named tensors or arrays, 16 hex digits."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors, key=lambda item: item[0]):
        array = value.cpu().numpy() if hasattr(value, "cpu") else value
        digest.update(f"{name}{array.shape}{array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]
