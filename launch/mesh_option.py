"""``--mesh dp=16,tp=8``: the axes of a logical mesh, the outermost first."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tpu_dist.launch.errors import LaunchError


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOption:
    """A logical mesh as given on the command line."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def axis(self, name: str) -> int:
        """Return which axis is called so.

        Raises:
            LaunchError: none is.
        """
        if name not in self.names:
            raise LaunchError(f"--axis {name!r}: the mesh has {', '.join(self.names)}")
        return self.names.index(name)


def parse_mesh(text: str) -> MeshOption:
    """Read the axes of a mesh.

    Raises:
        LaunchError: the text is not written so, or a name comes twice.

    Example:
        >>> parse_mesh("dp=16,tp=8").sizes
        (16, 8)
    """
    pairs = [
        re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([1-9]\d{0,8})\s*", part) for part in text.split(",")
    ]
    matches = [pair for pair in pairs if pair is not None]
    names = tuple(match[1] for match in matches)
    if len(matches) != len(pairs) or len(set(names)) != len(names):
        raise LaunchError(
            f"--mesh {text!r}: expected names and sizes, the outermost first and each name once, "
            f"as in dp=16,tp=8"
        )
    return MeshOption(names=names, sizes=tuple(int(match[2]) for match in matches))
