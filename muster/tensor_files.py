"""What goes wrong with a safetensors file, as the error that it is.

Owns: `as_os_error`. Promise: within it a full disk, a file that is gone or one that is cut short is
an OSError; the library raises a bare Exception of its own for them, which nothing that waits for a
disk would catch. Does not cover: what the files hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def as_os_error() -> Iterator[None]:
    """Around a call of safetensors. Raises OSError for its SafetensorError."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(f"safetensors: {error}") from error
